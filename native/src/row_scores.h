// Scores of keys in 16 or 32 bits, straight from the caller's rows, with float32 sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "convert.h"
#include "hybrid_kv_rows.h"
#include "slices.h"

namespace hkv {

/// How a row of `dim` elements is read in vectors.
///
/// The last vector ends with the row and so may overlap the one before it; the query's copy has
/// zeros there. Rows shorter than a vector are padded while they are read.
struct RowVectors {
  explicit RowVectors(int dim)
      : dim(dim), count((dim + kLanes - 1) / kLanes), last(std::max(0, dim - kLanes)) {}

  int padded() const { return count * kLanes; }
  int start(int vector) const { return vector + 1 < count ? vector * kLanes : last; }

  /// from [dim] -> to [padded()], zeros where a vector of a row repeats elements.
  void pad(const float *from, float *to) const {
    std::fill_n(to, padded(), 0.0f);
    for (int d = 0; d < dim; ++d) {
      const int vector = d / kLanes;
      to[vector * kLanes + d - start(vector)] = from[d];
    }
  }

  const int dim, count, last;
};

/// Reads vector `vector` of a row.
template <typename Element>
inline Floats read_vector(const Element *row, const RowVectors &vectors, int vector) {
  if (__builtin_expect(vectors.dim >= kLanes, 1)) return load_floats(row + vectors.start(vector));
  Element padded[kLanes] = {};
  std::memcpy(static_cast<void *>(padded), row, vectors.dim * sizeof(Element));
  return load_floats(padded);
}

/// The lanes' sums of four vectors.
inline void store_four_sums(const Floats sums[4], float *out) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const auto halved = [](Floats sum) {
    return _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, (__m512)sum, 0),
                         _mm512_maskz_extractf32x8_ps(0xff, (__m512)sum, 1));
  };
#else
  const auto halved = [](Floats sum) { return (__m256)sum; };
#endif
  const __m256 low = _mm256_hadd_ps(halved(sums[0]), halved(sums[1]));
  const __m256 high = _mm256_hadd_ps(halved(sums[2]), halved(sums[3]));
  const __m256 all = _mm256_hadd_ps(low, high);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  for (int i = 0; i < 4; ++i) {
    float sum = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[i][lane];
    out[i] = sum;
  }
#endif
}

/// Four rows with `Queries` padded queries: out[query * row_step + row].
template <typename Element, int Queries>
inline void dot_four_rows(const Element *const rows[4], const RowVectors &vectors,
                          const float *queries, float *out, int64_t row_step) {
  Floats sums[Queries][4] = {};
  for (int vector = 0; vector < vectors.count; ++vector) {
    Floats keys[4];
    for (int row = 0; row < 4; ++row) keys[row] = read_vector(rows[row], vectors, vector);
    for (int query = 0; query < Queries; ++query) {
      const Floats factor = load_floats(queries + query * vectors.padded() + vector * kLanes);
      for (int row = 0; row < 4; ++row) sums[query][row] += keys[row] * factor;
    }
  }
  for (int query = 0; query < Queries; ++query)
    store_four_sums(sums[query], out + query * row_step);
}

template <typename Element>
inline void prefetch_row(const Element *row, int dim) {
  const char *bytes = reinterpret_cast<const char *>(row);
  for (int64_t at = 0; at < static_cast<int64_t>(dim * sizeof(Element)); at += 64)
    __builtin_prefetch(bytes + at);
}

/// Scores of the keys of one head against any number of queries; see BlockScores.
template <typename Element>
class RowScores {
 public:
  void prepare(const hkv_keys &keys, const float *queries, int64_t count) {
    keys_ = &keys;
    count_ = count;
    const RowVectors vectors(keys.dim);
    const int64_t padded_count = (count + 3) / 4 * 4;
    const int64_t size = padded_count * vectors.padded();
    if (static_cast<int64_t>(queries_.size()) < size) queries_.resize(size);
    std::fill(queries_.begin() + count * vectors.padded(), queries_.begin() + size, 0.0f);
    for (int64_t query = 0; query < count; ++query)
      vectors.pad(queries + query * keys.dim, queries_.data() + query * vectors.padded());
  }

  int64_t num_keys() const { return keys_->count; }

  int padded(int64_t slice) const {
    const int64_t left = std::min<int64_t>(kSlice, count_ - slice * kSlice);
    return static_cast<int>(left < 3 ? left : (left + 3) / 4 * 4);
  }

  int64_t keys_ahead() const {
    const int64_t bytes = static_cast<int64_t>(keys_->dim * sizeof(Element));
    return std::max<int64_t>(4, kPrefetchBytes / bytes);
  }

  void score(int64_t slice, int64_t first, int64_t count, float *out, int64_t row,
             int64_t ahead_keys) const {
    const int num_queries = padded(slice);
    for (int64_t at = 0; at < count; at += kTile) {
      const int64_t tile = std::min<int64_t>(kTile, count - at);
      for (int query = 0; query < num_queries; query += 4) {
        const int64_t ahead = query == 0 ? ahead_keys * keys_->stride : 0;
        float *to = out + query * row + at;
        switch (std::min(4, num_queries - query)) {
          case 1:
            score_tile<1>(slice * kSlice + query, first + at, tile, to, row, ahead);
            break;
          case 2:
            score_tile<2>(slice * kSlice + query, first + at, tile, to, row, ahead);
            break;
          default:
            score_tile<4>(slice * kSlice + query, first + at, tile, to, row, ahead);
        }
      }
    }
    const int64_t rounded = (count + 15) / 16 * 16;
    for (int query = 0; query < num_queries; ++query)
      std::fill(out + query * row + count, out + query * row + rounded,
                std::numeric_limits<float>::quiet_NaN());
  }

  void finish(int64_t, float *, int64_t) const {}

 private:
  static constexpr int kTile = 32;  // keys that stay in the first cache for all queries of a slice

  template <int Queries>
  void score_tile(int64_t query, int64_t first, int64_t count, float *out, int64_t row,
                  int64_t ahead) const {
    const RowVectors vectors(keys_->dim);
    const Element *base = static_cast<const Element *>(keys_->data) + first * keys_->stride;
    const float *queries = queries_.data() + query * vectors.padded();
    for (int64_t key = 0; key < count; key += 4) {
      const Element *rows[4];
      for (int i = 0; i < 4; ++i) {
        rows[i] = base + std::min(key + i, count - 1) * keys_->stride;
        if (ahead != 0) prefetch_row(rows[i] + ahead, keys_->dim);
      }
      float four[4 * Queries];
      dot_four_rows<Element, Queries>(rows, vectors, queries, four, 4);
      const int64_t valid = std::min<int64_t>(4, count - key);
      for (int i = 0; i < Queries; ++i) std::copy_n(four + 4 * i, valid, out + i * row + key);
    }
  }

  const hkv_keys *keys_ = nullptr;
  int64_t count_ = 0;
  std::vector<float> queries_;  // [count, padded]
};

/// Exact float32 scores of some rows of one head with one padded query.
template <typename Element>
inline void score_listed(const hkv_keys &keys, const float *query, const uint32_t *ids,
                         int64_t count, float *out) {
  constexpr int64_t kAhead = 8;
  const RowVectors vectors(keys.dim);
  const Element *base = static_cast<const Element *>(keys.data);
  const auto row = [&](int64_t i) { return base + int64_t{ids[i]} * keys.stride; };
  for (int64_t i = 0; i < std::min(kAhead, count); ++i) prefetch_row(row(i), keys.dim);
  for (int64_t at = 0; at < count; at += 4) {
    for (int64_t i = at + kAhead; i < std::min(at + kAhead + 4, count); ++i)
      prefetch_row(row(i), keys.dim);
    const Element *rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = row(std::min(at + i, count - 1));
    float four[4];
    dot_four_rows<Element, 1>(rows, vectors, query, four, 4);
    std::copy_n(four, std::min<int64_t>(4, count - at), out + at);
  }
}

}  // namespace hkv
