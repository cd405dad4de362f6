// Worker threads for loops over independent items (KV heads, blocks of queries).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "hybrid_kv.h"

namespace hkv {

/// Runs a loop's items on the calling thread and on as many workers as there are further items.
///
/// Workers spin between loops, because decoding enters the pool once per layer and waking a
/// sleeping thread costs as much as a search. They spin longer while loops follow each other, and
/// sleep where loops are rare or other threads want their core. Whoever comes when all items are
/// taken is not waited for.
class Pool {
 public:
  /// `item` and the number of the worker that runs it, 0 .. threads() - 1.
  using Body = std::function<void(int64_t item, int worker)>;

  Pool(int threads, const int32_t *affinity, int num_affinity);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return threads_; }

  /// Calls body(item, worker) for every item below `count`; rethrows the first exception after all
  /// workers have stopped. A nested call from inside a body runs on the calling worker alone.
  void run(int64_t count, const Body &body);

  /// Stops the workers when the loop that runs has ended; later loops run on their callers alone.
  void close();

  /// How often workers took part in loops, and how often one that slept was called.
  struct Counts {
    int64_t joins, calls;
  };
  Counts counts() const { return {joins_.load(), calls_.load()}; }
  int sleeping() const { return sleeping_.load(); }

 private:
  struct Patience;

  void work(int worker);
  uint32_t await_loop(uint32_t seen, Patience &patience);
  void sleep(uint32_t seen);
  bool enter(uint32_t loop);
  void call_sleepers(int seats);
  void take_items(int worker) noexcept;
  void take_items_here() noexcept;
  void shut_down();

  const int process_;  // where the workers live
  const int threads_;  // that were asked for
  std::vector<std::thread> workers_;
  std::mutex caller_;  // one loop at a time
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> gate_{0};  // of the loop that runs: its number, free seats, workers inside
  std::atomic<int> sleeping_{0};
  std::atomic<int64_t> joins_{0}, calls_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<bool> stop_{false};
  int64_t count_ = 0;
  const Body *body_ = nullptr;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

/// Runs the loop on `pool`, or here where it is null.
void parallel_for(Pool *pool, int64_t count, const Pool::Body &body);

}  // namespace hkv

/// The C door's name for a pool; every entry point converts it by itself.
struct hkv_pool : hkv::Pool {
  using Pool::Pool;
};
