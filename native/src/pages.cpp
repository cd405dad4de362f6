// Bounds of pages: max(q low, q high) = relu(q) high - relu(-q) low in every channel, so a bound is
// the sum of two dot products, and pages are scanned as keys are.
#include "hybrid_kv_pages.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "convert.h"
#include "error.h"
#include "pool.h"
#include "quantise.h"
#include "row_scores.h"
#include "scan.h"
#include "sort.h"

namespace hkv {
namespace {

constexpr int64_t kGroup = 256;  // queries of one pass; their selections stay in the cache

/// Bounds of the pages of one head against any number of queries; see BlockScores.
template <typename Element>
class PageScores {
 public:
  void prepare(const hkv_page_digests &pages, const float *queries, int64_t count) {
    const int64_t size = count * pages.lows.dim;
    if (static_cast<int64_t>(positive_.size()) < size) positive_.resize(size);
    if (static_cast<int64_t>(negative_.size()) < size) negative_.resize(size);
    for (int64_t i = 0; i < size; ++i) {
      positive_[i] = queries[i] > 0.0f ? queries[i] : 0.0f;
      negative_[i] = queries[i] < 0.0f ? queries[i] : 0.0f;
    }
    highs_.prepare(pages.highs, positive_.data(), count);
    lows_.prepare(pages.lows, negative_.data(), count);
    if (part_.empty()) part_.resize(kSlice * kChunk);
  }

  int64_t keys_ahead() const { return highs_.keys_ahead(); }

  void score(int64_t slice, int64_t first, int64_t count, float *out, int64_t row,
             int64_t ahead_keys) const {
    highs_.score(slice, first, count, out, row, ahead_keys);
    lows_.score(slice, first, count, part_.data(), kChunk, ahead_keys);
    const int64_t rounded = (count + kScoreVector - 1) / kScoreVector * kScoreVector;
    for (int query = 0; query < highs_.padded(slice); ++query)
      for (int64_t i = 0; i < rounded; ++i) out[query * row + i] += part_[query * kChunk + i];
  }

 private:
  RowScores<Element> highs_, lows_;
  std::vector<float> positive_, negative_;  // parts of the queries
  mutable std::vector<float> part_;         // [kSlice, kChunk]
};

/// Scratch of one thread; it grows to the largest search and is kept.
struct Scratch {
  Scan scan;
  PageScores<float> floats;
  PageScores<Half> halves;
  PageScores<Bfloat> bfloats;
  SortBestFirst sort;
  std::vector<float> chunk;  // [kSlice, kChunk]

  PageScores<float> &of(const float *) { return floats; }
  PageScores<Half> &of(const Half *) { return halves; }
  PageScores<Bfloat> &of(const Bfloat *) { return bfloats; }
};

Scratch &scratch() {
  thread_local Scratch own;
  return own;
}

void check(int32_t heads, const hkv_page_digests *head, const float *queries, int64_t num_queries) {
  require(heads >= 0 && (heads == 0 || head != nullptr), "head must not be NULL");
  require(num_queries >= 0, "the number of queries must be at least 0");
  require(heads == 0 || num_queries == 0 || queries != nullptr, "queries must not be NULL");
  for (int32_t at = 0; at < heads; ++at) {
    const hkv_keys &lows = head[at].lows, &highs = head[at].highs;
    check_keys(lows);
    check_keys(highs);
    require(lows.count == highs.count && lows.dim == highs.dim && lows.dtype == highs.dtype,
            "the lows and the highs of pages must agree in count, dim and dtype");
    require(lows.dim == head[0].lows.dim && lows.count == head[0].lows.count,
            "all heads must have the same dim and as many pages");
    require(lows.count <= std::numeric_limits<int32_t>::max(),
            "a head must have fewer than 2^31 pages");
  }
}

/// Calls body(scratch, scores, head, first query, queries) for groups of queries on all threads.
template <typename Body>
void for_groups(hkv_pool *pool, int32_t heads, const hkv_page_digests *head, const float *queries,
                int64_t num_queries, const Body &body) {
  const int64_t groups = (num_queries + kGroup - 1) / kGroup;
  parallel_for(pool, heads * groups, [&](int64_t item, int) {
    const hkv_page_digests &pages = head[item / groups];
    const int64_t first = item % groups * kGroup, count = std::min(kGroup, num_queries - first);
    const int64_t row = item / groups * num_queries + first;
    with_dtype(pages.lows.dtype, [&](auto *element) {
      Scratch &own = scratch();
      auto &scores = own.of(element);
      scores.prepare(pages, queries + row * pages.lows.dim, count);
      body(own, scores, pages, row, count);
    });
  });
}

/// Writes the bounds of all pages for `count` queries: out [count, pages].
template <typename Scores>
void write_scores(Scratch &own, const Scores &scores, int64_t num_pages, int64_t count,
                  float *out) {
  if (own.chunk.empty()) own.chunk.resize(kSlice * kChunk);
  for (int64_t first = 0; first < num_pages; first += kShortChunk) {
    const int64_t pages = std::min(kShortChunk, num_pages - first);
    for (int64_t slice = 0; slice * kSlice < count; ++slice) {
      scores.score(slice, first, pages, own.chunk.data(), kChunk,
                   slice == 0 ? scores.keys_ahead() : 0);
      for (int64_t query = slice * kSlice; query < std::min(count, (slice + 1) * kSlice); ++query)
        std::copy_n(own.chunk.data() + query % kSlice * kChunk, pages,
                    out + query * num_pages + first);
    }
  }
}

}  // namespace
}  // namespace hkv

extern "C" {

int hkv_page_scores(hkv_pool *pool, int32_t heads, const hkv_page_digests *head,
                    const float *queries, int64_t num_queries, float *scores) {
  return hkv::guarded([&] {
    hkv::check(heads, head, queries, num_queries);
    if (heads == 0 || num_queries == 0 || head[0].lows.count == 0) return;
    hkv::require(scores != nullptr, "scores must not be NULL");
    hkv::for_groups(pool, heads, head, queries, num_queries,
                    [&](hkv::Scratch &own, const auto &with, const hkv_page_digests &pages,
                        int64_t row, int64_t count) {
                      hkv::write_scores(own, with, pages.lows.count, count,
                                        scores + row * pages.lows.count);
                    });
  });
}

int hkv_page_search(hkv_pool *pool, int32_t heads, const hkv_page_digests *head,
                    const float *queries, int64_t num_queries, int64_t wanted, int64_t *pages,
                    float *scores) {
  return hkv::guarded([&] {
    hkv::check(heads, head, queries, num_queries);
    hkv::require(wanted >= 1, "the number of pages must be at least 1");
    if (heads == 0 || num_queries == 0) return;
    hkv::require(pages != nullptr && scores != nullptr, "arrays must not be NULL");
    hkv::for_groups(
        pool, heads, head, queries, num_queries,
        [&](hkv::Scratch &own, const auto &with, const hkv_page_digests &of, int64_t row,
            int64_t count) {
          const int64_t keep = std::min(wanted, of.lows.count);
          std::fill_n(pages + row * wanted, count * wanted, -1);
          std::fill_n(scores + row * wanted, count * wanted,
                      -std::numeric_limits<float>::infinity());
          if (keep == 0) return;
          own.scan.run(with, count, 0, of.lows.count, keep);
          for (int64_t query = 0; query < count; ++query) {
            const hkv::Found found{own.scan.scores(query), own.scan.ids(query),
                                   own.scan.found(query)};
            own.sort.run(found);
            std::copy_n(found.ids, found.count, pages + (row + query) * wanted);
            std::copy_n(found.scores, found.count, scores + (row + query) * wanted);
          }
        });
  });
}

}  // extern "C"
