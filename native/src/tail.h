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

/// Density over P(x < z) of a standard normal x, of z and log P; a series where these would cancel.
inline double normal_hazard(double z, double log_below) {
  if (z >= -20.0) return std::exp(-0.5 * z * z - log_below) * 0.39894228040143267794;
  const double r = 1.0 / (z * z);
  return -z / (1.0 - r * (1.0 - r * (3.0 - 15.0 * r)));
}

/// What a query attends exactly of one extent: how many entries, and the sum of their dot products.
struct Attended {
  int64_t count;
  double scores;
};

/// What is estimated of the unread entries of one extent, but for their mean value.
///
/// discount: of the weight exp(lse) the part that the value of every attended entry gives up.
struct Unread {
  float lse, discount;
};

/// The moments of one KV head. Source of the formulas: hybrid_kv/ops/tail.py.
struct TailHead {
  const float *keys, *values, *key_key, *key_value;
  int64_t dim, value_dim;
  bool first_order;

  static TailHead of(const hkv_tail &tail, int64_t head, int64_t dim, int64_t value_dim) {
    return {tail.keys + head * dim,
            tail.values + head * value_dim,
            tail.key_key + head * dim * dim,
            tail.key_value + head * dim * value_dim,
            dim,
            value_dim,
            tail.first_order != 0};
  }

  /// For each of `count` queries what it does not attend of `entries`, all with logits below its
  /// limit, and their mean value by weight, as long as no attended value gives up its discount.
  ///
  /// For each of `sets` choices of what is attended, as far as products with the moments are shared.
  ///
  /// queries [count, dim], out [sets, count, value_dim]; attended, limits, unread [sets, count].
  void attend(const float *queries, int64_t count, int64_t sets, int64_t entries,
              const Attended *attended, const float *limits, float scale, float softcap, float *out,
              Unread *unread) const {
    thread_local std::vector<float> spread;
    grow(spread, count * dim);
    product(queries, count, key_key, dim, spread.data());
    product(queries, count, key_value, value_dim, out);
    for (int64_t set = 1; set < sets; ++set)
      std::copy_n(out, count * value_dim, out + set * count * value_dim);
    for (int64_t i = 0; i < sets * count; ++i)
      unread[i] = estimate(queries + i % count * dim, spread.data() + i % count * dim, entries,
                           attended[i], limits[i], scale, softcap, out + i * value_dim);
  }

 private:
  /// spread: the query times key_key; out: the query times key_value, becomes the mean value.
  Unread estimate(const float *query, const float *spread, int64_t entries,
                  const Attended &attended, float limit, float scale, float softcap,
                  float *out) const {
    constexpr double kLeastVariance = 1e-12, kLeastSlope = 1e-6, kMostDeviations = 3.0;
    if (entries <= attended.count) return {kNoLogit, 0.0f};
    const auto left = static_cast<double>(entries - attended.count);
    const double ratio = static_cast<double>(attended.count) / left;
    const double variance =
        std::max(kLeastVariance, double(scale) * scale * dot(spread, query));
    const double deviation = std::sqrt(variance);
    double mean = double(scale) * dot(keys, query);
    const double lower = ratio * mean - scale * attended.scores / left;  // of the unread, less all's
    double slope = 1.0;
    if (softcap > 0.0f) {  // capped logits as normal too: their width by the slope at the mean
      const double capped = std::tanh(mean / softcap);
      mean = softcap * capped;
      slope = std::max(kLeastSlope, 1.0 - capped * capped);
    }
    double weight = mean, shift = slope, share = 1.0;
    if (first_order) {
      const double most = kMostDeviations * deviation;
      weight += slope * std::min(std::max(lower, -most), most);
    } else {
      const double width = slope * deviation, cut = (limit - mean) / width, z = cut - width;
      const double below = log_normal_below(z), cut_below = log_normal_below(cut);
      const double cut_hazard = normal_hazard(cut, cut_below);
      weight = std::min(weight + 0.5 * width * width + below - cut_below, double(limit));
      share = std::exp(-0.5 * variance);
      shift = (width - normal_hazard(z, below) + share * cut_hazard) / deviation;
    }
    const auto lean = static_cast<float>(scale * shift);
    const auto centre = static_cast<float>(1.0 + share * ratio);
    for (int64_t i = 0; i < value_dim; ++i) out[i] = centre * values[i] + lean * out[i];
    return {static_cast<float>(std::log(left) + weight), static_cast<float>(share / left)};
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
