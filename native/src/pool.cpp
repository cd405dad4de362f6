#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "error.h"

namespace hkv {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kSpins = 200;  // rounds of `relax` between looks at the clock

using Clock = std::chrono::steady_clock;
constexpr auto kShortSpin = std::chrono::microseconds(200);
constexpr auto kLongSpin = std::chrono::milliseconds(2);  // a device's part of a layer takes less
constexpr auto kLostCore = std::chrono::microseconds(200);  // away for so long: others want the core

constexpr int kLoopShift = 32, kSeatShift = 16;
constexpr uint64_t kSeat = uint64_t{1} << kSeatShift, kInside = kSeat - 1, kSeats = kInside << kSeatShift;

thread_local const Pool *current_pool = nullptr;
thread_local int current_worker = 0;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

uint32_t loop_of(uint64_t gate) { return static_cast<uint32_t>(gate >> kLoopShift); }

void pin(std::thread &thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  if (pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set) != 0)
    throw Invalid("affinity names CPU " + std::to_string(cpu) + ", which this process may not use");
}

}  // namespace

/// How long a worker spins: long where one of the last two pauses between loops would have ended by
/// then, since a pause between tokens is longer than those between layers.
struct Pool::Patience {
  bool was_short = false, is_short = false;

  Clock::duration spin() const {
    return was_short || is_short ? Clock::duration(kLongSpin) : Clock::duration(kShortSpin);
  }
  void learn(Clock::duration pause) {
    was_short = is_short;
    is_short = pause <= kLongSpin;
  }
};

Pool::Pool(int threads, const int32_t *affinity, int num_affinity)
    : process_(getpid()), threads_(threads) {
  if (threads < 1 || threads > kMaxThreads)
    throw Invalid("threads must be 1.." + std::to_string(kMaxThreads) + ", got " +
                  std::to_string(threads));
  for (int i = 0; i < num_affinity; ++i)
    if (affinity[i] < 0 || affinity[i] >= CPU_SETSIZE)
      throw Invalid("affinity names CPU " + std::to_string(affinity[i]) + ", which does not exist");
  try {
    for (int worker = 1; worker < threads; ++worker) {
      workers_.emplace_back([this, worker] { work(worker); });
      if (num_affinity > 0) pin(workers_.back(), affinity[(worker - 1) % num_affinity]);
    }
  } catch (...) {
    shut_down();
    throw;
  }
}

Pool::~Pool() { shut_down(); }

void Pool::close() {
  std::lock_guard<std::mutex> alone(caller_);
  shut_down();
  workers_.clear();
}

void Pool::shut_down() {
  if (process_ != getpid()) {  // a forked child has no workers to wait for
    for (auto &worker : workers_) worker.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto &worker : workers_) worker.join();
}

void Pool::run(int64_t count, const Body &body) {
  if (count <= 0) return;
  if (current_pool == this) {
    for (int64_t item = 0; item < count; ++item) body(item, current_worker);
    return;
  }
  std::lock_guard<std::mutex> alone(caller_);  // worker 0's scratch is not shared either
  count_ = count;
  body_ = &body;
  failure_ = nullptr;
  next_.store(0, std::memory_order_relaxed);
  if (count == 1 || workers_.empty() || process_ != getpid()) {  // a forked child has none
    take_items_here();
    if (failure_) std::rethrow_exception(failure_);
    return;
  }
  const int num_workers = static_cast<int>(workers_.size());
  const int seats = static_cast<int>(std::min<int64_t>(count - 1, num_workers));
  const uint64_t loop = loop_of(gate_.load(std::memory_order_relaxed)) + uint64_t{1};
  gate_.store(loop << kLoopShift | static_cast<uint64_t>(seats) << kSeatShift);
  call_sleepers(seats);
  take_items_here();
  gate_.fetch_and(~kSeats);
  while ((gate_.load(std::memory_order_acquire) & kInside) > 0) {
    for (int i = 0; i < kSpins && (gate_.load(std::memory_order_relaxed) & kInside) > 0; ++i)
      relax();
    std::this_thread::yield();  // to a worker that lost its core with an item in hand
  }
  if (failure_) std::rethrow_exception(failure_);
}

/// Wakes as many workers as there are seats that those awake leave.
///
/// One that falls asleep meanwhile sees the loop, or is counted here: both sides write before they
/// read, in one order for all.
void Pool::call_sleepers(int seats) {
  const int sleeping = sleeping_.load();
  const int called = std::min(sleeping, seats - (threads() - 1 - sleeping));
  if (called <= 0) return;
  calls_.fetch_add(called, std::memory_order_relaxed);
  { std::lock_guard<std::mutex> lock(mutex_); }
  if (called == sleeping) return wake_.notify_all();
  for (int i = 0; i < called; ++i) wake_.notify_one();
}

void Pool::take_items_here() noexcept {
  const Pool *outer = current_pool;
  const int outer_worker = current_worker;
  current_pool = this;
  current_worker = 0;
  take_items(0);
  current_pool = outer;
  current_worker = outer_worker;
}

void Pool::take_items(int worker) noexcept {
  try {
    for (;;) {
      const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= count_) return;
      (*body_)(item, worker);
    }
  } catch (...) {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_) failure_ = std::current_exception();
    next_.store(count_, std::memory_order_relaxed);
  }
}

void Pool::work(int worker) {
  current_pool = this;
  current_worker = worker;
  Patience patience;
  uint32_t seen = 0;
  for (;;) {
    seen = await_loop(seen, patience);
    if (stop_.load()) return;
    if (!enter(seen)) continue;
    take_items(worker);
    gate_.fetch_sub(1, std::memory_order_release);
  }
}

/// Returns the number of the next loop after `seen`, or any where the pool stops.
uint32_t Pool::await_loop(uint32_t seen, Patience &patience) {
  const auto begin = Clock::now(), until = begin + patience.spin();
  const auto is_over = [&] { return loop_of(gate_.load(std::memory_order_acquire)) != seen; };
  bool is_lost = false;
  for (auto looked = begin; !is_over() && !stop_.load();) {
    for (int i = 0; i < kSpins && !is_over(); ++i) relax();
    std::this_thread::yield();
    const auto now = Clock::now();
    is_lost |= now - looked > kLostCore;
    if (now > until || is_lost) sleep(seen);
    looked = now;
  }
  patience.learn(is_lost ? Clock::duration::max() : Clock::now() - begin);
  return loop_of(gate_.load(std::memory_order_acquire));
}

void Pool::sleep(uint32_t seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  sleeping_.fetch_add(1);
  wake_.wait(lock, [&] { return loop_of(gate_.load()) != seen || stop_.load(); });
  sleeping_.fetch_sub(1);
}

/// Takes a seat; false where none is left or the loop is over.
bool Pool::enter(uint32_t loop) {
  uint64_t gate = gate_.load(std::memory_order_relaxed);
  while (loop_of(gate) == loop && (gate & kSeats) != 0)
    if (gate_.compare_exchange_weak(gate, gate - kSeat + 1, std::memory_order_acquire,
                                    std::memory_order_relaxed)) {
      joins_.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
  return false;
}

void parallel_for(Pool *pool, int64_t count, const Pool::Body &body) {
  if (pool != nullptr) {
    pool->run(count, body);
    return;
  }
  for (int64_t item = 0; item < count; ++item) body(item, 0);
}

}  // namespace hkv

extern "C" {

int hkv_pool_create(int32_t threads, const int32_t *affinity, int32_t num_affinity,
                    hkv_pool **pool) {
  return hkv::guarded([&] {
    hkv::require(pool != nullptr, "pool must not be NULL");
    *pool = new hkv_pool(threads, affinity, affinity == nullptr ? 0 : num_affinity);
  });
}

int hkv_pool_close(hkv_pool *pool) {
  return hkv::guarded([&] {
    hkv::require(pool != nullptr, "pool must not be NULL");
    pool->close();
  });
}

void hkv_pool_destroy(hkv_pool *pool) { delete pool; }

int32_t hkv_pool_threads(const hkv_pool *pool) { return pool == nullptr ? 1 : pool->threads(); }

}  // extern "C"
