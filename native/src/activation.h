// What a gated feed-forward computes between its products.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "convert.h"
#include "softmax.h"

namespace hkv {

/// A value as the element type holds it: models round their operations.
template <typename Element>
float as(float value) {
  Element held;
  round_to(value, held);
  return to_float(held);
}

/// Twice sqrt(2 / pi), and .044715 of it: GELU's tanh is of their half.
constexpr float kGelu = 1.5957691216057308f, kGeluCubed = kGelu * 0.044715f;

inline void check_activation(int32_t activation) {
  require(activation == HKV_SILU || activation == HKV_GELU_TANH,
          "activation must be SiLU (0) or GELU by tanh (1)");
}

/// gate = activation(gate) * (up + 1), both within limits: HKV_CLAMPED_SILU.
template <typename Element>
void gate_clamped(float alpha, float limit, const Element *up, int64_t count, Element *gate) {
  for (int64_t i = 0; i < count; ++i) {
    // Comparisons that are false for NaN, which stays.
    const float x = to_float(gate[i]), y = to_float(up[i]);
    const float clamped = x > limit ? limit : x, gated = y > limit ? limit : y < -limit ? -limit : y;
    const float share = as<Element>(1.0f / (1.0f + std::exp(-as<Element>(clamped * alpha))));
    round_to(as<Element>(gated + 1.0f) * as<Element>(clamped * share), gate[i]);
  }
}

/// gate = activation(gate) * up. wide: memory.
template <typename Element>
void gate(int32_t activation, const Element *up, int64_t count, Element *gate,
          std::vector<float> &wide) {
  grow(wide, in_vectors(count));
  std::fill(wide.begin() + count, wide.begin() + in_vectors(count), 0.0f);
  convert(gate, count, wide.data());
  for (int64_t i = 0; i < count; i += kLanes) {
    // x / (1 + exp(-slope)), by exponentials of negative numbers alone: x (1 + tanh(slope / 2)) / 2.
    const Floats x = load_floats(wide.data() + i), zero{};
    const Floats slope = activation == HKV_SILU ? x : x * (kGelu + kGeluCubed * x * x);
    const Floats small = exp_of_negative(slope < zero ? slope : -slope);
    store_floats(wide.data() + i, x * (slope < zero ? small : zero + 1.0f) / (1.0f + small));
  }
  for (int64_t i = 0; i < count; ++i)
    round_to(as<Element>(wide[static_cast<size_t>(i)]) * to_float(up[i]), gate[i]);
}

}  // namespace hkv
