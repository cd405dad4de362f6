// The rule that thins a key's candidates: none that an accepted neighbour already stands for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hybrid_kv_graph.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace hkv {

/// A key as the queries see it: HKV_POINT_DIMS integers, one cache line.
///
/// Integers make distances exact, so that every instruction set builds the same graph.
using Point = const int16_t *;

inline int32_t dot_points(Point a, Point b) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return _mm512_reduce_add_epi32(
      _mm512_madd_epi16(_mm512_loadu_si512(a), _mm512_loadu_si512(b)));
#else
  int32_t sum = 0;
  for (int i = 0; i < HKV_POINT_DIMS; ++i) sum += int32_t{a[i]} * b[i];
  return sum;
#endif
}

inline int32_t distance(Point a, int32_t norm_a, Point b, int32_t norm_b) {
  return norm_a + norm_b - 2 * dot_points(a, b);
}

/// Accepted neighbours of one key, stored channel by channel so that 16 are compared at once.
class Accepted {
 public:
  void clear() { count_ = 0; }
  int count() const { return count_; }

  void add(Point point, int32_t norm) {
    const int lane = count_ % kBlock;
    Block &block = blocks_[count_ / kBlock];
    for (int pair = 0; pair < kPairs; ++pair)
      std::memcpy(block.pairs[pair] + 2 * lane, point + 2 * pair, 2 * sizeof(int16_t));
    block.norms[lane] = norm;
    ++count_;
  }

  /// Whether alpha times the distance from `point` to an accepted one is below `limit`.
  bool stand_for(Point point, int32_t norm, float alpha, float limit) const {
    for (int first = 0; first < count_; first += kBlock)
      if (any_nearer(blocks_[first / kBlock], std::min(kBlock, count_ - first), point, norm, alpha,
                     limit))
        return true;
    return false;
  }

 private:
  static constexpr int kBlock = 16;
  static constexpr int kPairs = HKV_POINT_DIMS / 2;

  struct alignas(64) Block {
    int16_t pairs[kPairs][2 * kBlock];
    int32_t norms[kBlock];
  };

  static int32_t pair_at(Point point, int pair) {
    int32_t both;
    std::memcpy(&both, point + 2 * pair, sizeof both);
    return both;
  }

#if defined(__AVX512VNNI__)
  static bool any_nearer(const Block &block, int lanes, Point point, int32_t norm, float alpha,
                         float limit) {
    __m512i even = _mm512_setzero_si512(), odd = even;
    for (int pair = 0; pair < kPairs; pair += 2) {
      even = _mm512_dpwssd_epi32(even, _mm512_load_si512(block.pairs[pair]),
                                 _mm512_set1_epi32(pair_at(point, pair)));
      odd = _mm512_dpwssd_epi32(odd, _mm512_load_si512(block.pairs[pair + 1]),
                                _mm512_set1_epi32(pair_at(point, pair + 1)));
    }
    const __m512i norms =
        _mm512_add_epi32(_mm512_load_si512(block.norms), _mm512_set1_epi32(norm));
    const __m512i far =
        _mm512_sub_epi32(norms, _mm512_slli_epi32(_mm512_add_epi32(even, odd), 1));
    const __m512 scaled = _mm512_mul_ps(_mm512_set1_ps(alpha), _mm512_cvtepi32_ps(far));
    const unsigned used = (1u << lanes) - 1;
    return (_mm512_cmp_ps_mask(scaled, _mm512_set1_ps(limit), _CMP_LT_OQ) & used) != 0;
  }
#elif defined(__SSE2__)
#if defined(__AVX2__)
  using Vector = __m256i;
  static Vector load(const void *from) {
    return _mm256_load_si256(static_cast<const __m256i *>(from));
  }
  static Vector all(int32_t value) { return _mm256_set1_epi32(value); }
  static Vector add(Vector a, Vector b) { return _mm256_add_epi32(a, b); }
  static Vector add_products(Vector sums, Vector a, Vector b) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sums, a, b);
#else
    return add(sums, _mm256_madd_epi16(a, b));
#endif
  }
  static unsigned below(Vector values, float factor, float limit) {
    const __m256 scaled = _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_cvtepi32_ps(values));
    return _mm256_movemask_ps(_mm256_cmp_ps(scaled, _mm256_set1_ps(limit), _CMP_LT_OQ));
  }
  static Vector minus_twice(Vector a, Vector b) {
    return _mm256_sub_epi32(a, _mm256_slli_epi32(b, 1));
  }
#else
  using Vector = __m128i;
  static Vector load(const void *from) {
    return _mm_load_si128(static_cast<const __m128i *>(from));
  }
  static Vector all(int32_t value) { return _mm_set1_epi32(value); }
  static Vector add(Vector a, Vector b) { return _mm_add_epi32(a, b); }
  static Vector add_products(Vector sums, Vector a, Vector b) {
    return add(sums, _mm_madd_epi16(a, b));
  }
  static unsigned below(Vector values, float factor, float limit) {
    const __m128 scaled = _mm_mul_ps(_mm_set1_ps(factor), _mm_cvtepi32_ps(values));
    return _mm_movemask_ps(_mm_cmplt_ps(scaled, _mm_set1_ps(limit)));
  }
  static Vector minus_twice(Vector a, Vector b) { return _mm_sub_epi32(a, _mm_slli_epi32(b, 1)); }
#endif

  static bool any_nearer(const Block &block, int lanes, Point point, int32_t norm, float alpha,
                         float limit) {
    constexpr int kWide = sizeof(Vector) / sizeof(int32_t);
    for (int first = 0; first < lanes; first += kWide) {
      Vector dot = all(0);
      for (int pair = 0; pair < kPairs; ++pair)
        dot = add_products(dot, load(block.pairs[pair] + 2 * first), all(pair_at(point, pair)));
      const Vector far = minus_twice(add(load(block.norms + first), all(norm)), dot);
      const unsigned used = (1u << std::min(kWide, lanes - first)) - 1;
      if ((below(far, alpha, limit) & used) != 0) return true;
    }
    return false;
  }
#else
  static bool any_nearer(const Block &block, int lanes, Point point, int32_t norm, float alpha,
                         float limit) {
    int32_t dot[kBlock] = {};
    for (int pair = 0; pair < kPairs; ++pair)
      for (int lane = 0; lane < kBlock; ++lane)
        dot[lane] += int32_t{block.pairs[pair][2 * lane]} * point[2 * pair] +
                     int32_t{block.pairs[pair][2 * lane + 1]} * point[2 * pair + 1];
    for (int lane = 0; lane < lanes; ++lane)
      if (alpha * static_cast<float>(norm + block.norms[lane] - 2 * dot[lane]) < limit) return true;
    return false;
  }
#endif

  Block blocks_[HKV_MAX_DEGREE / kBlock];
  int count_ = 0;
};

}  // namespace hkv
