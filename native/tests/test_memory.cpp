// Memory that runs out at any allocation: a typed error, no leak, and the same call works
// afterwards.
#include <atomic>
#include <cstddef>
#include <new>
#include <thread>
#include <tuple>

#include "graph_case.h"
#include "hybrid_kv_attend.h"
#include "hybrid_kv_flat.h"
#include "hybrid_kv_step.h"
#include "sketch_case.h"

namespace {

std::atomic<int64_t> allocations_left{INT64_MAX};

void *allocate(std::size_t bytes, std::size_t alignment) {
  if (allocations_left.load() != INT64_MAX && allocations_left.fetch_sub(1) <= 0)
    throw std::bad_alloc();
  const std::size_t size = (bytes + alignment - 1) / alignment * alignment;
  void *memory = std::aligned_alloc(alignment, size == 0 ? alignment : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void *operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void *operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void *memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

/// Lets `call` fail at its first allocation, then at its second and so on until it succeeds. Every
/// attempt has a thread of its own, whose scratch memory is empty, and is repeated there.
template <typename Call>
void check_every_allocation(const Call &call) {
  int status = HKV_NO_MEMORY;
  int64_t failures = 0;
  for (; status != HKV_OK; ++failures) {
    CHECK(failures < 10000);
    std::thread([&] {
      CHECK(hkv_last_error()[0] == '\0');
      allocations_left.store(failures);
      status = call();
      allocations_left.store(INT64_MAX);
      CHECK(status == HKV_OK || status == HKV_NO_MEMORY);
      CHECK(status == HKV_OK || std::strcmp(hkv_last_error(), "out of memory") == 0);
      CHECK_OK(call());
    }).join();
  }
  CHECK(failures > 1);
}

}  // namespace

CLAIM(a_pool_survives_lack_of_memory) {
  check_every_allocation([] {
    hkv_pool *pool = nullptr;
    const int status = hkv_pool_create(3, nullptr, 0, &pool);
    CHECK((pool != nullptr) == (status == HKV_OK));
    hkv_pool_destroy(pool);
    return status;
  });
}

CLAIM(quantising_survives_lack_of_memory) {
  const Rows rows(random_floats(37 * 36, 1), 36);
  for (const int32_t threads : {1, 3}) {
    ScopedPool pool(threads);
    Quantised quantised(36, 37, true, true);
    const hkv_keys keys = rows.keys();
    check_every_allocation([&] { return hkv_quantise(pool.get(), 1, &keys, &quantised.head()); });
    CHECK(quantised.head().count == 37);
  }
}

CLAIM(scans_survive_lack_of_memory) {
  const std::vector<float> queries = random_floats(20 * 8, 2);
  for (const int64_t count : {37, 17001}) {
    const Rows rows(random_floats(count * 8, 1), 8, HKV_BF16);
    Quantised quantised(rows, false, true);
    ScopedPool pool(2);
    const hkv_flat_head heads[] = {{rows.keys(), nullptr}, {rows.keys(), &quantised.head()}};
    for (const hkv_flat_head &head : heads) {
      const int64_t num_queries = count > 1000 ? 1 : 20;
      std::vector<int64_t> ids(static_cast<size_t>(num_queries * 9)), first = ids;
      const auto search = [&](std::vector<int64_t> &to) {
        return hkv_flat_search(pool.get(), 1, &head, queries.data(), num_queries, 9, 12,
                               HKV_IDS_INT64, to.data(), nullptr, nullptr);
      };
      check_every_allocation([&] { return search(ids); });
      CHECK_OK(search(first));
      CHECK(ids == first);
    }
  }
}

CLAIM(sketches_survive_lack_of_memory) {
  // From 13,000 keys on a threshold is guessed; several slices of queries need fewer.
  for (const auto &[threads, count, num_queries] : {std::tuple{1, 700, 9}, std::tuple{2, 13200, 2}}) {
    const Rows rows(random_floats((count + 11) * 8, 1), 8, HKV_BF16);
    const SketchCase tiers(rows, count, 2);
    const std::vector<float> queries = random_floats(num_queries * 8, 2);
    const hkv_sketch_head head = tiers.head(20);
    std::vector<int64_t> ids(num_queries * 9), first = ids;
    std::vector<float> scores(num_queries * 9);
    ScopedPool pool(threads);
    const auto search = [&, n = num_queries](std::vector<int64_t> &to) {
      return hkv_sketch_search(pool.get(), 1, &head, queries.data(), n, 9, to.data(), scores.data(),
                               nullptr, nullptr);
    };
    check_every_allocation([&] { return search(ids); });
    CHECK_OK(search(first));
    CHECK(ids == first);
  }
  const Rows rows(random_floats(5011 * 8, 1), 8, HKV_BF16);
  const SketchMap map(8, 1, 1, 0);
  const hkv_keys keys = rows.keys();
  const std::vector<int32_t> order(37, 5);
  const Aligned blocks(3 * hkv_sketch_block_bytes(&map.get()));
  check_every_allocation([&] {
    return hkv_sketch_encode(nullptr, &map.get(), &keys, order.data(), 37, 0, blocks.data());
  });
}

CLAIM(attention_survives_lack_of_memory) {
  const Rows rows(random_floats(37 * 36, 1), 36);
  const hkv_kv head = kv_of(rows, rows);
  const std::vector<float> queries = random_floats(2 * 36, 2);
  const std::vector<int64_t> ids(2 * 30, 5);
  std::vector<float> out(2 * 36), lse(2);
  check_every_allocation([&] {
    return hkv_attend(nullptr, 1, &head, queries.data(), HKV_F32, 2, ids.data(), 30, nullptr, 1.0f, 0.0f,
                      out.data(), lse.data());
  });
  const Rows many(random_floats(5000 * 4, 1), 4, HKV_F16);
  const hkv_kv kv = kv_of(many, many);
  check_every_allocation([&] {
    return hkv_attend_rows(nullptr, 1, 1, &kv, queries.data(), HKV_F32, 2, nullptr, 1.0f, 0.0f,
                           out.data(), lse.data());
  });
}

CLAIM(steps_survive_lack_of_memory) {
  const Rows pages(random_floats(40 * 12, 1), 12), rows(random_floats(70 * 12, 2), 12);
  const std::vector<float> queries = random_floats(3 * 12, 3);
  const std::vector<int64_t> slots = {4, 2, 3, 0};
  const hkv_flat_head flat{rows.keys(), nullptr};
  const int32_t head = 0;
  const hkv_search search{HKV_SEARCH_FLAT, 1, &head, &flat, 0, 6, 0, nullptr, nullptr, 0};
  hkv_layer layer{};
  layer.heads = 1;
  layer.num_queries = 3;
  layer.resident = {kv_of(pages, pages), slots.data(), 4, 8, 3, 1, 1,
                    {rows.keys(), rows.keys()}, 0};
  const hkv_extent extents[] = {{kv_of(rows, rows), &search, 1, {}}, {kv_of(rows, rows), &search, 1, {}}};
  layer.cold = {extents, 2, 6};
  std::vector<int64_t> ids(3 * 6);
  std::vector<float> out(3 * 12), lse(3);
  hkv_step_report report;
  const hkv_step step{queries.data(), HKV_F32, HKV_F32, 5, 1.0f, 0.0f, nullptr, 0,
                      ids.data(), out.data(), lse.data()};
  check_every_allocation([&] { return hkv_attend_step(nullptr, &layer, &step, &report); });
  const std::vector<float> first = out;
  CHECK_OK(hkv_attend_step(nullptr, &layer, &step, &report));
  CHECK(out == first);
}

CLAIM(pages_survive_lack_of_memory) {
  const Rows rows(random_floats(70 * 12, 1), 12);
  const hkv_page_digests head{rows.keys(), rows.keys()};
  const std::vector<float> queries = random_floats(20 * 12, 2);
  std::vector<float> scores(20 * 70);
  std::vector<int64_t> ids(20 * 5), expected(20 * 5);
  check_every_allocation(
      [&] { return hkv_page_scores(nullptr, 1, &head, queries.data(), 20, scores.data()); });
  const auto search = [&](std::vector<int64_t> &to) {
    return hkv_page_search(nullptr, 1, &head, queries.data(), 20, 5, to.data(), scores.data());
  };
  check_every_allocation([&] { return search(ids); });
  CHECK_OK(search(expected));
  CHECK(ids == expected);
}

CLAIM(builds_and_searches_of_a_graph_survive_lack_of_memory) {
  const Rows rows(random_floats(90 * 12, 1), 12);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(30 * 12, 2), 9);
  const hkv_projection projection = projection_of(lists, 9, 90, 8);
  Graph expected;
  CHECK_OK(build(nullptr, projection, expected));
  const std::vector<int16_t> points = random_points(expected.num_lists, 5);
  std::vector<int32_t> neighbours(expected.neighbours.size()), entries(expected.entries.size());
  for (const int32_t threads : {1, 2}) {
    ScopedPool pool(threads);
    check_every_allocation([&] {
      return hkv_graph_project(pool.get(), &projection, expected.list_of.data(), expected.num_lists,
                               0, points.data(), neighbours.data(), entries.data());
    });
    CHECK(neighbours == expected.neighbours && entries == expected.entries);
  }
  const GraphCase owner(rows, expected);
  const GraphCase scanned(rows, Graph());
  const std::vector<hkv_graph_head> heads = {owner.head(), scanned.head()};
  const std::vector<float> queries = random_floats(2 * 3 * 12, 3);
  const hkv_graph_query query{beams_of(40), 3, 5, 40, 4, 0, 100.0f, nullptr};
  GraphResult found;
  CHECK_OK(search(nullptr, heads, query, queries, {}, found));
  const std::vector<int64_t> best = found.ids;
  check_every_allocation([&] {
    return hkv_graph_search(nullptr, 2, heads.data(), &query, queries.data(), nullptr,
                            found.ids.data(), found.scores.data(), found.rows.data(),
                            found.dots.data());
  });
  CHECK(found.ids == best);
}
