#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "error.h"

namespace hkv {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kSpins = 2000;  // rounds of `relax` between looks at the clock
constexpr auto kSpinTime = std::chrono::microseconds(200);

thread_local const Pool *current_pool = nullptr;
thread_local int current_worker = 0;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

void pin(std::thread &thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  if (pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set) != 0)
    throw Invalid("affinity names CPU " + std::to_string(cpu) + ", which this process may not use");
}

}  // namespace

Pool::Pool(int threads, const int32_t *affinity, int num_affinity) : process_(getpid()) {
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
  if (count == 1 || process_ != getpid()) {  // a forked child has no workers
    take_items_here();
    if (failure_) std::rethrow_exception(failure_);
    return;
  }
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    round_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  take_items_here();
  while (busy_.load(std::memory_order_acquire) > 0) relax();
  if (failure_) std::rethrow_exception(failure_);
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
  uint64_t seen = 0;
  for (;;) {
    auto until = std::chrono::steady_clock::now() + kSpinTime;
    while (round_.load(std::memory_order_acquire) == seen && !stop_.load()) {
      for (int i = 0; i < kSpins && round_.load(std::memory_order_relaxed) == seen; ++i) relax();
      if (std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return round_.load() != seen || stop_.load(); });
      }
    }
    if (stop_.load()) return;
    seen = round_.load(std::memory_order_acquire);
    take_items(worker);
    busy_.fetch_sub(1, std::memory_order_release);
  }
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

void hkv_pool_destroy(hkv_pool *pool) { delete pool; }

int32_t hkv_pool_threads(const hkv_pool *pool) { return pool == nullptr ? 1 : pool->threads(); }

}  // extern "C"
