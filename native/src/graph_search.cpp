// One traversal serves all queries of a group: a key is read once and scored for all of them, but
// every query has a beam of its own, because one common beam would starve some of them. Keys beyond
// a graph are scanned in pieces of their own, as a flat scan reads them.
#include "graph_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "error.h"
#include "graph_beam.h"
#include "graph_lists.h"
#include "graph_finish.h"
#include "graph_marks.h"
#include "graph_pieces.h"
#include "quantise.h"
#include "select.h"

namespace hkv {
namespace {

constexpr int kRegisters = 4;   // queries whose sums fit the registers
constexpr int kRowsAhead = 16;  // of the row that is scored, in the first cache
constexpr int32_t kMost = 1 << 20;

/// A node: what a search numbers things by.
using Row = int32_t;

/// Working memory of one thread; grows to the largest search it has seen.
class Traversal {
 public:
  /// Fills beams() for queries [count, dim], count <= 16.
  void run(const hkv_graph_head &head, const hkv_graph_query &params, int beam,
           const float *queries, int count, const int64_t *warm) {
    head_ = &head;
    limit_ = beam;
    count_ = count;
    rows_ = 0;
    prepare(params, queries);
    start(params, warm);
    while (expand(params)) {
    }
  }

  int64_t rows() const { return rows_; }

  /// The best `keep` keys of a query, with scores that include everything; returns how many.
  int64_t take(int query, int64_t keep, Entry *to) const {
    const Beam &beam = beams_[query];
    const int64_t count = std::min<int64_t>(beam.count(), keep);
    for (int64_t i = 0; i < count; ++i) {
      const Entry entry = beam[static_cast<int>(i)];
      const float score = score_of(entry) * scales_[query].scale + scales_[query].offset;
      to[i] = pack(score, static_cast<uint32_t>(head_->keys_of[id_of(entry)]));
    }
    return count;
  }

 private:
  void prepare(const hkv_graph_query &params, const float *queries) {
    const hkv_quantised &quantised = head_->rows;
    bytes_ = row_bytes(quantised.dim);
    grow(codes_, kGroup * bytes_);
    for (int query = 0; query < count_; ++query) {
      scales_[query] = quantise_query(quantised, queries + int64_t{query} * quantised.dim,
                                      codes_.data() + query * bytes_, bytes_);
      beams_[query].reset(std::max(limit_, params.pool_size));
    }
    visited_.reset(head_->num_nodes);
    expanded_.reset(head_->num_nodes);
    layout_ = ListLayout(head_->degree, head_->num_nodes);
    const int64_t lists = int64_t{count_} * params.width;
    reserve(std::max<int64_t>(lists * layout_.slots,
                              head_->num_entries + int64_t{count_} * params.num_warm));
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

  void start(const hkv_graph_query &params, const int64_t *warm) {
    num_fresh_ = 0;
    const auto add = [&](Row node) {
      if (node < 0 || !visited_.add(node)) return;
      discover(fresh_[num_fresh_++] = node);
    };
    for (int i = 0; i < head_->num_entries; ++i) add(head_->entries[i]);
    for (int64_t i = 0; i < int64_t{count_} * params.num_warm; ++i) add(node_of(warm[i]));
    score();
  }

  /// One step; false when the best keys of all queries have been expanded.
  bool expand(const hkv_graph_query &params) {
    num_selected_ = 0;
    for (int query = 0; query < count_; ++query)
      beams_[query].next(
          limit_, params.width, [&](Row row) { return expanded_.has(row); },
          [&](Row row) { return select(row); });
    if (num_selected_ == 0) return false;
    num_fresh_ = 0;
    for (int i = 0; i < num_selected_; ++i) visit(selected_[i]);
    score();
    return true;
  }

  bool select(Row node) {
    expanded_.add(node);
    const uint8_t *list = head_->lists + node * layout_.bytes;
    for (int64_t at = 0; at < layout_.bytes; at += kLineBytes) __builtin_prefetch(list + at);
    selected_[num_selected_++] = list;
    return true;
  }

  /// Adds the nodes of a list that are new to those that are scored next.
  void visit(const uint8_t *list) {
    for (int first = 0; first < layout_.slots; first += kSlots) {
      int32_t nodes[kSlots];
      unpack_sixteen(list, layout_, first, nodes);
      const int found = visited_.add_sixteen(nodes, fresh_.data() + num_fresh_);
      for (int i = 0; i < found; ++i) discover(fresh_[num_fresh_ + i]);
      num_fresh_ += found;
    }
  }

  /// -1 if the key has none.
  Row node_of(int64_t key) const {
    const int32_t *last = head_->keys_of + head_->num_nodes;
    const int32_t *found = std::lower_bound(head_->keys_of, last, key);
    return found != last && *found == key ? static_cast<Row>(found - head_->keys_of) : -1;
  }

  /// Asks for what scoring the row will read; for the second cache, because the rows of a step are
  /// more than the first one holds.
  void discover(Row row) const {
    const uint8_t *codes = row_at(row);
    for (int64_t at = 0; at < bytes_; at += kLineBytes) __builtin_prefetch(codes + at, 0, 2);
    __builtin_prefetch(head_->rows.scale_codes + row);
  }

  const uint8_t *row_at(Row row) const { return head_->rows.rows + row * bytes_; }
  const uint8_t *fresh_row(int i) const { return row_at(fresh_[std::min(i, num_fresh_ - 1)]); }

  /// Scores fresh_ for all queries and puts what is good enough into the beams.
  void score() {
    if (num_fresh_ == 0) return;
    rows_ += num_fresh_;
    for (int i = 0; i < num_fresh_; ++i)
      levels_[i] = head_->rows.levels[head_->rows.scale_codes[fresh_[i]]];
    for (int at = 0; at < num_fresh_; at += 4) {
      const uint8_t *rows[4];
      for (int i = 0; i < 4; ++i) {
        rows[i] = fresh_row(at + i);
        const uint8_t *later = fresh_row(at + kRowsAhead + i);
        for (int64_t line = 0; line < bytes_; line += kLineBytes) __builtin_prefetch(later + line);
      }
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
  int limit_ = 0;      // of the entries of a beam that are expanded
  int count_ = 0;      // queries
  int64_t bytes_ = 0;  // of a row
  int64_t rows_ = 0;   // scored
  std::vector<int8_t> codes_;
  QueryScale scales_[kGroup];
  Beam beams_[kGroup];
  Marks visited_, expanded_;
  ListLayout layout_{1, 0};
  std::vector<const uint8_t *> selected_;  // lists to read in this step
  int num_selected_ = 0;
  std::vector<Row> fresh_;  // to score in this step
  int num_fresh_ = 0;
  std::vector<float> levels_;  // of the fresh rows
  std::vector<int32_t> dots_;  // [queries, stride_]
  int64_t stride_ = 0;
  std::vector<Entry> survivors_, scratch_;
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
  Pieces &pieces;

  void search(int64_t item) const {
    thread_local Traversal traversal;
    thread_local TailScan scan;
    const Piece &piece = pieces[item];
    const hkv_graph_head &head = heads[piece.head];
    const int64_t place = piece.head * int64_t{params.queries} + piece.first_query;
    const float *mine = queries + place * head.keys.dim;
    int64_t read = piece.last - piece.first;
    if (piece.is_walk()) {
      traversal.run(head, params, piece.beam, mine,
                    static_cast<int>(piece.num_queries), warm + place * params.num_warm);
      for (int64_t query = 0; query < piece.num_queries; ++query)
        pieces.count(piece, query) = traversal.take(static_cast<int>(query), piece.keep,
                                                    pieces.candidates(piece, query));
      read = traversal.rows();
    } else {
      scan.run(head, piece, mine, pieces);
    }
    count(piece.head, read, read * piece.num_queries);
  }

  void rank(int64_t item) const {
    thread_local Ranking ranking;
    const auto head = static_cast<int32_t>(item / params.queries);
    const float *query = queries + item * heads[head].keys.dim;
    const int64_t exact =
        ranking.run(heads[head], params, pieces, head, item % params.queries, query,
                    ids + item * params.top_k, scores + item * params.top_k);
    count(head, 0, exact);
  }

  void count(int32_t head, int64_t read, int64_t scored) const {
    __atomic_fetch_add(rows + head, read, __ATOMIC_RELAXED);
    __atomic_fetch_add(dots + head, scored, __ATOMIC_RELAXED);
  }
};

}  // namespace

void check_query(const hkv_graph_query &query) {
  require(query.queries >= 0, "queries must be at least 0");
  require(query.top_k >= 1, "top_k must be at least 1");
  require(query.pool_size >= query.top_k && query.pool_size <= kMost,
          "pool_size must be top_k..1048576");
  require(query.width >= 1 && query.width <= 1024, "width must be 1..1024");
  require(query.num_warm >= 0 && query.num_warm <= kMost, "num_warm must be 0..1048576");
  require(query.beta >= 0.0f, "beta must be at least 0");
}

void check_head(const hkv_graph_head &head) {
  check_keys(head.keys);
  check_quantised(head.rows);
  check_quantised(head.tail);
  require(head.keys.dim == head.rows.dim && head.keys.dim == head.tail.dim,
          "keys, rows and tail must agree in dim");
  require(head.keys.count < INT32_MAX, "there must be fewer than 2^31 - 1 keys");
  require(head.linked >= 0 && head.linked <= head.keys.count, "linked must be 0..keys");
  require(head.num_nodes >= 0 && head.num_nodes <= head.linked, "num_nodes must be 0..linked");
  require(head.num_nodes <= head.rows.count, "all nodes must be quantised");
  require(head.rows.count == 0 || head.rows.rows, "nodes must be quantised in rows");
  require(head.tail.count == head.keys.count - head.linked,
          "the keys beyond the graph must be quantised in tail, and no others");
  require(head.tail.count == 0 || head.tail.blocks, "tail must be quantised in blocks");
  require(head.num_entries >= 0, "num_entries must be at least 0");
  require(head.degree >= 1 && head.degree <= HKV_MAX_DEGREE, "max_degree must be 1..256");
  require(head.num_nodes == 0 || (head.lists && head.keys_of), "a graph must not be NULL");
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
    hkv::require(query->beams, "beams must not be NULL");
    for (int32_t i = 0; i < heads; ++i) {
      hkv::check_head(head[i]);
      hkv::require(query->beams[i] >= 1 && query->beams[i] <= hkv::kMost,
                   "beam must be 1..1048576");
      hkv::require(!query->walks || (query->walks[i] >= 1 && query->walks[i] <= hkv::kMost),
                   "walks must be 1..1048576");
      rows[i] = dots[i] = 0;
    }
    thread_local hkv::Pieces pieces;
    pieces.divide(heads, head, *query, hkv_pool_threads(pool));
    const hkv::Job job{head, *query, queries, warm, ids, scores, rows, dots, pieces};
    hkv::parallel_for(pool, pieces.size(), [&job](int64_t item, int) { job.search(item); });
    hkv::parallel_for(pool, int64_t{heads} * query->queries,
                      [&job](int64_t item, int) { job.rank(item); });
  });
}

}  // extern "C"
