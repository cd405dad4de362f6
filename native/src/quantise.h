// Keys in 8 bits: the recipe (see hybrid_kv_rows.h) and products of unsigned with signed codes.
#pragma once

#include <cstdint>

#include "hybrid_kv_rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hkv {

constexpr int kZeroCode = 128;
constexpr int kLargestCode = 127;
constexpr int kLineBytes = 64;
constexpr int kQuadChannels = 4;  // channels of a key that lie together in a block

constexpr int64_t row_bytes(int64_t dim) {
  return (dim + kLineBytes - 1) / kLineBytes * kLineBytes;
}
constexpr int quads(int64_t dim) {
  return static_cast<int>((dim + kQuadChannels - 1) / kQuadChannels);
}
constexpr int64_t block_bytes(int dim) { return int64_t{quads(dim) + 1} * kLineBytes; }

/// What goes with the codes of one query.
struct QueryScale {
  float scale;   // of the codes
  int32_t sum;   // of the codes
  float offset;  // q . mean, the same for all keys
};

/// Quantises query [dim] for the keys' statistics into codes [padded], padded with 0.
QueryScale quantise_query(const hkv_quantised &keys, const float *query, int8_t *codes,
                          int64_t padded);

/// Raises Invalid unless the descriptor can be read.
void check_keys(const hkv_keys &keys);
void check_quantised(const hkv_quantised &quantised);

// ---- Products of rows (u8) with queries (s8); `bytes` is a multiple of 64, both are padded.
//
// The score without offset is (product - 128 * sum) * level * scale.

namespace detail {

#if defined(__AVX2__)

/// The four lanes' sums of four vectors, in order.
inline __m128i sums_of_four(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  return _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}

#endif

#if defined(__AVX512VNNI__)

using Sums = __m512i;
constexpr int kStep = 64;
inline Sums zero_sums() { return _mm512_setzero_si512(); }
struct Codes {
  __m512i bytes;
};
inline Codes load_codes(const uint8_t *row) {
  return {_mm512_loadu_si512(reinterpret_cast<const void *>(row))};
}
struct QueryCodes {
  __m512i bytes;
};
inline QueryCodes load_query(const int8_t *query) {
  return {_mm512_loadu_si512(reinterpret_cast<const void *>(query))};
}
/// As assembly, because the intrinsic makes GCC 12 copy every accumulator once per step.
inline void multiply_add(__m512i &sums, __m512i codes, __m512i factor) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(factor));
}
inline Sums add_products(Sums sums, Codes row, QueryCodes query) {
  multiply_add(sums, row.bytes, query.bytes);
  return sums;
}
inline __m256i halved(Sums sums) {
  return _mm256_add_epi32(_mm512_maskz_extracti64x4_epi64(0xf, sums, 0),
                          _mm512_maskz_extracti64x4_epi64(0xf, sums, 1));
}
inline void store_four(const Sums sums[4], int32_t *out) {
  _mm_storeu_si128(
      reinterpret_cast<__m128i *>(out),
      sums_of_four(halved(sums[0]), halved(sums[1]), halved(sums[2]), halved(sums[3])));
}
inline int32_t sum_of(Sums sums) { return _mm512_reduce_add_epi32(sums); }

#elif defined(__AVX2__)

using Sums = __m256i;
constexpr int kStep = 32;
inline Sums zero_sums() { return _mm256_setzero_si256(); }

#if defined(__AVXVNNI__)

struct Codes {
  __m256i bytes;
};
inline Codes load_codes(const uint8_t *row) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(row))};
}
using QueryCodes = Codes;
inline QueryCodes load_query(const int8_t *query) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(query))};
}
inline Sums add_products(Sums sums, Codes row, QueryCodes query) {
  return _mm256_dpbusd_avx_epi32(sums, row.bytes, query.bytes);
}

#else

// maddubs would saturate at 16 bits: even and odd bytes are widened and multiplied apart.
struct Codes {
  __m256i even, odd;
};
inline Codes load_codes(const uint8_t *row) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(row));
  return {_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(bytes, 8)};
}
using QueryCodes = Codes;
inline QueryCodes widen_query(__m256i bytes) {
  return {_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}
inline QueryCodes load_query(const int8_t *query) {
  return widen_query(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(query)));
}
inline Sums add_products(Sums sums, Codes row, QueryCodes query) {
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(row.even, query.even));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(row.odd, query.odd));
}

#endif

inline void store_four(const Sums sums[4], int32_t *out) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(out),
                   sums_of_four(sums[0], sums[1], sums[2], sums[3]));
}
inline int32_t sum_of(Sums sums) {
  const __m128i zero = _mm_setzero_si128();
  return _mm_cvtsi128_si32(
      sums_of_four(sums, _mm256_castsi128_si256(zero), _mm256_setzero_si256(),
                   _mm256_setzero_si256()));
}

#endif

}  // namespace detail

#if defined(__AVX2__)

/// One row with one query.
inline int32_t dot_u8s8(const uint8_t *row, const int8_t *query, int64_t bytes) {
  detail::Sums sums = detail::zero_sums();
  for (int64_t at = 0; at < bytes; at += detail::kStep)
    sums = detail::add_products(sums, detail::load_codes(row + at), detail::load_query(query + at));
  return detail::sum_of(sums);
}

/// Four rows with `Queries` queries that lie `stride` bytes apart: out[query][row].
///
/// A row is loaded once for all queries, and four horizontal sums cost little more than one.
template <int Queries>
inline void dot_four_u8s8(const uint8_t *const rows[4], const int8_t *queries, int64_t stride,
                          int64_t bytes, int32_t (*out)[4]) {
  detail::Sums sums[Queries][4];
  for (int query = 0; query < Queries; ++query)
    for (int row = 0; row < 4; ++row) sums[query][row] = detail::zero_sums();
  for (int64_t at = 0; at < bytes; at += detail::kStep) {
    detail::Codes codes[4];
    for (int row = 0; row < 4; ++row) codes[row] = detail::load_codes(rows[row] + at);
    for (int query = 0; query < Queries; ++query) {
      const detail::QueryCodes factor = detail::load_query(queries + query * stride + at);
      for (int row = 0; row < 4; ++row)
        sums[query][row] = detail::add_products(sums[query][row], codes[row], factor);
    }
  }
  for (int query = 0; query < Queries; ++query) detail::store_four(sums[query], out[query]);
}

#else

inline int32_t dot_u8s8(const uint8_t *row, const int8_t *query, int64_t bytes) {
  int32_t sum = 0;
  for (int64_t i = 0; i < bytes; ++i) sum += int32_t{row[i]} * query[i];
  return sum;
}

template <int Queries>
inline void dot_four_u8s8(const uint8_t *const rows[4], const int8_t *queries, int64_t stride,
                          int64_t bytes, int32_t (*out)[4]) {
  for (int query = 0; query < Queries; ++query)
    for (int row = 0; row < 4; ++row)
      out[query][row] = dot_u8s8(rows[row], queries + query * stride, bytes);
}

#endif

}  // namespace hkv
