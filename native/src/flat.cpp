// The flat scan of all KV heads of a layer, and nearest keys of very many queries of one head.
#include "hybrid_kv_flat.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "block_scores.h"
#include "convert.h"
#include "error.h"
#include "pool.h"
#include "quantise.h"
#include "row_scores.h"
#include "scan.h"
#include "sort.h"

namespace hkv {
namespace {

constexpr int64_t kGroup = 256;         // queries of one scan; their selections stay in the cache
constexpr int64_t kSmallestPart = 8192;  // keys that are worth another thread
constexpr int64_t kMostParts = 64;

/// Scratch of one thread; it grows to the largest search and is kept.
struct Scratch {
  Scan scan;
  BlockScores blocks;
  RowScores<float> floats;
  RowScores<Half> halves;
  RowScores<Bfloat> bfloats;
  std::vector<float> queries;  // of a group, where they come in another dtype
  std::vector<float> padded_query;
  std::vector<float> merged_scores;
  std::vector<uint32_t> merged_ids;
  SortBestFirst sort;

  RowScores<float> &rows(const float *) { return floats; }
  RowScores<Half> &rows(const Half *) { return halves; }
  RowScores<Bfloat> &rows(const Bfloat *) { return bfloats; }
};

Scratch &scratch() {
  thread_local Scratch own;
  return own;
}

/// What the parts of the heads found, for the thread that asked.
struct Parts {
  std::vector<float> scores;  // [heads * queries, parts, keep]
  std::vector<uint32_t> ids;
  std::vector<int64_t> counts;
};

Parts &parts_here() {
  thread_local Parts own;
  return own;
}

template <typename Value>
void grow(std::vector<Value> &values, int64_t size) {
  if (static_cast<int64_t>(values.size()) < size) values.resize(size);
}

template <typename Element>
using ElementOf = std::remove_const_t<std::remove_pointer_t<Element>>;

int64_t num_keys(const hkv_flat_head &head) {
  return head.quantised != nullptr ? head.quantised->count : head.keys.count;
}

int32_t dim_of(const hkv_flat_head &head) {
  return head.quantised != nullptr ? head.quantised->dim : head.keys.dim;
}

struct Search {
  hkv_pool *pool;
  int32_t heads;
  const hkv_flat_head *head;
  hkv_keys queries;  // `count` of each head in turn
  int64_t num_queries, top_k, rerank;
  int32_t id_type;
  void *ids;
  float *scores;

  void check() const;
  void run();

 private:
  void choose_parts();
  void scan_item(int64_t item);
  void finish_item(int64_t item);
  const float *queries_of(int64_t row, int64_t count, std::vector<float> &own) const;
  template <typename Scores>
  void scan_with(Scratch &own, Scores &scores, int32_t at, int64_t group, int64_t part,
                 const float *rows);
  void finish_query(Scratch &own, int32_t at, int64_t row, const float *query, Found found);
  void score_again(Scratch &own, const hkv_flat_head &from, const float *query, Found found);
  void write(int64_t row, Found found) const;

  int64_t keep(int32_t at) const {
    const bool again = head[at].quantised != nullptr && rerank > 0;
    return std::min(again ? std::max(rerank, top_k) : top_k, num_keys(head[at]));
  }

  int64_t groups_ = 1, parts_ = 1, stored_ = 0;
  Parts *found_ = nullptr;  // where there are several parts
};

void Search::check() const {
  require(heads >= 0 && (heads == 0 || head != nullptr), "head must not be NULL");
  require(num_queries >= 0, "the number of queries must be at least 0");
  require(top_k >= 1, "top_k must be at least 1");
  require(rerank >= 0, "rerank must be at least 0");
  require(id_type == HKV_IDS_INT32 || id_type == HKV_IDS_INT64,
          "id_type must be int32 (0) or int64 (1)");
  const bool empty = heads == 0 || num_queries == 0;
  require(empty || (queries.data != nullptr && ids != nullptr), "arrays must not be NULL");
  for (int32_t at = 0; at < heads; ++at) {
    const hkv_flat_head &one = head[at];
    require(dim_of(one) == queries.dim, "all heads must have the dim of the queries");
    require(num_keys(one) <= std::numeric_limits<int32_t>::max(),
            "a head must have fewer than 2^31 keys");
    if (one.quantised != nullptr) {
      check_quantised(*one.quantised);
      require(one.quantised->count == 0 || one.quantised->blocks != nullptr,
              "a flat scan needs the blocks of quantised keys");
    }
    if (one.quantised == nullptr || rerank > 0) {
      check_keys(one.keys);
      require(one.keys.dim == queries.dim && one.keys.count >= num_keys(one),
              "re-ranking needs all quantised keys with their dim");
    }
  }
}

void Search::choose_parts() {
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (int32_t at = 0; at < heads; ++at) fewest = std::min(fewest, num_keys(head[at]));
  const int64_t threads = pool == nullptr ? 1 : pool->threads();
  parts_ = parts_of_items(heads * groups_, threads, std::min(kMostParts, fewest / kSmallestPart));
}

void Search::run() {
  check();
  if (heads == 0 || num_queries == 0) return;
  groups_ = (num_queries + kGroup - 1) / kGroup;
  choose_parts();
  if (parts_ > 1) {
    for (int32_t at = 0; at < heads; ++at) stored_ = std::max(stored_, keep(at));
    found_ = &parts_here();
    grow(found_->scores, heads * num_queries * parts_ * stored_);
    grow(found_->ids, heads * num_queries * parts_ * stored_);
    grow(found_->counts, heads * num_queries * parts_);
  }
  // The bodies hold one pointer, which std::function keeps without an allocation.
  parallel_for(pool, heads * groups_ * parts_, [this](int64_t item, int) { scan_item(item); });
  if (parts_ > 1)
    parallel_for(pool, heads * num_queries, [this](int64_t item, int) { finish_item(item); });
}

const float *Search::queries_of(int64_t row, int64_t count, std::vector<float> &own) const {
  if (queries.dtype == HKV_F32 && queries.stride == queries.dim)
    return static_cast<const float *>(queries.data) + row * queries.dim;
  grow(own, count * queries.dim);
  with_dtype(queries.dtype, [&](auto *element) {
    const auto *from = static_cast<decltype(element)>(queries.data);
    for (int64_t i = 0; i < count; ++i)
      convert(from + (row + i) * queries.stride, queries.dim, own.data() + i * queries.dim);
  });
  return own.data();
}

void Search::scan_item(int64_t item) {
  Scratch &own = scratch();
  const int64_t part = item % parts_, group = item / parts_ % groups_;
  const int32_t at = static_cast<int32_t>(item / parts_ / groups_);
  const int64_t count = std::min(kGroup, num_queries - group * kGroup);
  const float *rows = queries_of(at * num_queries + group * kGroup, count, own.queries);
  if (num_keys(head[at]) == 0) {
    for (int64_t i = 0; i < count; ++i) write(at * num_queries + group * kGroup + i, {});
  } else if (head[at].quantised != nullptr) {
    own.blocks.prepare(*head[at].quantised, rows, count);
    scan_with(own, own.blocks, at, group, part, rows);
  } else {
    with_dtype(head[at].keys.dtype, [&](auto *element) {
      auto &scores = own.rows(element);
      scores.prepare(head[at].keys, rows, count);
      scan_with(own, scores, at, group, part, rows);
    });
  }
}

template <typename Scores>
void Search::scan_with(Scratch &own, Scores &with, int32_t at, int64_t group, int64_t part,
                       const float *rows) {
  const int64_t total = num_keys(head[at]), chunks = (total + kChunk - 1) / kChunk;
  const int64_t first = chunks * part / parts_ * kChunk;
  const int64_t last = std::min(total, chunks * (part + 1) / parts_ * kChunk);
  const int64_t first_query = at * num_queries + group * kGroup;
  const int64_t count = std::min(kGroup, num_queries - group * kGroup);
  own.scan.run(with, count, first, last, keep(at));
  for (int64_t query = 0; query < count; ++query) {
    const Found found{own.scan.scores(query), own.scan.ids(query), own.scan.found(query)};
    with.finish(query, found.scores, found.count);
    if (parts_ == 1) {
      finish_query(own, at, first_query + query, rows + query * queries.dim, found);
      continue;
    }
    const int64_t slot = (first_query + query) * parts_ + part;
    std::copy_n(found.scores, found.count, found_->scores.data() + slot * stored_);
    std::copy_n(found.ids, found.count, found_->ids.data() + slot * stored_);
    found_->counts[slot] = found.count;
  }
}

/// Brings the parts' results of one query together.
void Search::finish_item(int64_t row) {
  Scratch &own = scratch();
  const int32_t at = static_cast<int32_t>(row / num_queries);
  grow(own.merged_scores, parts_ * stored_ + kScoreVector);
  grow(own.merged_ids, parts_ * stored_ + kScoreVector);
  Found found{own.merged_scores.data(), own.merged_ids.data(), 0};
  for (int64_t part = 0; part < parts_; ++part) {  // ids ascend from part to part
    const int64_t slot = row * parts_ + part, count = found_->counts[slot];
    std::copy_n(found_->scores.data() + slot * stored_, count, found.scores + found.count);
    std::copy_n(found_->ids.data() + slot * stored_, count, found.ids + found.count);
    found.count += count;
  }
  if (found.count > keep(at)) {
    const Cut cut = cut_at(found.scores, found.count, keep(at));
    found.count = apply_cut(cut, found.scores, found.ids, found.count);
  }
  finish_query(own, at, row, queries_of(row, 1, own.queries), found);
}

/// found: by ascending id, at most keep(at) of them.
void Search::finish_query(Scratch &own, int32_t at, int64_t row, const float *query,
                          Found found) {
  if (head[at].quantised != nullptr && rerank > 0) score_again(own, head[at], query, found);
  own.sort.run(found);
  found.count = std::min(found.count, top_k);
  write(row, found);
}

void Search::score_again(Scratch &own, const hkv_flat_head &from, const float *query,
                         Found found) {
  const RowVectors vectors(from.keys.dim);
  grow(own.padded_query, vectors.padded());
  vectors.pad(query, own.padded_query.data());
  with_dtype(from.keys.dtype, [&](auto *element) {
    score_listed<ElementOf<decltype(element)>>(from.keys, own.padded_query.data(), found.ids,
                                               found.count, found.scores);
  });
}

void Search::write(int64_t row, Found found) const {
  const auto fill = [&](auto *to) {
    std::copy_n(found.ids, found.count, to);
    std::fill(to + found.count, to + top_k, -1);
  };
  if (id_type == HKV_IDS_INT64)
    fill(static_cast<int64_t *>(ids) + row * top_k);
  else
    fill(static_cast<int32_t *>(ids) + row * top_k);
  if (scores == nullptr) return;
  float *to = scores + row * top_k;
  std::copy_n(found.scores, found.count, to);
  std::fill(to + found.count, to + top_k, -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace hkv

extern "C" {

int hkv_flat_search(hkv_pool *pool, int32_t heads, const hkv_flat_head *head, const float *queries,
                    int64_t num_queries, int64_t top_k, int64_t rerank, int32_t id_type, void *ids,
                    float *scores, int64_t *scored) {
  return hkv::guarded([&] {
    hkv::require(heads <= 0 || head != nullptr, "head must not be NULL");
    const int32_t dim = heads > 0 ? hkv::dim_of(head[0]) : 1;
    hkv::Search search{};
    search.pool = pool;
    search.heads = heads;
    search.head = head;
    search.queries = {queries, num_queries, dim, dim, HKV_F32};
    search.num_queries = num_queries;
    search.top_k = top_k;
    search.rerank = rerank;
    search.id_type = id_type;
    search.ids = ids;
    search.scores = scores;
    search.run();
    if (scored == nullptr) return;
    *scored = 0;
    for (int32_t at = 0; at < heads; ++at) {
      const int64_t keys = hkv::num_keys(head[at]);
      const bool again = head[at].quantised != nullptr && rerank > 0;
      *scored += num_queries * (keys + (again ? std::min(std::max(rerank, top_k), keys) : 0));
    }
  });
}

int hkv_knn(hkv_pool *pool, const hkv_flat_head *head, const hkv_keys *queries, int64_t top_k,
            int64_t rerank, int32_t id_type, void *ids, float *scores) {
  return hkv::guarded([&] {
    hkv::require(head != nullptr && queries != nullptr, "head and queries must not be NULL");
    hkv::check_keys(*queries);
    hkv::Search search{};
    search.pool = pool;
    search.heads = 1;
    search.head = head;
    search.queries = *queries;
    search.num_queries = queries->count;
    search.top_k = top_k;
    search.rerank = rerank;
    search.id_type = id_type;
    search.ids = ids;
    search.scores = scores;
    search.run();
  });
}

uint64_t hkv_stream(const void *data, int64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(64), aligned(1), may_alias));
  const Line *lines = static_cast<const Line *>(data);
  const int64_t count = bytes / 64;
  Line sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(reinterpret_cast<const char *>(lines + i + j) + hkv::kPrefetchBytes);
      sums[j] += lines[i + j];
    }
  for (; i < count; ++i) sums[0] += lines[i];
  const Line sum = sums[0] + sums[1] + sums[2] + sums[3];
  uint64_t total = 0;
  for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  return total;
}

}  // extern "C"
