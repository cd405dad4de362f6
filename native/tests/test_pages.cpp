// Bounds of whole pages.
#include <algorithm>
#include <limits>
#include <thread>

#include "arrays.h"
#include "hybrid_kv_pages.h"

namespace {

/// The pages of two heads, written token by token.
struct Written {
  static constexpr int64_t kSlots = 3, kSize = 4;
  Written(int32_t dim, bool with_digests)
      : keys(2 * kSlots * kSize * dim),
        values(keys.size()),
        lows(with_digests ? 2 * kSlots * dim : 0),
        highs(lows.size()),
        positions(kSlots * kSize, -1),
        pages{keys.data(), values.data(), positions.data(), with_digests ? lows.data() : nullptr,
              with_digests ? highs.data() : nullptr, kSlots, kSize, 2, dim, dim, HKV_F32} {}
  std::vector<float> keys, values, lows, highs;
  std::vector<int64_t> positions;
  hkv_pages pages;
};

constexpr float kNone = -std::numeric_limits<float>::infinity();

/// Digests of random pages; lows and highs are halves of longer rows.
struct Pages {
  Pages(int64_t count, int32_t dim, int32_t dtype)
      : lows(ends(count, dim, -1.0f), dim, dtype, dim), highs(ends(count, dim, 1.0f), dim, dtype) {}

  static std::vector<float> ends(int64_t count, int32_t dim, float sign) {
    std::vector<float> values = random_floats(count * dim, 1);
    const std::vector<float> widths = random_floats(count * dim, 2);
    for (size_t i = 0; i < values.size(); ++i) values[i] += sign * std::fabs(widths[i]);
    return values;
  }
  hkv_page_digests digests() const { return {lows.keys(), highs.keys()}; }
  double bound(int64_t page, const float *query) const {
    double sum = 0;
    for (int32_t d = 0; d < lows.dim(); ++d)
      sum += std::max(static_cast<double>(query[d]) * static_cast<double>(lows.at(page, d)),
                      static_cast<double>(query[d]) * static_cast<double>(highs.at(page, d)));
    return sum;
  }

  Rows lows, highs;
};

void check_pages(int64_t count, int32_t dim, int32_t dtype, int64_t num_queries, int64_t wanted,
                 hkv_pool *pool = nullptr) {
  const Pages pages(count, dim, dtype);
  const hkv_page_digests head = pages.digests();
  const std::vector<float> queries = random_floats(num_queries * dim, 3);
  std::vector<float> all(static_cast<size_t>(num_queries * count), -7.0f);
  CHECK_OK(hkv_page_scores(pool, 1, &head, queries.data(), num_queries, all.data()));
  std::vector<int64_t> ids(static_cast<size_t>(num_queries * wanted), -7);
  std::vector<float> scores(ids.size());
  CHECK_OK(hkv_page_search(pool, 1, &head, queries.data(), num_queries, wanted, ids.data(),
                           scores.data()));
  for (int64_t query = 0; query < num_queries; ++query) {
    std::vector<std::pair<float, int64_t>> order;
    for (int64_t page = 0; page < count; ++page) {
      const float score = all[static_cast<size_t>(query * count + page)];
      const double bound = pages.bound(page, queries.data() + query * dim);
      CHECK(std::fabs(static_cast<double>(score) - bound) < 1e-3);
      order.emplace_back(-score, page);
    }
    std::sort(order.begin(), order.end());
    for (int64_t i = 0; i < wanted; ++i) {
      const size_t place = static_cast<size_t>(query * wanted + i);
      CHECK(ids[place] == (i < count ? order[static_cast<size_t>(i)].second : -1));
      CHECK(scores[place] == (i < count ? -order[static_cast<size_t>(i)].first : kNone));
    }
  }
}

}  // namespace

CLAIM(pages_are_bounded_and_found_at_every_width_and_dtype) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16}) check_pages(37, dim, dtype, 3, 7);
}

CLAIM(any_number_of_pages_and_queries_is_served) {
  ScopedPool pool(3);
  for (const int64_t count : {0, 1, 2, 15, 16, 17, 65}) check_pages(count, 36, HKV_BF16, 2, 9);
  for (const int64_t queries : {1, 2, 3, 5, 16, 17, 259})
    check_pages(21, 12, HKV_F32, queries, 4, pool.get());
  for (const int64_t wanted : {1, 20, 21, 22, 500}) check_pages(21, 12, HKV_F16, 2, wanted);
  check_pages(4500, 4, HKV_F32, 3, 10);
}

CLAIM(threads_look_for_pages_at_the_same_time) {
  ScopedPool pool(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      check_pages(130, 36, HKV_BF16, 20, 5, caller % 2 == 0 ? nullptr : pool.get());
    });
  for (std::thread &caller : callers) caller.join();
}

CLAIM(pages_that_do_not_fit_are_refused) {
  const Pages pages(5, 8, HKV_F32);
  const hkv_page_digests good = pages.digests();
  const std::vector<float> query = random_floats(8, 3);
  std::vector<float> scores(5);
  std::vector<int64_t> ids(5);
  hkv_page_digests heads[] = {good, good};
  const auto refused = [&](int32_t count, int64_t queries, const char *text) {
    CHECK_REFUSED(hkv_page_scores(nullptr, count, heads, query.data(), queries, scores.data()),
                  text);
    CHECK_REFUSED(
        hkv_page_search(nullptr, count, heads, query.data(), queries, 5, ids.data(), scores.data()),
        text);
    heads[0] = heads[1] = good;
  };
  refused(-1, 1, "head must not be NULL");
  refused(1, -1, "number of queries");
  refused(2, INT64_MIN, "number of queries");
  heads[0].highs.count = 4, refused(1, 1, "must agree");
  heads[0].lows.dtype = HKV_BF16, refused(1, 1, "must agree");
  heads[0].lows.data = nullptr, refused(1, 1, "NULL");
  heads[0].lows.dim = 0, refused(1, 1, "dim must be");
  heads[1].lows.count = heads[1].highs.count = 4, refused(2, 0, "as many pages");
  CHECK_REFUSED(hkv_page_scores(nullptr, 1, nullptr, query.data(), 1, scores.data()), "NULL");
  CHECK_REFUSED(hkv_page_scores(nullptr, 1, &good, nullptr, 1, scores.data()), "NULL");
  CHECK_REFUSED(hkv_page_scores(nullptr, 1, &good, query.data(), 1, nullptr), "NULL");
  for (const int64_t wanted : {int64_t{0}, int64_t{-1}, INT64_MIN})
    CHECK_REFUSED(
        hkv_page_search(nullptr, 1, &good, query.data(), 1, wanted, ids.data(), scores.data()),
        "number of pages");
  CHECK_REFUSED(hkv_page_search(nullptr, 1, &good, query.data(), 1, 5, nullptr, scores.data()),
                "NULL");
  CHECK_REFUSED(hkv_page_search(nullptr, 1, &good, query.data(), 1, 5, ids.data(), nullptr),
                "NULL");
}

CLAIM(a_token_is_appended_with_the_digest_of_its_page) {
  for (const int32_t dim : {1, 7, 36}) {
    Written to(dim, dim != 7);
    const std::vector<float> tokens = random_floats(4 * 2 * (dim + 3), 1);
    for (int64_t token = 0; token < 4; ++token) {
      const float *own = tokens.data() + token * 2 * (dim + 3);
      CHECK_OK(hkv_append(&to.pages, own, dim + 3, own + 1, dim + 1, 2, token, 40 + token));
      CHECK(to.positions[static_cast<size_t>(2 * Written::kSize + token)] == 40 + token);
    }
    for (int64_t head = 0; head < 2; ++head)
      for (int32_t d = 0; d < dim; ++d) {
        float low = 1e9f, high = -1e9f;
        for (int64_t token = 0; token < 4; ++token) {
          const float *own = tokens.data() + token * 2 * (dim + 3);
          const auto at = static_cast<size_t>(
              ((head * Written::kSlots + 2) * Written::kSize + token) * dim + d);
          CHECK(to.keys[at] == own[head * (dim + 3) + d]);
          CHECK(to.values[at] == own[1 + head * (dim + 1) + d]);
          low = std::min(low, to.keys[at]);
          high = std::max(high, to.keys[at]);
        }
        const auto page = static_cast<size_t>((head * Written::kSlots + 2) * dim + d);
        CHECK(dim == 7 || (to.lows[page] == low && to.highs[page] == high));
      }
  }
}

CLAIM(a_digest_of_a_key_that_is_no_number_is_none) {
  Written to(2, true);
  const float tokens[3][4] = {{1, 2, 1, 2}, {std::nanf(""), 1, 3, 0}, {0, 0, 0, 0}};
  for (int64_t token = 0; token < 3; ++token)
    CHECK_OK(hkv_append(&to.pages, tokens[token], 2, tokens[token], 2, 0, token, token));
  CHECK(std::isnan(to.lows[0]) && std::isnan(to.highs[0]));
  CHECK(to.lows[1] == 0.0f && to.highs[1] == 2.0f);
}

CLAIM(an_append_refuses_what_does_not_fit) {
  Written to(2, true);
  const float token[4] = {};
  const auto call = [&](int64_t slot, int64_t offset) {
    return hkv_append(&to.pages, token, 2, token, 2, slot, offset, 0);
  };
  CHECK_REFUSED(call(3, 0), "slot");
  CHECK_REFUSED(call(-1, 0), "slot");
  CHECK_REFUSED(call(0, 4), "offset");
  CHECK_REFUSED(hkv_append(nullptr, token, 2, token, 2, 0, 0, 0), "must not be NULL");
  to.pages.dtype = 3;
  CHECK_REFUSED(call(0, 0), "dtype");
  to.pages.dtype = HKV_F32;
  to.pages.lows = nullptr;
  CHECK_REFUSED(call(0, 0), "digests");
}
