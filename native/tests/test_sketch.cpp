// Codes of keys, and searches by them.
#include <algorithm>
#include <limits>
#include <numeric>
#include <thread>

#include "arrays.h"
#include "sketch_case.h"

namespace {

struct Result {
  std::vector<int64_t> ids;
  std::vector<float> scores;
  int64_t scored = 0, rows_read = 0;
};

Result search(hkv_pool *pool, const std::vector<hkv_sketch_head> &heads,
              const std::vector<float> &queries, int64_t num_queries, int64_t width) {
  const size_t places = heads.size() * static_cast<size_t>(num_queries * width);
  Result found{std::vector<int64_t>(places, -7), std::vector<float>(places, -7.0f)};
  CHECK_OK(hkv_sketch_search(pool, static_cast<int32_t>(heads.size()), heads.data(),
                             queries.data(), num_queries, width, found.ids.data(),
                             found.scores.data(), &found.scored, &found.rows_read));
  return found;
}

/// Best first, of equal scores the lower id, scores exact, nothing behind the end.
void check_ranked(const Rows &rows, const float *query, const int64_t *ids, const float *scores,
                  int64_t found, int64_t width) {
  for (int64_t i = 0; i < found; ++i) {
    CHECK(ids[i] >= 0 && ids[i] < rows.count());
    CHECK(std::fabs(static_cast<double>(scores[i]) - rows.dot(ids[i], query)) <= 1e-4);
    if (i > 0)
      CHECK(scores[i] < scores[i - 1] || (scores[i] == scores[i - 1] && ids[i] > ids[i - 1]));
  }
  for (int64_t i = found; i < width; ++i) CHECK(ids[i] == -1);
}

void check_search(int64_t count, int32_t dim, int32_t dtype, int64_t num_queries,
                  int64_t num_rerank, hkv_pool *pool = nullptr) {
  const Rows rows(random_floats(count * dim, 1), dim, dtype, 2);
  const int64_t exact = count / 5;
  const SketchCase tiers(rows, count - exact, 3);
  const std::vector<float> queries = random_floats(num_queries * dim, 2);
  const Result found = search(pool, {tiers.head(num_rerank)}, queries, num_queries, 9);
  const int64_t ranked = std::min(num_rerank, count - exact) + exact;
  for (int64_t query = 0; query < num_queries; ++query)
    check_ranked(rows, queries.data() + query * dim, found.ids.data() + query * 9,
                 found.scores.data() + query * 9, std::min<int64_t>(9, ranked), 9);
  CHECK(found.scored == num_queries * (count - exact + ranked));
  CHECK(found.rows_read >= ranked && found.rows_read <= num_queries * ranked);
  // All of them ranked: the best there are.
  const Result all = search(pool, {tiers.head(count + 1)}, queries, num_queries, count + 2);
  for (int64_t query = 0; query < num_queries; ++query)
    check_ranked(rows, queries.data() + query * dim, all.ids.data() + query * (count + 2),
                 all.scores.data() + query * (count + 2), count, count + 2);
}

}  // namespace

CLAIM(sketches_are_searched_at_every_width_and_dtype) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16}) check_search(41, dim, dtype, 3, 7);
}

CLAIM(sketches_are_searched_for_every_number_of_keys_and_queries) {
  for (const int64_t count : {1, 2, 5, 15, 16, 17, 37, 255, 256, 257})
    check_search(count, 36, HKV_BF16, 2, 9);
  for (const int64_t queries : {1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 65})
    check_search(37, 20, HKV_F16, queries, 5);
}

CLAIM(sketches_that_guess_a_threshold_and_divide_heads_are_searched) {
  ScopedPool pool(3);
  check_search(17001, 8, HKV_F32, 3, 10);
  check_search(17001, 8, HKV_BF16, 3, 300, pool.get());
}

CLAIM(threads_find_the_same_by_a_sketch) {
  const Rows rows(random_floats(30011 * 16, 1), 16, HKV_BF16);
  const SketchCase tiers(rows, 30000, 3);
  const std::vector<hkv_sketch_head> heads = {tiers.head(40), tiers.head(300)};
  const std::vector<float> queries = random_floats(2 * 5 * 16, 2);
  const Result expected = search(nullptr, heads, queries, 5, 11);
  ScopedPool pool(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 3; ++round) {
        const Result found = search(caller == 0 ? nullptr : pool.get(), heads, queries, 5, 11);
        CHECK(found.ids == expected.ids && found.scores == expected.scores);
        CHECK(found.rows_read == expected.rows_read);
      }
    });
  for (std::thread &caller : callers) caller.join();
}

CLAIM(a_sketch_made_in_parts_by_threads_is_the_same) {
  const Rows rows(random_floats(5003 * 20, 1), 20, HKV_F16, 3);
  const SketchMap map(20, 2, 3, 1);
  const hkv_keys keys = rows.keys();
  std::vector<int32_t> order(5003);
  std::iota(order.begin(), order.end(), 0);
  const int64_t bytes = hkv_sketch_block_bytes(&map.get());
  CHECK(bytes == 6 * 64);
  const Aligned whole(bytes * 313), parts(bytes * 313);
  CHECK_OK(hkv_sketch_encode(nullptr, &map.get(), &keys, order.data(), 5003, 0, whole.data()));
  ScopedPool pool(3);
  for (int64_t first = 0; first < 5003;) {
    const int64_t count = std::min<int64_t>(5003 - first, first == 0 ? 37 : 2100);
    CHECK_OK(hkv_sketch_encode(pool.get(), &map.get(), &keys, order.data() + first, count, first,
                               parts.data()));
    first += count;
  }
  CHECK(std::memcmp(whole.data(), parts.data(), static_cast<size_t>(bytes) * 312) == 0);
}

CLAIM(rows_of_a_sketch_that_are_not_finite_are_named) {
  std::vector<float> values = random_floats(5000 * 8, 1);
  values[4321 * 8 + 3] = std::nanf("");
  values[4999 * 8] = std::numeric_limits<float>::infinity();
  const Rows rows(values, 8);
  const SketchMap map(8, 1, 1, 1);
  const hkv_keys keys = rows.keys();
  std::vector<int32_t> order(5000);
  std::iota(order.begin(), order.end(), 0);
  const Aligned blocks(hkv_sketch_block_bytes(&map.get()) * 313);
  ScopedPool pool(3);
  for (hkv_pool *own : {static_cast<hkv_pool *>(nullptr), pool.get()}) {
    CHECK(hkv_sketch_encode(own, &map.get(), &keys, order.data(), 5000, 0, blocks.data()) ==
          HKV_NOT_FINITE);
    CHECK(std::strstr(hkv_last_error(), "row 4321 of the keys") != nullptr);
  }
  const Rows good(random_floats(37 * 8, 1), 8);
  const SketchCase tiers(good, 37, 2);
  const hkv_sketch_head head = tiers.head(5);
  std::vector<float> query(8, std::nanf(""));
  int64_t id;
  float score;
  CHECK(hkv_sketch_search(nullptr, 1, &head, query.data(), 1, 1, &id, &score, nullptr, nullptr) ==
        HKV_NOT_FINITE);
}

CLAIM(a_sketch_refuses_what_does_not_fit) {
  const Rows rows(random_floats(37 * 8, 1), 8);
  const SketchCase tiers(rows, 30, 2);
  const SketchMap map(8, 1, 1, 1);
  const hkv_keys keys = rows.keys();
  const std::vector<float> query = random_floats(8, 2);
  int64_t ids[2] = {};
  float scores[2] = {};
  const auto call = [&](const hkv_sketch_head &head, int64_t queries = 1, int64_t width = 2) {
    return hkv_sketch_search(nullptr, 1, &head, query.data(), queries, width, ids, scores, nullptr,
                             nullptr);
  };
  CHECK_OK(call(tiers.head(3)));
  CHECK_OK(call(tiers.head(3), 0));
  CHECK_REFUSED(call(tiers.head(3), -1), "number of queries");
  CHECK_REFUSED(call(tiers.head(3), 1, 0), "width must be at least 1");
  CHECK_REFUSED(call(tiers.head(0)), "num_rerank must be at least 1");
  hkv_sketch_head head = tiers.head(3);
  head.first_exact = 38;
  CHECK_REFUSED(call(head), "first_exact must be");
  head.first_exact = 20;
  CHECK_REFUSED(call(head), "must be 0..first_exact - 1");
  head = tiers.head(3), head.tiers = nullptr;
  CHECK_REFUSED(call(head), "tiers must not be NULL");
  head = tiers.head(3), head.keys.count = 29;
  CHECK_REFUSED(call(head), "first_exact must be");
  CHECK_REFUSED(hkv_sketch_search(nullptr, 1, nullptr, query.data(), 1, 1, ids, scores, nullptr,
                                  nullptr),
                "head must not be NULL");
  hkv_sketch_tier tier = tiers.tier(0);
  head = tiers.head(3), head.tiers = &tier, head.num_tiers = 1;
  tier.map = nullptr;
  CHECK_REFUSED(call(head), "a tier must have a map");
  tier = tiers.tier(0), tier.count = -1;
  CHECK_REFUSED(call(head), "0..first_exact keys");
  tier = tiers.tier(0), tier.blocks += 1;
  CHECK_REFUSED(call(head), "must lie on 64 bytes");
  hkv_sketch_map bad = map.get();
  const int32_t beyond[] = {0, 37};
  const Aligned blocks(hkv_sketch_block_bytes(&bad));
  const auto encode = [&](int64_t count, int64_t first) {
    return hkv_sketch_encode(nullptr, &bad, &keys, beyond, count, first, blocks.data());
  };
  CHECK_OK(encode(1, 3));
  CHECK_REFUSED(encode(2, 0), "rows must lie within the keys");
  CHECK_REFUSED(encode(-1, 0), "number of rows");
  CHECK_REFUSED(encode(1, -1), "first must be at least 0");
  bad.dim = 9;
  CHECK_REFUSED(encode(1, 0), "dim of the map");
  for (const int32_t lines : {-1, 65, 1 << 30}) {
    bad = map.get(), bad.lines_of_8 = lines;
    CHECK(hkv_sketch_block_bytes(&bad) == 0);
    CHECK_REFUSED(encode(1, 0), "4..256 dims");
  }
}
