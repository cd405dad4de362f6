// Attention of a few queries over rows of one KV head, each row read once for all of them. The
// softmax is computed online: Milakov and Gimelshein 2018.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attend_checks.h"
#include "merge.h"
#include "pool.h"
#include "row_scores.h"
#include "softmax.h"

namespace hkv {

constexpr int kValueTile = kLanes == 16 ? 4 : 2;  // vectors of sums in registers, for each of 4 queries

/// sums += weights of rows, `Vectors` vectors from the given columns on for `Queries` queries.
template <typename Element, int Queries, int Vectors>
HKV_INLINE inline void add_tile(const Element *rows, int64_t stride, int64_t count,
                                const RowVectors &vectors, int first, const float *weights,
                                int64_t weights_step, float *sums) {
  Floats own[Queries][Vectors];
  int starts[Vectors];
  for (int i = 0; i < Vectors; ++i) starts[i] = vectors.start(first + i);
  const int padded = vectors.padded();
  const auto at = [&](int query, int i) { return sums + query * padded + (first + i) * kLanes; };
  for (int query = 0; query < Queries; ++query)
    for (int i = 0; i < Vectors; ++i) own[query][i] = load_floats(at(query, i));
  for (int64_t row = 0; row < count; ++row, rows += stride) {
    Floats values[Vectors];
    for (int i = 0; i < Vectors; ++i)
      values[i] = __builtin_expect(vectors.dim >= kLanes, 1) ? load_floats(rows + starts[i])
                                                             : read_vector(rows, vectors, 0);
    for (int query = 0; query < Queries; ++query) {
      const float weight = weights[query * weights_step + row];
      for (int i = 0; i < Vectors; ++i) own[query][i] += values[i] * weight;
    }
  }
  for (int query = 0; query < Queries; ++query)
    for (int i = 0; i < Vectors; ++i) store_floats(at(query, i), own[query][i]);
}

template <typename Element, int Queries>
HKV_INLINE inline void add_columns(const Element *rows, int64_t stride, int64_t count,
                                   const RowVectors &vectors, const float *weights,
                                   int64_t weights_step, float *sums) {
  int vector = 0;
  for (; vector + kValueTile <= vectors.count; vector += kValueTile)
    add_tile<Element, Queries, kValueTile>(rows, stride, count, vectors, vector, weights,
                                           weights_step, sums);
  for (; vector < vectors.count; ++vector)
    add_tile<Element, Queries, 1>(rows, stride, count, vectors, vector, weights, weights_step,
                                  sums);
}

/// sums [num_queries, padded] += weights [num_queries, weights_step] of `count` rows.
template <typename Element>
void add_rows(const Element *rows, int64_t stride, int64_t count, const RowVectors &vectors,
              int64_t num_queries, const float *weights, int64_t weights_step, float *sums) {
  const auto add = [&](auto queries, int64_t query) {
    add_columns<Element, decltype(queries)::value>(rows, stride, count, vectors,
                                                   weights + query * weights_step, weights_step,
                                                   sums + query * vectors.padded());
  };
  int64_t query = 0;
  for (; query + 4 <= num_queries; query += 4) add(std::integral_constant<int, 4>{}, query);
  for (; query < num_queries; ++query) add(std::integral_constant<int, 1>{}, query);
}

/// Up to kSlice queries of one KV head: what they have seen so far.
template <typename Element>
class Few {
 public:
  void begin(const Entries &from, const float *queries, int64_t count) {
    from_ = &from;
    count_ = count;
    scores_.prepare(from.keys, queries, count);
    const RowVectors vectors(from.values.dim);
    grow(sums_, kSlice * vectors.padded());
    grow(logits_, kSlice * kStep);
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    std::fill_n(largest_, kSlice, kNoLogit);
    std::fill_n(totals_, kSlice, 0.0f);
  }

  /// At most kChunk rows from `first` on.
  ///
  /// positions: of these rows, NULL where all are seen; newest: the last one that a query sees.
  /// bias: of these rows, added to their logits; NULL for none.
  void add(int64_t first, int64_t count, const int64_t *positions, const int64_t *newest,
           const float *bias, float scale, float softcap) {
    const int64_t ahead = scores_.keys_ahead();
    const bool more = first + count + ahead <= from_->keys.count;
    scores_.score(0, first, count, logits_.data(), kStep, more ? ahead : 0);
    for (int64_t query = 0; query < count_; ++query) {
      float *logits = logits_.data() + query * kStep;
      to_logits(logits, count, scale, softcap);
      if (positions != nullptr)
        for (int64_t i = 0; i < count; ++i)
          logits[i] = positions[i] > newest[query] ? kNoLogit : logits[i];
      if (bias != nullptr)
        for (int64_t i = 0; i < count; ++i) logits[i] += bias[i];
      weigh(query, logits, count);
    }
    add_values(first, count);
  }

  void end(int64_t query, float *out, float *lse) const {
    const RowVectors vectors(from_->values.dim);
    const float *sums = sums_.data() + query * vectors.padded(), total = totals_[query];
    const bool empty = total == 0.0f;  // but not where it is NaN
    if (empty) {
      std::fill_n(out, vectors.dim, 0.0f);
    } else {
      vectors.unpad(sums, out);
      for (int d = 0; d < vectors.dim; ++d) out[d] /= total;
    }
    *lse = empty ? kNoLogit : largest_[query] + std::log(total);
  }

 private:
  static constexpr int64_t kStep = kChunk + 16;  // from one query's logits to the next

  void weigh(int64_t query, float *logits, int64_t count) {
    const float old = largest_[query];
    largest_[query] = std::max(old, largest_of(logits, count));
    // While nothing is seen, any other number than -inf makes the weights 0 instead of NaN.
    const float base = largest_[query] == kNoLogit ? 0.0f : largest_[query];
    const float factor = std::exp(old - base);
    totals_[query] = totals_[query] * factor + to_weights(logits, count, base);
    if (factor == 1.0f) return;
    const int padded = RowVectors(from_->values.dim).padded();
    for (int i = 0; i < padded; ++i) sums_[query * padded + i] *= factor;
  }

  void add_values(int64_t first, int64_t count) {
    const hkv_keys &values = from_->values;
    const Element *rows = static_cast<const Element *>(values.data) + first * values.stride;
    add_rows(rows, values.stride, count, RowVectors(values.dim), count_, logits_.data(), kStep,
             sums_.data());
  }

  const Entries *from_ = nullptr;
  int64_t count_ = 0;
  RowScores<Element> scores_;
  std::vector<float> logits_, sums_;  // [kSlice, kStep], [kSlice, padded dim of values]
  float largest_[kSlice], totals_[kSlice];
};

constexpr int64_t kPiece = 4096;  // rows of one thread; a constant, so that threads change no bit

inline int64_t pieces_of(int64_t count) {
  return std::max<int64_t>(1, (count + kPiece - 1) / kPiece);
}

/// Every slice of queries over every piece of its rows, merged: out [rows, dim] and lse [rows].
///
/// attend(slice, piece, out, lse) writes the slice's rows of arrays of that size.
template <typename Attend>
void attend_in_pieces(Pool *pool, int64_t slices, int64_t pieces, int64_t rows, int32_t dim,
                      float *out, float *lse, const Attend &attend) {
  if (pieces == 1) {
    parallel_for(pool, slices, [&](int64_t slice, int) { attend(slice, 0, out, lse); });
    return;
  }
  std::vector<float> outs(pieces * rows * dim), lses(pieces * rows);
  std::vector<hkv_part> parts(pieces);
  for (int64_t piece = 0; piece < pieces; ++piece)
    parts[piece] = {outs.data() + piece * rows * dim, lses.data() + piece * rows, HKV_F32};
  parallel_for(pool, slices * pieces, [&](int64_t item, int) {
    const int64_t piece = item % pieces;
    attend(item / pieces, piece, outs.data() + piece * rows * dim, lses.data() + piece * rows);
  });
  for (int64_t row = 0; row < rows; ++row)
    merge_row(static_cast<int32_t>(pieces), parts.data(), row, dim, HKV_F32, out, lse);
}

}  // namespace hkv
