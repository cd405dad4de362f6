// The steps of a softmax over logits that lie one after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "convert.h"
#include "unrolled.h"

namespace hkv {

constexpr float kNoLogit = -std::numeric_limits<float>::infinity();

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

template <typename Value>
void grow(std::vector<Value> &values, int64_t size) {
  if (static_cast<int64_t>(values.size()) < size) values.resize(size);
}

/// exp of values up to 0, to about an ulp; 0 where float32 would become subnormal.
inline Floats exp_of_negative(Floats x) {
  const Floats lowest = Floats{} - 87.0f;
  const Ints tiny = x < lowest;
  x = tiny ? lowest : x;
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts, so that n times the first is exact.
  const Floats scaled = x * 1.44269504088896341f - 0.5f;
  const Ints n = __builtin_convertvector(scaled, Ints);  // towards zero: rounds x <= 0 to nearest
  const Floats whole = __builtin_convertvector(n, Floats);
  const Floats r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Floats power = (Floats)((n + 127) << 23);
  const Floats result = p * power;
  return tiny ? Floats{} : result;
}

/// 2 to the power of values up to about 0, to about an ulp; 0 where float32 would become subnormal.
/// Cheaper than `exp_of_negative`, whose factor a caller has in its scale.
inline Floats exp2_of_negative(Floats x) {
  const Floats lowest = Floats{} - 126.0f;
#if defined(__AVX512F__)
  const Floats whole = (Floats)_mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Ints tiny = x < lowest;
  x = tiny ? lowest : x;
  const Ints n = __builtin_convertvector(x - 0.5f, Ints);  // towards zero: rounds x <= 0 to nearest
  const Floats whole = __builtin_convertvector(n, Floats);
#endif
  const Floats part = x - whole;  // in [-1/2, 1/2], exactly; a minimax polynomial there
  Floats p = part * 1.3264727313e-3f + 9.6715129912e-3f;
  p = p * part + 5.5507335812e-2f;
  p = p * part + 2.4022242427e-1f;
  p = p * part + 6.9314700365e-1f;
  p = p * part + 1.0f;
#if defined(__AVX512F__)
  const __mmask16 large = _mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ);  // NaN is no less
  return (Floats)_mm512_maskz_scalef_ps(large, p, whole);
#else
  const Floats result = p * (Floats)((n + 127) << 23);
  return tiny ? Floats{} : result;
#endif
}

/// The larger of each lane, and `b` where `a` is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

/// What `join` makes of all lanes.
template <typename Join>
HKV_INLINE inline float joined_lanes(Floats values, const Join &join) {
#if defined(__AVX512F__)
  values = join(values, (Floats)_mm512_maskz_shuffle_f32x4(0xffff, values, values, 0x4e));
  values = join(values, (Floats)_mm512_maskz_shuffle_f32x4(0xffff, values, values, 0xb1));
  values = join(values, (Floats)_mm512_maskz_permute_ps(0xffff, values, 0x4e));
  return join(values, (Floats)_mm512_maskz_permute_ps(0xffff, values, 0xb1))[0];
#else
  for (int step = kLanes / 2; step > 0; step /= 2) {
    float lanes[2 * kLanes] = {};
    std::memcpy(lanes, &values, sizeof values);
    values = join(values, load_floats(lanes + step));
  }
  return values[0];
#endif
}

/// As many values as whole vectors hold.
inline int64_t in_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

/// Dot products become logits, in whole vectors: those beyond `count` are -inf.
inline void to_logits(float *scores, int64_t count, float scale, float softcap) {
  const int64_t padded = in_vectors(count);
  std::fill(scores + count, scores + padded, 0.0f);
  for (int64_t i = 0; i < padded; i += kLanes) {
    Floats scaled = load_floats(scores + i) * scale;
    if (softcap > 0.0f)
      for (int lane = 0; lane < kLanes; ++lane)
        scaled[lane] = softcap * std::tanh(scaled[lane] / softcap);
    store_floats(scores + i, scaled);
  }
  std::fill(scores + count, scores + padded, kNoLogit);
}

/// The largest of `count` logits, NaN left out.
inline float largest_of(const float *logits, int64_t count) {
  Floats most = Floats{} + kNoLogit;
  for (int64_t i = 0; i < in_vectors(count); i += kLanes) {
    const Floats some = load_floats(logits + i);
    most = some > most ? some : most;
  }
  float largest = kNoLogit;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, most[lane]);
  return largest;
}

/// Logits become exp(logit - largest); returns their sum.
inline float to_weights(float *logits, int64_t count, float largest) {
  Floats sums{};
  for (int64_t i = 0; i < in_vectors(count); i += kLanes) {
    const Floats weights = exp_of_negative(load_floats(logits + i) - largest);
    store_floats(logits + i, weights);
    sums += weights;
  }
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  return total;
}

}  // namespace hkv
