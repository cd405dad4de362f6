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
  const Rows rows(random_floats(13211 * 16, 1), 16, HKV_BF16);
  const SketchCase tiers(rows, 13200, 3);
  const std::vector<hkv_sketch_head> heads = {tiers.head(40), tiers.head(300)};
  const std::vector<float> queries = random_floats(2 * 3 * 16, 2);
  const Result expected = search(nullptr, heads, queries, 3, 11);
  ScopedPool pool(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 2; ++round) {
        const Result found = search(caller == 0 ? nullptr : pool.get(), heads, queries, 3, 11);
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

CLAIM(a_search_in_pages_is_that_of_one_piece) {
  constexpr int32_t kDim = 24, kPages = 37, kHeads = 2, kQueries = 5;
  for (const int32_t page_keys : {16, 48, 112}) {
    const int64_t page_rows = kHeads * page_keys, tokens = kPages * page_keys - 5;
    const Rows rows(random_floats(kPages * page_rows * kDim, 1), kDim, HKV_BF16, 3);
    const SketchMap map(kDim, 1, 1, 1);
    const hkv_keys keys = rows.keys();
    const int64_t head_bytes = page_keys / 16 * hkv_sketch_block_bytes(&map.get());
    const Aligned codes(kPages * kHeads * head_bytes);
    std::vector<int32_t> pages(kPages);
    for (int32_t page = 0; page < kPages; ++page) pages[page] = page * 10 % kPages;
    std::vector<hkv_sketch_tier> tiers;
    for (int64_t head = 0; head < kHeads; ++head)
      tiers.push_back({&map.get(), codes.data() + head * head_bytes, nullptr, tokens, pages.data(),
                       page_keys, 0, page_rows, kHeads * head_bytes, head * page_keys});
    const std::vector<hkv_keys> of_heads(kHeads, keys);
    ScopedPool pool(3);
    CHECK_OK(hkv_sketch_encode_pages(pool.get(), kHeads, tiers.data(), of_heads.data(), 0));
    CHECK_OK(hkv_sketch_encode_pages(nullptr, kHeads, tiers.data(), of_heads.data(),
                                     tokens / 32 * 16));
    const std::vector<float> queries = random_floats(kHeads * kQueries * kDim, 2);
    for (const int32_t first : {0, 16, 160}) {
      std::vector<hkv_sketch_head> paged, whole;
      std::vector<std::unique_ptr<Rows>> copies;
      std::vector<std::unique_ptr<Aligned>> blocks;
      std::vector<hkv_sketch_tier> pieces(kHeads);
      std::vector<std::vector<int64_t>> places(kHeads);
      for (int32_t head = 0; head < kHeads; ++head) {
        tiers[head].first = first, tiers[head].count = tokens - first;
        std::vector<float> own;
        for (int64_t token = first; token < tokens; ++token) {
          const int64_t row = head * page_keys + pages[token / page_keys] * page_rows +
                              token % page_keys;
          places[head].push_back(row);
          const auto *from = static_cast<const uint16_t *>(keys.data) + row * keys.stride;
          for (int32_t d = 0; d < kDim; ++d) {
            const uint32_t bits = uint32_t{from[d]} << 16;
            own.push_back(0.0f);
            std::memcpy(&own.back(), &bits, 4);
          }
        }
        copies.push_back(std::make_unique<Rows>(own, kDim, HKV_BF16));
        const hkv_keys copy = copies.back()->keys();
        std::vector<int32_t> order(static_cast<size_t>(copy.count));
        std::iota(order.begin(), order.end(), 0);
        blocks.push_back(std::make_unique<Aligned>((copy.count + 15) / 16 *
                                                   hkv_sketch_block_bytes(&map.get())));
        CHECK_OK(hkv_sketch_encode(nullptr, &map.get(), &copy, order.data(), copy.count, 0,
                                   blocks.back()->data()));
        pieces[head] = {&map.get(), blocks.back()->data(), nullptr, copy.count, nullptr, 0, 0, 0, 0,
                        0};
        whole.push_back({copy, &pieces[head], 1, 50, copy.count});
        paged.push_back({keys, &tiers[head], 1, 50, keys.count});
      }
      for (hkv_pool *own : {static_cast<hkv_pool *>(nullptr), pool.get()}) {
        const Result found = search(own, paged, queries, kQueries, 30);
        const Result expected = search(own, whole, queries, kQueries, 30);
        CHECK(found.scores == expected.scores && found.scored == expected.scored);
        CHECK(found.rows_read == expected.rows_read);
        for (size_t at = 0; at < found.ids.size(); ++at)
          CHECK(found.ids[at] ==
                places[at / (30 * kQueries)][static_cast<size_t>(expected.ids[at])]);
      }
    }
  }
}

CLAIM(pages_that_do_not_fit_are_refused) {
  const Rows rows(random_floats(64 * 8, 1), 8);
  const SketchMap map(8, 1, 1, 1);
  const hkv_keys keys = rows.keys();
  const Aligned codes(4 * hkv_sketch_block_bytes(&map.get()));
  std::vector<int32_t> pages = {1, 0};
  const hkv_sketch_tier good = {&map.get(), codes.data(), nullptr, 40, pages.data(), 32, 0, 32,
                                2 * hkv_sketch_block_bytes(&map.get()), 0};
  hkv_sketch_tier tier = good;
  const auto encode = [&](int64_t first = 0) {
    return hkv_sketch_encode_pages(nullptr, 1, &tier, &keys, first);
  };
  CHECK_OK(encode());
  CHECK_OK(encode(40));
  CHECK_REFUSED(encode(-1), "first must be at least 0");
  CHECK_REFUSED(hkv_sketch_encode_pages(nullptr, 1, nullptr, &keys, 0), "must not be NULL");
  tier.page_keys = 24;
  CHECK_REFUSED(encode(), "multiples of 16");
  tier = good, tier.first = 8;
  CHECK_REFUSED(encode(), "multiples of 16");
  tier = good, tier.page_bytes = 8;
  CHECK_REFUSED(encode(), "a multiple of 64");
  tier = good, tier.first_row = 1;
  CHECK_REFUSED(encode(), "must lie within the keys");
  tier = good, tier.pages = nullptr;
  CHECK_REFUSED(encode(), "must have a map, pages and blocks");
  tier = good, tier.ids = pages.data();
  CHECK_REFUSED(encode(), "must have no ids");
  tier = good, pages[0] = -1;
  CHECK_REFUSED(encode(), "must lie within the keys");
  hkv_sketch_head head = {keys, &tier, 1, 1, 64};
  float query[8] = {}, score;
  int64_t id;
  CHECK_REFUSED(hkv_sketch_search(nullptr, 1, &head, query, 1, 1, &id, &score, nullptr, nullptr),
                "must lie within the keys");
}
