// The steps of a softmax over logits that lie one after the other.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "convert.h"

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
