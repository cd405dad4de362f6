// Scores of keys in 16 or 32 bits, straight from the caller's rows, with float32 sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
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
    std::copy_n(from, in_order(), to);
    std::copy_n(from + in_order(), dim - in_order(), to + own_part());
  }

  /// from [padded()] -> to [dim], each element once.
  void unpad(const float *from, float *to) const {
    std::copy_n(from, in_order(), to);
    std::copy_n(from + own_part(), dim - in_order(), to + in_order());
  }

  const int dim, count, last;

 private:
  /// Elements before the last vector, and where that one has those that are its own.
  int in_order() const { return (count - 1) * kLanes; }
  int own_part() const { return in_order() + in_order() - last; }
};

/// Reads vector `vector` of a row.
template <typename Element>
inline Floats read_vector(const Element *row, const RowVectors &vectors, int vector) {
  if (__builtin_expect(vectors.dim >= kLanes, 1)) return load_floats(row + vectors.start(vector));
  Element padded[kLanes] = {};
  std::memcpy(static_cast<void *>(padded), row, vectors.dim * sizeof(Element));
  return load_floats(padded);
}

/// The lanes' sums of four vectors for each of `Queries` queries: out[4 * query + row].
///
/// All vectors of lanes are added in one order, however many queries there are.
template <int Queries>
HKV_INLINE inline void store_sums(const Floats (&sums)[Queries][4], float *out) {
#if defined(__AVX512F__)
  __m512 rows[Queries];  // in each 128 bits: a part of the sums of the four rows
  for (int query = 0; query < Queries; ++query) {
    const __m512 a = (__m512)sums[query][0], b = (__m512)sums[query][1];
    const __m512 c = (__m512)sums[query][2], d = (__m512)sums[query][3];
    const __m512 ab = (__m512)((Floats)_mm512_maskz_unpacklo_ps(0xffff, a, b) +
                               (Floats)_mm512_maskz_unpackhi_ps(0xffff, a, b));
    const __m512 cd = (__m512)((Floats)_mm512_maskz_unpacklo_ps(0xffff, c, d) +
                               (Floats)_mm512_maskz_unpackhi_ps(0xffff, c, d));
    rows[query] = (__m512)((Floats)_mm512_maskz_shuffle_ps(0xffff, ab, cd, 0x44) +
                           (Floats)_mm512_maskz_shuffle_ps(0xffff, ab, cd, 0xee));
  }
  if constexpr (Queries == 4) {
    const auto both = [](__m512 a, __m512 b, auto low, auto high) HKV_INLINE {
      return (__m512)((Floats)_mm512_maskz_shuffle_f32x4(0xffff, a, b, decltype(low)::value) +
                      (Floats)_mm512_maskz_shuffle_f32x4(0xffff, a, b, decltype(high)::value));
    };
    using std::integral_constant;
    const integral_constant<int, 0x44> low_halves;
    const integral_constant<int, 0xee> high_halves;
    const __m512 first = both(rows[0], rows[1], low_halves, high_halves);
    const __m512 second = both(rows[2], rows[3], low_halves, high_halves);
    const integral_constant<int, 0x88> even;
    const integral_constant<int, 0xdd> odd;
    _mm512_storeu_ps(out, both(first, second, even, odd));
    return;
  }
  for (int query = 0; query < Queries; ++query) {
    const __m256 halves = _mm256_add_ps(_mm512_maskz_extractf32x8_ps(0xff, rows[query], 0),
                                        _mm512_maskz_extractf32x8_ps(0xff, rows[query], 1));
    _mm_storeu_ps(out + 4 * query, _mm_add_ps(_mm256_castps256_ps128(halves),
                                              _mm256_extractf128_ps(halves, 1)));
  }
#elif defined(__AVX2__)
  for (int query = 0; query < Queries; ++query) {
    const Floats *of = sums[query];
    const __m256 low = _mm256_hadd_ps((__m256)of[0], (__m256)of[1]);
    const __m256 high = _mm256_hadd_ps((__m256)of[2], (__m256)of[3]);
    const __m256 all = _mm256_hadd_ps(low, high);
    _mm_storeu_ps(out + 4 * query,
                  _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
#else
  for (int query = 0; query < Queries; ++query)
    for (int row = 0; row < 4; ++row) {
      float sum = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[query][row][lane];
      out[4 * query + row] = sum;
    }
#endif
}

/// Four rows with `Queries` padded queries: out[4 * query + row].
///
/// later: rows that will be needed and, with `Ask`, are asked for bit by bit, because memory and
/// arithmetic overlap only where their instructions lie close together.
template <typename Element, int Queries, bool Ask>
HKV_INLINE inline void dot_four_rows(const Element *const rows[4], const Element *const later[4],
                          const RowVectors &vectors, const float *queries, float *out) {
  Floats sums[Queries][4] = {};
  const int padded = vectors.padded();
  const auto add = [&](const Floats keys[4], const float *factors) HKV_INLINE {
    for (int query = 0; query < Queries; ++query) {
      const Floats factor = load_floats(factors + query * padded);
      for (int row = 0; row < 4; ++row) sums[query][row] += keys[row] * factor;
    }
  };
  if (__builtin_expect(vectors.dim < kLanes, 0)) {
    Floats keys[4];
    for (int row = 0; row < 4; ++row) keys[row] = read_vector(rows[row], vectors, 0);
    add(keys, queries);
  } else {
    const Element *const a = rows[0], *const b = rows[1], *const c = rows[2], *const d = rows[3];
    const Element *const e = later[0], *const f = later[1], *const g = later[2], *const h = later[3];
    const auto add_at = [&](int start, const float *factors) HKV_INLINE {
      if (Ask)
        for (const Element *row : {e, f, g, h}) __builtin_prefetch(row + start);
      const Floats keys[4] = {load_floats(a + start), load_floats(b + start),
                              load_floats(c + start), load_floats(d + start)};
      add(keys, factors);
    };
    for (int start = 0; start < padded - kLanes; start += kLanes) add_at(start, queries + start);
    add_at(vectors.last, queries + padded - kLanes);
  }
  store_sums<Queries>(sums, out);
}

template <typename Element>
inline void prefetch_row(const Element *row, int dim) {
  const char *bytes = reinterpret_cast<const char *>(row);
  for (int64_t at = 0; at < static_cast<int64_t>(dim * sizeof(Element)); at += 64)
    __builtin_prefetch(bytes + at);
}

/// Rows that a gather asks for ahead: so many bytes keep memory as busy as reading in order does.
template <typename Element>
inline int64_t rows_ahead(int dim) {
  constexpr int64_t kBytes = 8 * 1024;
  return std::max<int64_t>(8, kBytes / static_cast<int64_t>(dim * sizeof(Element)));
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
            ask_or_not<1>(slice * kSlice + query, first + at, tile, to, row, ahead);
            break;
          case 2:
            ask_or_not<2>(slice * kSlice + query, first + at, tile, to, row, ahead);
            break;
          default:
            ask_or_not<4>(slice * kSlice + query, first + at, tile, to, row, ahead);
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
  void ask_or_not(int64_t query, int64_t first, int64_t count, float *out, int64_t row,
                  int64_t ahead) const {
    if (ahead != 0)
      score_tile<Queries, true>(query, first, count, out, row, ahead);
    else
      score_tile<Queries, false>(query, first, count, out, row, ahead);
  }

  template <int Queries, bool Ask>
  void score_tile(int64_t query, int64_t first, int64_t count, float *out, int64_t row,
                  int64_t ahead) const {
    const RowVectors vectors(keys_->dim);
    const Element *base = static_cast<const Element *>(keys_->data) + first * keys_->stride;
    const float *queries = queries_.data() + query * vectors.padded();
    for (int64_t key = 0; key < count; key += 4) {
      const Element *rows[4], *later[4];
      for (int i = 0; i < 4; ++i) {
        rows[i] = base + std::min(key + i, count - 1) * keys_->stride;
        later[i] = rows[i] + ahead;
      }
      float four[4 * Queries];
      dot_four_rows<Element, Queries, Ask>(rows, later, vectors, queries, four);
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
  const int64_t ahead = rows_ahead<Element>(keys.dim);
  const RowVectors vectors(keys.dim);
  const Element *base = static_cast<const Element *>(keys.data);
  const auto row = [&](int64_t i) { return base + int64_t{ids[i]} * keys.stride; };
  for (int64_t i = 0; i < std::min(ahead, count); ++i) prefetch_row(row(i), keys.dim);
  for (int64_t at = 0; at < count; at += 4) {
    const Element *rows[4], *later[4];
    for (int i = 0; i < 4; ++i) {
      rows[i] = row(std::min(at + i, count - 1));
      later[i] = row(std::min(at + ahead + i, count - 1));
    }
    float four[4];
    dot_four_rows<Element, 1, true>(rows, later, vectors, query, four);
    std::copy_n(four, std::min<int64_t>(4, count - at), out + at);
  }
}

}  // namespace hkv
