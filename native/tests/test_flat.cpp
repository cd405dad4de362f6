// The flat scan and nearest keys.
#include <algorithm>
#include <limits>
#include <thread>

#include "arrays.h"
#include "hybrid_kv_flat.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Result {
  std::vector<int64_t> ids;
  std::vector<float> scores;
  int64_t scored = 0;
};

Result search(hkv_pool *pool, const std::vector<hkv_flat_head> &heads,
              const std::vector<float> &queries, int64_t num_queries, int64_t top_k,
              int64_t rerank) {
  const size_t places = heads.size() * static_cast<size_t>(num_queries * top_k);
  Result found{std::vector<int64_t>(places, -7), std::vector<float>(places, -7.0f)};
  CHECK_OK(hkv_flat_search(pool, static_cast<int32_t>(heads.size()), heads.data(), queries.data(),
                           num_queries, top_k, rerank, HKV_IDS_INT64, found.ids.data(),
                           found.scores.data(), &found.scored));
  return found;
}

/// Best first, of equal scores the lower id, each id once, nothing behind the end; scores are exact
/// up to `tolerance`, and no key that was left out is better by more than that.
void check_best(const Rows &rows, const float *query, const int64_t *ids, const float *scores,
                int64_t top_k, double tolerance) {
  const int64_t found = std::min(top_k, rows.count());
  std::vector<bool> seen(static_cast<size_t>(rows.count()), false);
  for (int64_t i = 0; i < found; ++i) {
    CHECK(ids[i] >= 0 && ids[i] < rows.count() && !seen[static_cast<size_t>(ids[i])]);
    seen[static_cast<size_t>(ids[i])] = true;
    CHECK(std::fabs(static_cast<double>(scores[i]) - rows.dot(ids[i], query)) <= tolerance);
    if (i > 0)
      CHECK(scores[i] < scores[i - 1] || (scores[i] == scores[i - 1] && ids[i] > ids[i - 1]));
  }
  for (int64_t key = 0; key < rows.count(); ++key)
    if (!seen[static_cast<size_t>(key)])
      CHECK(rows.dot(key, query) <= static_cast<double>(scores[found - 1]) + tolerance);
  for (int64_t i = found; i < top_k; ++i) CHECK(ids[i] == -1 && scores[i] == kNone);
}

void check_scan(int64_t count, int32_t dim, int32_t dtype, int64_t num_queries, int64_t top_k,
                hkv_pool *pool = nullptr) {
  const Rows rows(random_floats(count * dim, 1), dim, dtype, 2);
  const std::vector<float> queries = random_floats(num_queries * dim, 2);
  const Result found = search(pool, {{rows.keys(), nullptr}}, queries, num_queries, top_k, 0);
  for (int64_t query = 0; query < num_queries; ++query)
    check_best(rows, queries.data() + query * dim, found.ids.data() + query * top_k,
               found.scores.data() + query * top_k, top_k, 1e-4);
  CHECK(found.scored == count * num_queries);
  Quantised quantised(rows, false, true, 3);
  const Result coded = search(pool, {{{nullptr, 0, dim, dim, dtype}, &quantised.head()}}, queries,
                              num_queries, top_k, 0);
  const Result ranked = search(pool, {{rows.keys(), &quantised.head()}}, queries, num_queries,
                               top_k, std::max<int64_t>(top_k, count / 2));
  for (int64_t query = 0; query < num_queries; ++query) {
    const float *mine = queries.data() + query * dim;
    check_best(rows, mine, coded.ids.data() + query * top_k, coded.scores.data() + query * top_k,
               top_k, 0.02 * dim);
    check_best(rows, mine, ranked.ids.data() + query * top_k, ranked.scores.data() + query * top_k,
               top_k, 0.02 * dim);
    for (int64_t i = 0; i < std::min(top_k, count); ++i) {
      const size_t place = static_cast<size_t>(query * top_k + i);
      CHECK(std::fabs(static_cast<double>(ranked.scores[place]) -
                      rows.dot(ranked.ids[place], mine)) < 1e-4);
    }
  }
}

}  // namespace

CLAIM(scans_find_the_best_at_every_width_and_dtype) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16}) check_scan(41, dim, dtype, 3, 7);
}

CLAIM(scans_find_the_best_for_every_number_of_keys_and_queries) {
  for (const int64_t count : {0, 1, 2, 5, 15, 16, 17, 255, 256, 257})
    check_scan(count, 36, HKV_BF16, 2, 9);
  for (const int64_t queries : {1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 259})
    check_scan(37, 20, HKV_F16, queries, 5);
  for (const int64_t top_k : {1, 36, 37, 38, 1000}) check_scan(37, 20, HKV_F32, 2, top_k);
}

CLAIM(scans_that_guess_a_threshold_and_divide_heads_find_the_best) {
  ScopedPool pool(3);
  check_scan(4099, 8, HKV_F32, 18, 10);
  check_scan(17001, 8, HKV_F32, 1, 10, pool.get());
  check_scan(17001, 2, HKV_F32, 1, 17001, pool.get());  // every key of every part
}

CLAIM(as_many_are_ranked_again_as_are_wanted) {
  const Rows rows(random_floats(37 * 8, 1), 8);
  Quantised quantised(rows, false, true);
  const std::vector<float> query = random_floats(8, 2);
  const Result found = search(nullptr, {{rows.keys(), &quantised.head()}}, query, 1, 9, 1);
  check_best(rows, query.data(), found.ids.data(), found.scores.data(), 9, 0.1);
  CHECK(found.scored == 37 + 9);
}

CLAIM(a_guess_that_too_few_keys_pass_is_made_good) {
  // A threshold is guessed from 64 vectors of 16 keys that are spread evenly; here they hold all
  // that is high, so that many of the best look like few.
  const int64_t count = 9001, vectors = count / 16;
  std::vector<float> values = random_floats(count, 1);
  for (int64_t i = 0; i < 16; ++i)
    for (int64_t lane = 0; lane < 3; ++lane)
      values[static_cast<size_t>(vectors * i / 64 * 16 + lane)] = 100.0f + static_cast<float>(i);
  const Rows rows(values, 1);
  const std::vector<float> queries = {1.0f, -1.0f};
  for (int64_t top_k = 1; top_k <= 160; top_k += top_k < 60 ? 1 : 50) {  // some miss it by one
    const Result found = search(nullptr, {{rows.keys(), nullptr}}, queries, 2, top_k, 0);
    for (int64_t query = 0; query < 2; ++query)
      check_best(rows, queries.data() + query, found.ids.data() + query * top_k,
                 found.scores.data() + query * top_k, top_k, 1e-4);
  }
}

CLAIM(equal_and_duplicate_keys_come_in_the_order_of_ids) {
  for (const int64_t count : {1, 37, 600, 5000}) {
    const Rows rows(std::vector<float>(static_cast<size_t>(count * 4), 0.5f), 4);
    Quantised quantised(rows, false, true);
    const std::vector<float> queries = {1, 1, 1, 1, 0, 0, 0, 0, -1, -1, -1, -1};
    for (const bool coded : {false, true}) {
      const Result found =
          search(nullptr, {{rows.keys(), coded ? &quantised.head() : nullptr}}, queries, 3, 20, 0);
      for (int64_t place = 0; place < 60; ++place)
        CHECK(found.ids[static_cast<size_t>(place)] == (place % 20 < count ? place % 20 : -1));
    }
  }
}

CLAIM(heads_of_different_lengths_are_searched_together) {
  ScopedPool pool(3);
  std::vector<Rows> rows;
  std::vector<hkv_flat_head> heads;
  for (const int64_t count : {0, 5, 37, 8200}) rows.emplace_back(random_floats(count * 12, 7), 12);
  for (const Rows &one : rows) heads.push_back({one.keys(), nullptr});
  const std::vector<float> queries = random_floats(4 * 2 * 12, 8);
  const Result found = search(pool.get(), heads, queries, 2, 6, 0);
  for (size_t at = 0; at < 8; ++at)
    check_best(rows[at / 2], queries.data() + at * 12, found.ids.data() + at * 6,
               found.scores.data() + at * 6, 6, 1e-4);
}

CLAIM(nearest_keys_are_those_of_a_search) {
  ScopedPool pool(2);
  const Rows rows(random_floats(301 * 24, 1), 24, HKV_BF16);
  for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16}) {
    const Rows queries(random_floats(270 * 24, 2), 24, dtype, 3);
    const hkv_flat_head head{rows.keys(), nullptr};
    const hkv_keys described = queries.keys();
    std::vector<int32_t> ids(270 * 5);
    std::vector<float> scores(270 * 5);
    CHECK_OK(
        hkv_knn(pool.get(), &head, &described, 5, 0, HKV_IDS_INT32, ids.data(), scores.data()));
    std::vector<int32_t> again(270 * 5);
    CHECK_OK(hkv_knn(nullptr, &head, &described, 5, 0, HKV_IDS_INT32, again.data(), nullptr));
    CHECK(again == ids);
    for (int64_t query = 0; query < 270; ++query) {
      std::vector<float> one(24);
      for (int32_t d = 0; d < 24; ++d) one[static_cast<size_t>(d)] = queries.at(query, d);
      const std::vector<int64_t> wide(ids.begin() + query * 5, ids.begin() + query * 5 + 5);
      check_best(rows, one.data(), wide.data(), scores.data() + query * 5, 5, 1e-4);
    }
  }
}

CLAIM(what_is_not_finite_does_not_crash_a_scan) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float strange : {infinity, -infinity, std::nanf(""), 3e38f})
    for (const int64_t count : {37, 5000}) {
      std::vector<float> values = random_floats(count * 8, 1);
      for (size_t i = 3; i < values.size(); i += 97) values[i] = strange;
      const Rows rows(values, 8);
      Quantised quantised(rows, false, true);
      std::vector<float> queries = random_floats(2 * 8, 3);
      queries[5] = strange;
      for (const int64_t rerank : {0, 30}) {
        search(nullptr, {{rows.keys(), nullptr}}, queries, 2, 20, rerank);
        search(nullptr, {{rows.keys(), &quantised.head()}}, queries, 2, 20, rerank);
      }
    }
}

CLAIM(every_half_is_read_exactly) {
  std::vector<uint16_t> halves(65536);
  for (size_t bits = 0; bits < halves.size(); ++bits) halves[bits] = static_cast<uint16_t>(bits);
  const hkv_flat_head head{{halves.data(), 65536, 1, 1, HKV_F16}, nullptr};
  const Result found = search(nullptr, {head}, {1.0f}, 1, 65536, 0);
  int64_t finite = 0;
  for (size_t place = 0; place < 65536 && found.ids[place] >= 0; ++place) {
    const auto bits = static_cast<int>(found.ids[place]);
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float magnitude = exponent == 31 ? -kNone
                            : exponent == 0
                                ? std::ldexp(static_cast<float>(mantissa), -24)
                                : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    CHECK(found.scores[place] == (bits >> 15 != 0 ? -magnitude : magnitude));
    finite += exponent < 31;
  }
  CHECK(found.ids[0] == 0x7c00);  // infinity; NaN and the worst score there is are no results
  CHECK(finite == 2 * 31 * 1024);
}

CLAIM(threads_search_one_head_at_the_same_time) {
  const Rows rows(random_floats(5003 * 36, 1), 36, HKV_BF16);
  Quantised quantised(rows, false, true);
  const std::vector<hkv_flat_head> heads = {{rows.keys(), &quantised.head()}};
  const std::vector<float> queries = random_floats(5 * 36, 2);
  const Result expected = search(nullptr, heads, queries, 5, 11, 20);
  ScopedPool pool(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 5; ++round)
        CHECK(search(caller % 2 == 0 ? nullptr : pool.get(), heads, queries, 5, 11, 20).ids ==
              expected.ids);
    });
  for (std::thread &caller : callers) caller.join();
}

CLAIM(a_stream_reads_whole_lines) {
  CHECK(hkv_stream(nullptr, 0) == 0);
  for (const int64_t lines : {1, 3, 4, 9}) {
    const Aligned bytes(64 * lines);
    std::vector<uint64_t> words(static_cast<size_t>(8 * lines));
    std::memcpy(words.data(), bytes.data(), words.size() * 8);
    uint64_t sum = 0;
    for (const uint64_t word : words) sum += word;
    CHECK(hkv_stream(bytes.data(), 64 * lines) == sum);
  }
}

CLAIM(a_scan_refuses_what_does_not_fit) {
  const Rows rows(random_floats(17 * 8, 1), 8);
  Quantised owner(rows, true, true);
  const hkv_flat_head good{rows.keys(), &owner.head()};
  const std::vector<float> query = random_floats(8, 2);
  int64_t ids[2] = {};
  float scores[2] = {};
  const auto call = [&](const hkv_flat_head *head, int32_t heads = 1, int64_t queries = 1,
                        int64_t top_k = 1, int64_t rerank = 1, int32_t type = HKV_IDS_INT64) {
    return hkv_flat_search(nullptr, heads, head, query.data(), queries, top_k, rerank, type, ids,
                           scores, nullptr);
  };
  CHECK_OK(call(&good));
  CHECK_REFUSED(call(nullptr), "head must not be NULL");
  CHECK_REFUSED(call(&good, -1), "head must not be NULL");
  for (const int64_t queries : {int64_t{-1}, INT64_MIN}) {
    CHECK_REFUSED(call(&good, 1, queries), "number of queries");
    CHECK_REFUSED(call(&good, 3, queries), "number of queries");
  }
  for (const int64_t top_k : {int64_t{0}, int64_t{-1}, INT64_MIN})
    CHECK_REFUSED(call(&good, 1, 1, top_k), "top_k must be at least 1");
  CHECK_REFUSED(call(&good, 1, 1, 1, -1), "rerank");
  for (const int32_t type : {-1, 2}) CHECK_REFUSED(call(&good, 1, 1, 1, 1, type), "id_type");
  CHECK_REFUSED(
      hkv_flat_search(nullptr, 1, &good, nullptr, 1, 1, 0, HKV_IDS_INT64, ids, scores, nullptr),
      "NULL");
  CHECK_REFUSED(hkv_flat_search(nullptr, 1, &good, query.data(), 1, 1, 0, HKV_IDS_INT64, nullptr,
                                scores, nullptr),
                "NULL");
  hkv_flat_head head = good;
  head.keys.count = 16;
  CHECK_REFUSED(call(&head), "re-ranking needs all quantised keys");
  head = good, head.keys.data = nullptr;
  CHECK_REFUSED(call(&head), "keys must not be NULL");
  Quantised other(rows, true, false);
  head = good, head.quantised = &other.head();
  CHECK_REFUSED(call(&head), "needs the blocks");
  hkv_flat_head heads[] = {good, {rows.keys(), nullptr}};
  heads[1].keys.dim = 7;
  CHECK_REFUSED(call(heads, 2, 0), "dim of the queries");
  head = {rows.keys(), nullptr}, head.keys.count = int64_t{1} << 31;
  CHECK_REFUSED(call(&head), "fewer than 2^31 keys");
  head = {rows.keys(), nullptr}, head.keys.count = -1;
  CHECK_REFUSED(call(&head), "at least 0");
  CHECK_OK(call(&good, 1, 0));
  CHECK_OK(call(nullptr, 0));
  const hkv_keys queries{query.data(), 1, 8, 8, HKV_F32};
  CHECK_REFUSED(hkv_knn(nullptr, nullptr, &queries, 1, 0, HKV_IDS_INT64, ids, scores), "NULL");
  CHECK_REFUSED(hkv_knn(nullptr, &good, nullptr, 1, 0, HKV_IDS_INT64, ids, scores), "NULL");
  CHECK_REFUSED(hkv_knn(nullptr, &good, &queries, 0, 0, HKV_IDS_INT64, ids, scores), "top_k");
}
