// Weighted sums of listed rows for all queries of a KV head: what several of them want is read once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "convert.h"
#include "few_queries.h"
#include "hybrid_kv_rows.h"
#include "row_scores.h"
#include "softmax.h"

namespace hkv {

/// The distinct rows of some lists, each with a weight for every query.
class SharedRows {
 public:
  /// Forgets what was added; room for `entries` more, of `num_queries` queries.
  void begin(int64_t entries, int64_t num_queries) {
    std::fill_n(weights_.data(), count_ * num_queries_, 0.0f);  // the others are 0 already
    num_queries_ = num_queries;
    count_ = 0;
    int64_t slots = 64;
    while (slots < 2 * entries) slots *= 2;
    mask_ = static_cast<uint32_t>(slots - 1);
    shift_ = 64 - __builtin_ctzll(static_cast<uint64_t>(slots));
    grow(places_, slots);
    grow(entries_, entries);
    grow(rows_, entries);
    grow(weights_, entries * num_queries);
    std::fill_n(places_.data(), slots, 0u);
  }

  /// Returns the row's place; `weigh` adds to it for another query. at(entry): where the row lies.
  template <typename At>
  int64_t add(int64_t query, uint32_t entry, float weight, const At &at) {
    uint32_t slot = static_cast<uint32_t>((entry * 0x9e3779b97f4a7c15u) >> shift_);
    while (places_[slot] != 0 && entries_[places_[slot] - 1] != entry) slot = (slot + 1) & mask_;
    if (places_[slot] != 0) {
      weigh(places_[slot] - 1, query, weight);
      return places_[slot] - 1;
    }
    const auto *row = at(entry);
    weights_[count_ * num_queries_ + query] = weight;
    entries_[count_] = entry;
    rows_[count_] = row;
    places_[slot] = static_cast<uint32_t>(++count_);
    return count_ - 1;
  }

  void weigh(int64_t place, int64_t query, float weight) {
    weights_[place * num_queries_ + query] += weight;
  }

  int64_t count() const { return count_; }

  /// sums [num_queries, padded `dim`] += the weighted rows, of `Element`s.
  template <typename Element>
  void sum(int dim, float *sums) const {
    const RowVectors vectors(dim);
    const int64_t ahead = rows_ahead<Element>(dim);
    for (int64_t i = 0; i < std::min(ahead, count_); ++i)
      prefetch_row(static_cast<const Element *>(rows_[i]), dim);
    for (int64_t at = 0; at < count_; at += kBlock) {
      const int64_t num_rows = std::min(kBlock, count_ - at);
      const Element *rows[kBlock], *later[kBlock];
      for (int64_t i = 0; i < num_rows; ++i) {
        rows[i] = static_cast<const Element *>(rows_[at + i]);
        later[i] = static_cast<const Element *>(rows_[std::min(at + ahead + i, count_ - 1)]);
      }
      int64_t query = 0;
      for (; query + 4 <= num_queries_; query += 4)
        add_block<Element, 4>(rows, later, num_rows, vectors, at, query, sums);
      for (; query < num_queries_; ++query)
        add_block<Element, 1>(rows, later, num_rows, vectors, at, query, sums);
    }
  }

 private:
  static constexpr int64_t kBlock = 16;  // rows that stay in the first cache for all queries

  /// A function of its own: inside others GCC 12 leaves the sums in memory, for 2.4 times as long.
  template <typename Element, int Queries>
  __attribute__((noinline)) void add_block(const Element *const *rows, const Element *const *later,
                                           int64_t count, const RowVectors &vectors, int64_t at,
                                           int64_t query, float *sums) const {
    const float *weights = weights_.data() + at * num_queries_ + query;
    float *to = sums + query * vectors.padded();
    int vector = 0;
    for (; vector + kValueTile <= vectors.count; vector += kValueTile)
      add_tile_of<Element, Queries, kValueTile>(rows, later, count, vectors, vector, weights, to);
    for (; vector < vectors.count; ++vector)
      add_tile_of<Element, Queries, 1>(rows, later, count, vectors, vector, weights, to);
  }

  /// As `add_tile`, of rows that lie anywhere; later: rows that are asked for meanwhile.
  template <typename Element, int Queries, int Vectors>
  HKV_INLINE void add_tile_of(const Element *const *rows, const Element *const *later,
                              int64_t count, const RowVectors &vectors, int first,
                              const float *weights, float *sums) const {
    Floats own[Queries][Vectors];
    int starts[Vectors];
    for (int i = 0; i < Vectors; ++i) starts[i] = vectors.start(first + i);
    const int padded = vectors.padded();
    const auto place = [&](int query, int i) { return sums + query * padded + (first + i) * kLanes; };
    for (int query = 0; query < Queries; ++query)
      for (int i = 0; i < Vectors; ++i) own[query][i] = load_floats(place(query, i));
    for (int64_t row = 0; row < count; ++row) {
      Floats values[Vectors];
      for (int i = 0; i < Vectors; ++i) {
        __builtin_prefetch(later[row] + starts[i]);
        values[i] = __builtin_expect(vectors.dim >= kLanes, 1) ? load_floats(rows[row] + starts[i])
                                                               : read_vector(rows[row], vectors, 0);
      }
      for (int query = 0; query < Queries; ++query) {
        const float weight = weights[row * num_queries_ + query];
        for (int i = 0; i < Vectors; ++i) own[query][i] += values[i] * weight;
      }
    }
    for (int query = 0; query < Queries; ++query)
      for (int i = 0; i < Vectors; ++i) store_floats(place(query, i), own[query][i]);
  }

  int64_t num_queries_ = 0, count_ = 0;
  uint32_t mask_ = 0;
  int shift_ = 0;
  std::vector<uint32_t> places_;    // of an entry its number in `entries_`, from 1 on, by hash
  std::vector<uint32_t> entries_;   // the distinct ones
  std::vector<const void *> rows_;  // where those lie
  std::vector<float> weights_;      // [count, num_queries], zeros behind
};

}  // namespace hkv
