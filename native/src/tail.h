// Attention over what a search left, from the moments of all entries of its KV head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "convert.h"
#include "hybrid_kv_step.h"
#include "softmax.h"

namespace hkv {

/// log P(x < z) of a standard normal x.
inline double log_normal_below(double z) {
  constexpr double kHalfLogTwoPi = 0.91893853320467274178;
  if (z > 5.0) return std::log1p(-0.5 * std::erfc(z * M_SQRT1_2));
  if (z > -20.0) return std::log(0.5 * std::erfc(-z * M_SQRT1_2));
  const double r = 1.0 / (z * z);  // asymptotic: its next term is below 1e-8 here
  return -0.5 * z * z - std::log(-z) - kHalfLogTwoPi + std::log1p(-r * (1.0 - r * (3.0 - 15.0 * r)));
}

/// The moments of one KV head. Source of the formulas: hybrid_kv/ops/tail.py.
struct TailHead {
  const float *keys, *values, *key_key, *key_value;
  int64_t dim, value_dim;

  static TailHead of(const hkv_tail &tail, int64_t head, int64_t dim, int64_t value_dim) {
    return {tail.keys + head * dim, tail.values + head * value_dim, tail.key_key + head * dim * dim,
            tail.key_value + head * dim * value_dim, dim, value_dim};
  }

  /// `left` entries, all with logits below `limit`: returns their log-sum-exp, out becomes their mean
  /// value by weight.
  float attend(const float *query, int64_t left, float limit, float scale, float softcap,
               float *out) const {
    constexpr double kLeastVariance = 1e-12, kLeastSlope = 1e-6;
    if (left <= 0) return kNoLogit;
    thread_local std::vector<float> own;
    grow(own, dim);
    const double variance = std::max(
        kLeastVariance, double(scale) * scale * dot(by(query, key_key, dim, own.data()), query));
    double mean = double(scale) * dot(keys, query);
    by(query, key_value, value_dim, out);
    const double deviation = std::sqrt(variance);
    double width = deviation;
    if (softcap > 0.0f) {  // capped logits as normal too: their width by the slope at the mean
      const double capped = std::tanh(mean / softcap);
      mean = softcap * capped;
      width *= std::max(kLeastSlope, 1.0 - capped * capped);
    }
    const double cut = (limit - mean) / width, z = cut - width;
    const double below = log_normal_below(z);
    const double density = std::exp(-0.5 * z * z - below) * 0.39894228040143267794;
    const auto shift = static_cast<float>(scale * (width - density) / deviation);
    for (int64_t i = 0; i < value_dim; ++i) out[i] = values[i] + shift * out[i];
    return static_cast<float>(std::log(double(left)) + mean + 0.5 * width * width + below -
                              log_normal_below(cut));
  }

 private:
  float dot(const float *a, const float *b) const {
    Floats sums{};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) sums += load_floats(a + i) * load_floats(b + i);
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    for (; i < dim; ++i) total += a[i] * b[i];
    return total;
  }

  /// The query times a matrix [dim, columns], row by row.
  const float *by(const float *query, const float *matrix, int64_t columns, float *out) const {
    std::fill_n(out, columns, 0.0f);
    for (int64_t row = 0; row < dim; ++row) {
      const float weight = query[row], *from = matrix + row * columns;
      for (int64_t i = 0; i < columns; ++i) out[i] += weight * from[i];
    }
    return out;
  }
};

}  // namespace hkv
