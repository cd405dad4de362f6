// One traversal serves all queries of a group: a key is read once and scored for all of them, but
// every query has a beam of its own, because one common beam would starve some of them.
#include "graph_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "error.h"
#include "graph_beam.h"
#include "graph_marks.h"
#include "quantise.h"
#include "row_scores.h"
#include "select.h"

namespace hkv {
namespace {

constexpr int kGroup = 16;       // queries that are searched together
constexpr int kRegisters = 4;    // queries whose sums fit the registers
constexpr int kTailRows = 1024;  // keys outside the graph that are scored at a time

/// Working memory of one thread; grows to the largest search it has seen.
class Traversal {
 public:
  /// Fills beams() for queries [count, dim], count <= 16.
  void run(const hkv_graph_head &head, const hkv_graph_query &params, const float *queries,
           int count, const int64_t *warm) {
    head_ = &head;
    count_ = count;
    rows_ = 0;
    prepare(params, queries);
    score_tail(params);
    start(params, warm);
    while (expand(params)) {
    }
  }

  int64_t rows() const { return rows_; }
  const Beam &beam(int query) const { return beams_[query]; }

 private:
  void prepare(const hkv_graph_query &params, const float *queries) {
    const hkv_quantised &quantised = head_->quantised;
    bytes_ = row_bytes(quantised.dim);
    grow(codes_, kGroup * bytes_);
    for (int query = 0; query < count_; ++query) {
      scales_[query] = quantise_query(quantised, queries + int64_t{query} * quantised.dim,
                                      codes_.data() + query * bytes_, bytes_);
      beams_[query].reset(params.pool_size);
    }
    visited_.reset(head_->linked);
    expanded_.reset(head_->linked);
    const int64_t lists = int64_t{count_} * params.width;
    reserve(std::max<int64_t>({lists * head_->degree, kTailRows,
                               head_->num_entries + int64_t{count_} * params.num_warm}));
    grow(selected_, lists);
  }

  void reserve(int64_t keys) {
    const int64_t padded = (keys + 31) / 16 * 16;
    grow(fresh_, padded);
    grow(levels_, padded);
    grow(dots_, kGroup * padded);
    grow(survivors_, padded);
    grow(scratch_, padded);
    stride_ = padded;
  }

  template <typename Element>
  static void grow(std::vector<Element> &values, int64_t size) {
    if (static_cast<int64_t>(values.size()) < size) values.resize(size);
  }

  void score_tail(const hkv_graph_query &) {
    const int64_t end = head_->keys.count;
    for (int64_t first = head_->linked; first < end; first += kTailRows) {
      num_fresh_ = static_cast<int>(std::min<int64_t>(kTailRows, end - first));
      for (int i = 0; i < num_fresh_; ++i) discover(fresh_[i] = static_cast<int32_t>(first + i));
      score();
    }
  }

  void start(const hkv_graph_query &params, const int64_t *warm) {
    num_fresh_ = 0;
    const auto add = [&](int64_t key) {
      if (key < 0 || key >= head_->linked || !visited_.add(static_cast<int32_t>(key))) return;
      fresh_[num_fresh_++] = static_cast<int32_t>(key);
      discover(static_cast<int32_t>(key));
    };
    for (int i = 0; i < head_->num_entries; ++i) add(head_->entries[i]);
    for (int64_t i = 0; i < int64_t{count_} * params.num_warm; ++i) add(warm[i]);
    score();
  }

  /// One step; false when the best keys of all queries have been expanded.
  bool expand(const hkv_graph_query &params) {
    num_selected_ = 0;
    for (int query = 0; query < count_; ++query)
      beams_[query].next(
          params.beam, params.width,
          [&](int32_t key) { return key >= head_->linked || expanded_.has(key); },
          [&](int32_t key) { return select(key); });
    if (num_selected_ == 0) return false;
    const int64_t list_bytes = head_->degree * int64_t{sizeof(int32_t)};
    for (int i = 0; i < num_selected_; ++i)
      for (int64_t at = 0; at < list_bytes; at += kLineBytes)
        __builtin_prefetch(reinterpret_cast<const char *>(selected_[i]) + at);
    num_fresh_ = 0;
    for (int i = 0; i < num_selected_; ++i) {
      const int found = visited_.add_list(selected_[i], head_->degree, fresh_.data() + num_fresh_);
      for (int j = 0; j < found; ++j) discover(fresh_[num_fresh_ + j]);
      num_fresh_ += found;
    }
    score();
    return true;
  }

  bool select(int32_t key) {
    expanded_.add(key);
    const int32_t list = head_->list_of[key];
    if (list < 0) return false;
    selected_[num_selected_++] = head_->neighbours + int64_t{list} * head_->degree;
    return true;
  }

  /// Asks for what scoring the key will read.
  void discover(int32_t key) const {
    const uint8_t *row = head_->quantised.rows + key * bytes_;
    for (int64_t at = 0; at < bytes_; at += kLineBytes) __builtin_prefetch(row + at);
    __builtin_prefetch(head_->quantised.scale_codes + key);
  }

  /// Scores fresh_ for all queries and puts what is good enough into the beams.
  void score() {
    if (num_fresh_ == 0) return;
    rows_ += num_fresh_;
    for (int i = 0; i < num_fresh_; ++i)
      levels_[i] = head_->quantised.levels[head_->quantised.scale_codes[fresh_[i]]];
    for (int at = 0; at < num_fresh_; at += 4) {
      const uint8_t *rows[4];
      for (int i = 0; i < 4; ++i)
        rows[i] = head_->quantised.rows + fresh_[std::min(at + i, num_fresh_ - 1)] * bytes_;
      for (int query = 0; query < count_; query += kRegisters)
        multiply(rows, query, at);
    }
    for (int query = 0; query < count_; ++query) collect(query);
  }

  void multiply(const uint8_t *const rows[4], int query, int at) {
    switch (std::min(kRegisters, count_ - query)) {
      case 1: return multiply_some<1>(rows, query, at);
      case 2: return multiply_some<2>(rows, query, at);
      case 3: return multiply_some<3>(rows, query, at);
      default: return multiply_some<4>(rows, query, at);
    }
  }

  template <int Queries>
  void multiply_some(const uint8_t *const rows[4], int query, int at) {
    int32_t four[Queries][4];
    dot_four_u8s8<Queries>(rows, codes_.data() + query * bytes_, bytes_, bytes_, four);
    for (int i = 0; i < Queries; ++i)
      std::copy_n(four[i], 4, dots_.data() + (query + i) * stride_ + at);
  }

  void collect(int query) {
    Beam &beam = beams_[query];
    const int32_t *dots = dots_.data() + query * stride_;
    const int32_t shift = kZeroCode * scales_[query].sum;
    const float threshold = beam.threshold();
    int found = 0;
    for (int at = 0; at < num_fresh_; at += 16) {
      float scores[16];
      for (int i = 0; i < 16; ++i)
        scores[i] = static_cast<float>(dots[at + i] - shift) * levels_[at + i];
      unsigned good = good_enough(scores, threshold);
      if (num_fresh_ - at < 16) good &= (1u << (num_fresh_ - at)) - 1;
      for (; good != 0; good &= good - 1) {
        const int i = __builtin_ctz(good);
        survivors_[found++] = pack(scores[i], static_cast<uint32_t>(fresh_[at + i]));
      }
    }
    if (found == 0) return;
    keep_best(survivors_.data(), found, beam.capacity());
    found = std::min(found, beam.capacity());
    sort_entries(survivors_.data(), found, scratch_.data());
    beam.merge(survivors_.data(), found);
  }

  static unsigned good_enough(const float *scores, float threshold) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(scores), _mm512_set1_ps(threshold), _CMP_GE_OQ);
#else
    unsigned good = 0;
    for (int i = 0; i < 16; ++i) good |= static_cast<unsigned>(scores[i] >= threshold) << i;
    return good;
#endif
  }

  const hkv_graph_head *head_ = nullptr;
  int count_ = 0;      // queries
  int64_t bytes_ = 0;  // of a row
  int64_t rows_ = 0;   // scored
  std::vector<int8_t> codes_;
  QueryScale scales_[kGroup];
  Beam beams_[kGroup];
  Marks visited_, expanded_;
  std::vector<const int32_t *> selected_;  // lists to read in this step
  int num_selected_ = 0;
  std::vector<int32_t> fresh_;  // keys to score in this step
  int num_fresh_ = 0;
  std::vector<float> levels_;  // of the fresh keys
  std::vector<int32_t> dots_;  // [queries, stride_]
  int64_t stride_ = 0;
  std::vector<Entry> survivors_, scratch_;
};

/// Exact scores of what a traversal found.
class Ranking {
 public:
  /// Fills ids and scores [top_k]; returns how many keys were scored.
  int64_t run(const hkv_graph_head &head, const hkv_graph_query &params, const Beam &beam,
              const float *query, int64_t *ids, float *scores) {
    score(head.keys, beam, query);
    sort_entries(entries_.data(), beam.count(), scratch_.data());
    const float floor =
        beam.count() > 0 ? score_of(entries_[0]) - params.beta : 0.0f;
    for (int i = 0; i < params.top_k; ++i) {
      const bool found = i < beam.count() && score_of(entries_[i]) >= floor;
      ids[i] = found ? static_cast<int64_t>(id_of(entries_[i])) : -1;
      scores[i] = found ? score_of(entries_[i]) : -std::numeric_limits<float>::infinity();
    }
    return beam.count();
  }

 private:
  void score(const hkv_keys &keys, const Beam &beam, const float *query) {
    const RowVectors vectors(keys.dim);
    const auto count = static_cast<size_t>(beam.count());
    if (query_.size() < static_cast<size_t>(vectors.padded())) query_.resize(vectors.padded());
    if (ids_.size() < count) {
      ids_.resize(count);
      scores_.resize(count + 4);
      entries_.resize(count);
      scratch_.resize(count);
    }
    vectors.pad(query, query_.data());
    for (size_t i = 0; i < count; ++i) ids_[i] = id_of(beam[static_cast<int>(i)]);
    with_dtype(keys.dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      score_listed<Element>(keys, query_.data(), ids_.data(), beam.count(), scores_.data());
    });
    for (size_t i = 0; i < count; ++i) entries_[i] = pack(scores_[i], ids_[i]);
  }

  std::vector<float> query_, scores_;
  std::vector<uint32_t> ids_;
  std::vector<Entry> entries_, scratch_;
};

/// One call of hkv_graph_search.
struct Job {
  const hkv_graph_head *heads;
  const hkv_graph_query &params;
  const float *queries;
  const int64_t *warm;
  int64_t *ids;
  float *scores;
  int64_t *rows;
  int64_t *dots;
  int64_t groups;  // of one head

  void run(int64_t item) const {
    thread_local Traversal traversal;
    thread_local Ranking ranking;
    const hkv_graph_head &head = heads[item / groups];
    const int64_t first = item % groups * kGroup;
    const int count = static_cast<int>(std::min<int64_t>(kGroup, params.queries - first));
    const int64_t place = item / groups * params.queries + first;  // of the first query
    const float *mine = queries + place * head.keys.dim;
    traversal.run(head, params, mine, count, warm + place * params.num_warm);
    int64_t exact = 0;
    for (int i = 0; i < count; ++i)
      exact += ranking.run(head, params, traversal.beam(i), mine + int64_t{i} * head.keys.dim,
                           ids + (place + i) * params.top_k, scores + (place + i) * params.top_k);
    __atomic_fetch_add(rows + item / groups, traversal.rows(), __ATOMIC_RELAXED);
    __atomic_fetch_add(dots + item / groups, traversal.rows() * count + exact, __ATOMIC_RELAXED);
  }
};

}  // namespace

void check_query(const hkv_graph_query &query) {
  constexpr int32_t kMost = 1 << 20;
  require(query.queries >= 0, "queries must be at least 0");
  require(query.top_k >= 1, "top_k must be at least 1");
  require(query.pool_size >= query.top_k && query.pool_size <= kMost,
          "pool_size must be top_k..1048576");
  require(query.beam >= 1 && query.beam <= query.pool_size, "beam must be 1..pool_size");
  require(query.width >= 1 && query.width <= 1024, "width must be 1..1024");
  require(query.num_warm >= 0 && query.num_warm <= kMost, "num_warm must be 0..1048576");
  require(query.beta >= 0.0f, "beta must be at least 0");
}

void check_head(const hkv_graph_head &head) {
  check_keys(head.keys);
  check_quantised(head.quantised);
  require(head.keys.dim == head.quantised.dim, "keys and quantised must agree in dim");
  require(head.keys.count < INT32_MAX, "there must be fewer than 2^31 - 1 keys");
  require(head.keys.count <= head.quantised.count, "all keys must be quantised");
  require(head.keys.count == 0 || head.quantised.rows, "keys must be quantised in rows");
  require(head.linked >= 0 && head.linked <= head.keys.count, "linked must be 0..keys");
  require(head.num_lists >= 0 && head.num_entries >= 0, "the graph's sizes must be at least 0");
  require(head.degree >= 1 && head.degree <= HKV_MAX_DEGREE, "max_degree must be 1..256");
  require(head.linked == 0 || head.list_of, "list_of must not be NULL");
  require(head.num_lists == 0 || head.neighbours, "neighbours must not be NULL");
  require(head.num_entries == 0 || head.entries, "entries must not be NULL");
}

}  // namespace hkv

extern "C" {

int hkv_graph_search(hkv_pool *pool, int32_t heads, const hkv_graph_head *head,
                     const hkv_graph_query *query, const float *queries, const int64_t *warm,
                     int64_t *ids, float *scores, int64_t *rows, int64_t *dots) {
  return hkv::guarded([&] {
    hkv::require(heads >= 0 && query, "heads must be at least 0, and query not NULL");
    hkv::check_query(*query);
    if (heads == 0 || query->queries == 0) return;
    hkv::require(head && queries && ids && scores && rows && dots, "arguments must not be NULL");
    hkv::require(warm || query->num_warm == 0, "warm must not be NULL");
    for (int32_t i = 0; i < heads; ++i) {
      hkv::check_head(head[i]);
      rows[i] = dots[i] = 0;
    }
    const int64_t groups = (query->queries + hkv::kGroup - 1) / hkv::kGroup;
    const hkv::Job job{head, *query, queries, warm, ids, scores, rows, dots, groups};
    hkv::parallel_for(pool, heads * groups, [&job](int64_t item, int) { job.run(item); });
  });
}

}  // extern "C"
