// The library's self-description, and the worker pool.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "../src/pool.h"
#include "arrays.h"
#include "hybrid_kv_attend.h"

CLAIM(the_library_says_what_it_is) {
  CHECK(hkv_abi_version() == HKV_ABI_VERSION);
  CHECK(std::strlen(hkv_isa()) > 0);
  CHECK(std::strncmp(hkv_runnable_isas(), "baseline", 8) == 0);
  CHECK(std::strstr(hkv_runnable_isas(), hkv_isa()) != nullptr);
}

CLAIM(a_pool_refuses_threads_out_of_range) {
  hkv_pool *pool = nullptr;
  for (const int32_t threads : {0, -1, 1025, 10000, INT32_MIN, INT32_MAX})
    CHECK_REFUSED(hkv_pool_create(threads, nullptr, 0, &pool), "threads must be 1..1024");
  CHECK(pool == nullptr);
  CHECK_REFUSED(hkv_pool_create(1, nullptr, 0, nullptr), "pool must not be NULL");
}

CLAIM(a_pool_refuses_cpus_that_do_not_exist) {
  hkv_pool *pool = nullptr;
  for (const int32_t cpu : {-1, 1 << 20})
    CHECK_REFUSED(hkv_pool_create(3, &cpu, 1, &pool), "affinity names CPU");
  CHECK(pool == nullptr);
}

CLAIM(affinity_without_cpus_pins_nothing) {
  hkv_pool *pool = nullptr;
  const int32_t cpu = -1;
  CHECK_OK(hkv_pool_create(2, &cpu, 0, &pool));
  hkv_pool_destroy(pool);
}

CLAIM(no_pool_is_one_thread_and_destroying_it_does_nothing) {
  CHECK(hkv_pool_threads(nullptr) == 1);
  hkv_pool_destroy(nullptr);
}

CLAIM(pools_come_and_go_before_their_workers_have_started) {
  for (int round = 0; round < 20; ++round) {
    ScopedPool pool(1 + round % 5);
    CHECK(hkv_pool_threads(pool.get()) == 1 + round % 5);
  }
}

namespace {

constexpr int32_t kDim = 36;
constexpr int64_t kKeys = 37, kQueries = 19;

/// Attention of every query over all keys; the same for any number of threads.
std::vector<float> attend(hkv_pool *pool, const Rows &keys, const Rows &values,
                          const std::vector<float> &queries) {
  const hkv_kv head = kv_of(keys, values);
  std::vector<int64_t> ids;
  for (int64_t query = 0; query < kQueries; ++query)
    for (int64_t key = 0; key < kKeys; ++key) ids.push_back((key * 7 + query) % kKeys);
  std::vector<float> out(kQueries * kDim), lse(kQueries);
  CHECK_OK(hkv_attend(pool, 1, &head, queries.data(), HKV_F32, kQueries, ids.data(), kKeys, nullptr, 0.3f,
                      0.0f, out.data(), lse.data()));
  return out;
}

}  // namespace

namespace {

/// Whether all workers have come to sleep; they do within milliseconds.
bool all_sleep(const hkv::Pool &pool) {
  for (int i = 0; i < 10000 && pool.sleeping() < pool.threads() - 1; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return pool.sleeping() == pool.threads() - 1;
}

}  // namespace

CLAIM(every_item_is_run_once_by_whoever_comes) {
  hkv::Pool pool(5, nullptr, 0);
  for (int64_t count = 0; count < 400; ++count) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(count % 37));
    pool.run(count % 37, [&](int64_t item, int worker) {
      CHECK(worker >= 0 && worker < 5);
      runs[static_cast<size_t>(item)].fetch_add(1);
    });
    for (const std::atomic<int> &run : runs) CHECK(run.load() == 1);
  }
}

CLAIM(a_loop_takes_no_more_workers_than_it_has_further_items) {
  hkv::Pool pool(5, nullptr, 0);
  const hkv::Pool::Body body = [](int64_t, int) { std::this_thread::yield(); };
  for (int loop = 0; loop < 1000; ++loop) pool.run(2, body);
  CHECK(pool.counts().joins <= 1000);
  const int64_t before = pool.counts().joins;
  for (int loop = 0; loop < 100; ++loop) pool.run(1, body);
  CHECK(pool.counts().joins == before);
}

CLAIM(a_loop_calls_no_more_sleepers_than_it_has_further_items) {
  // A pool for each loop: one that was called may sleep on for a while, and wake in the next loop.
  for (const int64_t items : {3, 100}) {
    hkv::Pool pool(7, nullptr, 0);
    CHECK(all_sleep(pool));
    pool.run(items, [](int64_t, int) {});
    CHECK(pool.counts().calls == std::min<int64_t>(items - 1, 6));
  }
}

CLAIM(workers_sleep_again_after_loops_that_followed_each_other) {
  hkv::Pool pool(3, nullptr, 0);
  for (int loop = 0; loop < 500; ++loop) pool.run(3, [](int64_t, int) {});
  CHECK(all_sleep(pool));
}

CLAIM(a_loop_inside_of_an_item_stays_with_its_worker) {
  hkv::Pool pool(3, nullptr, 0);
  std::atomic<int> items{0};
  pool.run(6, [&](int64_t, int outer) {
    const auto here = std::this_thread::get_id();
    pool.run(5, [&](int64_t, int inner) {
      CHECK(inner == outer && std::this_thread::get_id() == here);
      items.fetch_add(1);
    });
  });
  CHECK(items.load() == 30);
}

CLAIM(callers_of_one_pool_wait_for_each_other) {
  const Rows keys(random_floats(kKeys * kDim, 1), kDim),
      values(random_floats(kKeys * kDim, 2), kDim);
  const std::vector<float> queries = random_floats(kQueries * kDim, 3);
  const std::vector<float> expected = attend(nullptr, keys, values, queries);
  ScopedPool pool(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round)
        CHECK(attend(pool.get(), keys, values, queries) == expected);
    });
  for (std::thread &caller : callers) caller.join();
}

CLAIM(threads_make_use_and_destroy_pools_of_their_own_at_once) {
  const Rows keys(random_floats(kKeys * kDim, 1), kDim),
      values(random_floats(kKeys * kDim, 2), kDim);
  const std::vector<float> queries = random_floats(kQueries * kDim, 3);
  const std::vector<float> expected = attend(nullptr, keys, values, queries);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 10; ++round) {
        ScopedPool pool(1 + (caller + round) % 4);
        CHECK(attend(pool.get(), keys, values, queries) == expected);
      }
    });
  for (std::thread &caller : callers) caller.join();
}

CLAIM(sleeping_workers_wake_up) {
  const Rows keys(random_floats(kKeys * kDim, 1), kDim),
      values(random_floats(kKeys * kDim, 2), kDim);
  const std::vector<float> queries = random_floats(kQueries * kDim, 3);
  const std::vector<float> expected = attend(nullptr, keys, values, queries);
  ScopedPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    CHECK(attend(pool.get(), keys, values, queries) == expected);
  }
}

CLAIM(an_error_of_a_worker_reaches_the_caller_and_the_pool_lives_on) {
  const Rows keys(random_floats(kKeys * kDim, 1), kDim),
      values(random_floats(kKeys * kDim, 2), kDim);
  const std::vector<float> queries = random_floats(kQueries * kDim, 3);
  const std::vector<float> expected = attend(nullptr, keys, values, queries);
  const hkv_kv head = kv_of(keys, values);
  std::vector<float> out(kQueries * kDim), lse(kQueries);
  ScopedPool pool(3);
  for (int64_t bad = 0; bad < kQueries; ++bad) {
    std::vector<int64_t> ids(kQueries, 0);
    ids[static_cast<size_t>(bad)] = kKeys;
    CHECK_REFUSED(hkv_attend(pool.get(), 1, &head, queries.data(), HKV_F32, kQueries, ids.data(), 1, nullptr,
                             1.0f, 0.0f, out.data(), lse.data()),
                  "an id is not below the number of keys");
    CHECK(attend(pool.get(), keys, values, queries) == expected);
  }
}

CLAIM(every_thread_has_a_last_error_of_its_own) {
  CHECK_REFUSED(hkv_pool_create(0, nullptr, 0, nullptr), "pool must not be NULL");
  std::thread([] { CHECK(std::strlen(hkv_last_error()) == 0); }).join();
  CHECK(std::strcmp(hkv_last_error(), "pool must not be NULL") == 0);
}

CLAIM(a_pool_that_is_closed_between_loops_leaves_the_work_to_its_caller) {
  ScopedPool pool(4);
  std::atomic<int64_t> loops{0};
  std::atomic<bool> done{false};
  std::thread caller([&] {
    for (; !done.load() || loops.load() < 3; loops.fetch_add(1)) {
      std::atomic<int64_t> items{0};
      pool.get()->run(50, [&](int64_t, int) { items.fetch_add(1); });
      CHECK(items.load() == 50);
    }
  });
  while (loops.load() < 10) std::this_thread::yield();
  CHECK_OK(hkv_pool_close(pool.get()));
  const int64_t joins = pool.get()->counts().joins;
  const int64_t at = loops.load();
  while (loops.load() < at + 10) std::this_thread::yield();
  CHECK_OK(hkv_pool_close(pool.get()));  // again does nothing
  done.store(true);
  caller.join();
  CHECK(pool.get()->counts().joins == joins);
  CHECK(hkv_pool_threads(pool.get()) == 4);
  CHECK_REFUSED(hkv_pool_close(nullptr), "pool must not be NULL");
}
