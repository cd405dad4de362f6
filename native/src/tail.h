// Attention over what a search left, from the moments of all entries of its KV head.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "convert.h"
#include "few_queries.h"
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

  /// For each of `count` queries its `left` entries, all with logits below its limit: their
  /// log-sum-exp, and their mean value by weight.
  ///
  /// queries [count, dim], out [count, value_dim]; left, limits, lse [count].
  void attend(const float *queries, int64_t count, const int64_t *left, const float *limits,
              float scale, float softcap, float *out, float *lse) const {
    thread_local std::vector<float> spread;
    grow(spread, count * dim);
    product(queries, count, key_key, dim, spread.data());
    product(queries, count, key_value, value_dim, out);
    for (int64_t i = 0; i < count; ++i)
      lse[i] = estimate(queries + i * dim, spread.data() + i * dim, left[i], limits[i], scale,
                        softcap, out + i * value_dim);
  }

 private:
  /// spread: the query times key_key; out: the query times key_value, becomes the mean value.
  float estimate(const float *query, const float *spread, int64_t left, float limit, float scale,
                 float softcap, float *out) const {
    constexpr double kLeastVariance = 1e-12, kLeastSlope = 1e-6;
    if (left <= 0) return kNoLogit;
    const double variance =
        std::max(kLeastVariance, double(scale) * scale * dot(spread, query));
    double mean = double(scale) * dot(keys, query);
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

  float dot(const float *a, const float *b) const {
    Floats sums{};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) sums += load_floats(a + i) * load_floats(b + i);
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    for (; i < dim; ++i) total += a[i] * b[i];
    return total;
  }

  /// out [count, columns] = queries [count, dim] times a matrix [dim, columns], which is read once
  /// for every four of them.
  void product(const float *queries, int64_t count, const float *matrix, int64_t columns,
               float *out) const {
    const RowVectors vectors(static_cast<int>(columns));
    thread_local std::vector<float> sums;
    grow(sums, count * vectors.padded());
    std::fill_n(sums.data(), count * vectors.padded(), 0.0f);
    add_rows(matrix, columns, dim, vectors, count, queries, dim, sums.data());
    for (int64_t i = 0; i < count; ++i)
      vectors.unpad(sums.data() + i * vectors.padded(), out + i * columns);
  }
};

}  // namespace hkv
