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
#include "row_scores.h"
#include "slices.h"
#include "softmax.h"

namespace hkv {

/// P(x < -|z|) of a standard normal x, times exp(z^2 / 2), within 5e-7 of itself for every z.
///
/// With t = 1 / (1 + |z| / sqrt(8)) its logarithm is that of t and a smooth function of t, here a
/// polynomial that was fitted for it, which is never above 0.
inline Floats normal_half(Floats z) {
  const Floats size = z < 0.0f ? -z : z;
  const Floats t = 1.0f / (1.0f + 0.35355339f * size);
  Floats p = t * 0.1687606f - 0.8133247f;
  p = t * (t * (t * p + 1.4732551f) - 1.1211007f) + 0.27135259f;
  p = t * (t * (t * (t * p - 0.18396665f) + 0.096388239f) + 0.37412503f) + 1.0000227f;
  return t * exp_of_negative(t * p - 1.9586594f);
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

/// Logits of a query in the clusters of a KV head: normal, of one width but where they are capped.
struct ClusterLogits {
  float mean, variance;  // of all entries, before the cap
  float deviation;       // of the logits of a cluster, before the cap
};

/// The moments of one KV head. Source of the formulas: hybrid_kv/ops/tail.py.
struct TailHead {
  const float *shares, *keys, *values, *key_key, *key_value;
  int64_t clusters, dim, value_dim;
  bool first_order;

  static TailHead of(const hkv_tail &tail, int64_t head, int64_t dim, int64_t value_dim) {
    return {tail.shares + head * tail.clusters,
            tail.keys + head * tail.clusters * dim,
            tail.values + head * tail.clusters * value_dim,
            tail.key_key + head * dim * dim,
            tail.key_value + head * dim * value_dim,
            tail.clusters,
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
    thread_local std::vector<float> spread, lean, means, of_means, of_slopes;
    const int64_t lines = sets * count;
    grow(spread, count * dim);
    grow(lean, count * value_dim);
    grow(means, count * padded());
    grow(of_means, lines * padded());
    grow(of_slopes, lines);
    product(queries, dim, count, key_key, dim, spread.data(), dim);
    product(queries, dim, count, key_value, value_dim, lean.data(), dim);
    dots(queries, count, scale, means.data());
    for (int64_t i = 0; i < count; ++i) {
      const float *own = means.data() + i * padded();
      const ClusterLogits logits =
          logits_of(own, double(scale) * scale * dot(spread.data() + i * dim, queries + i * dim));
      for (int64_t line = i; line < lines; line += count)
        unread[line] = estimate(own, logits, entries, attended[line], limits[line], scale, softcap,
                                of_means.data() + line * padded(), of_slopes[line]);
    }
    product(of_means.data(), padded(), lines, values, value_dim, out, clusters);
    for (int64_t line = 0; line < lines; ++line) {
      const float *own = lean.data() + line % count * value_dim, slope = scale * of_slopes[line];
      for (int64_t i = 0; i < value_dim; ++i) out[line * value_dim + i] += slope * own[i];
    }
  }

 private:
  int64_t padded() const { return in_vectors(clusters); }

  /// means: of the logits by cluster. variance: within a cluster.
  ClusterLogits logits_of(const float *means, double variance) const {
    constexpr double kLeastVariance = 1e-12;
    const double within = std::max(kLeastVariance, variance);
    double mean = 0.0, between = 0.0;
    for (int64_t at = 0; at < clusters; ++at) mean += double(shares[at]) * means[at];
    for (int64_t at = 0; at < clusters; ++at)
      between += shares[at] * (means[at] - mean) * (means[at] - mean);
    return {static_cast<float>(mean), static_cast<float>(within + between),
            static_cast<float>(std::sqrt(within))};
  }

  /// of_means [padded()]: by how much each cluster's mean value counts; of_slopes: and by how much the
  /// covariance of the values with the logits.
  Unread estimate(const float *means, const ClusterLogits &logits, int64_t entries,
                  const Attended &attended, float limit, float scale, float softcap,
                  float *of_means, float &of_slopes) const {
    std::fill_n(of_means, padded(), 0.0f);
    of_slopes = 0.0f;
    if (entries <= attended.count) return {kNoLogit, 0.0f};
    const auto left = static_cast<double>(entries - attended.count);
    const auto ratio = static_cast<float>(static_cast<double>(attended.count) / left);
    if (first_order) {
      constexpr double kMostDeviations = 3.0;
      const double lower = ratio * double(logits.mean) - scale * attended.scores / left;
      const double most = kMostDeviations * std::sqrt(double(logits.variance));
      double mean = logits.mean, slope = 1.0;
      if (softcap > 0.0f) {
        const double bent = std::tanh(mean / softcap);
        mean = softcap * bent, slope = std::max(double(kLeastSlope), 1.0 - bent * bent);
      }
      of_slopes = static_cast<float>(slope);
      for (int64_t at = 0; at < clusters; ++at)
        of_means[at] = shares[at] * (1.0f + ratio + of_slopes * (means[at] - logits.mean));
      const double weight = mean + slope * std::min(std::max(lower, -most), most);
      return {static_cast<float>(std::log(left) + weight), static_cast<float>(1.0 / left)};
    }
    const float share = std::exp(-0.5f * logits.variance);
    const double weight =
        below_limit(means, logits.deviation, limit, softcap, share, ratio, of_means, of_slopes);
    return {static_cast<float>(std::log(left) + weight), static_cast<float>(share / left)};
  }

  /// Of normal logits below a limit the logarithm of the mean weight; and what to make the mean value
  /// of, once that of the unread is anchored by a share.
  ///
  /// With c = (limit - mean) / width and z = c - width, a cluster weighs exp(mean + width^2 / 2) P(z),
  /// and of its entries P(c) are unread. Where z is negative the first is exp(limit - c^2 / 2) times
  /// `normal_half`, and the second likewise: exponents are added up before anything is raised to them.
  double below_limit(const float *means, float deviation, float limit, float softcap, float share,
                     float ratio, float *of_means, float &of_slopes) const {
    constexpr float kDensity = 0.39894228f, kOpen = std::numeric_limits<float>::infinity();
    thread_local std::vector<float> scratch;
    grow(scratch, 4 * padded());
    float *powers = scratch.data(), *number_powers = powers + padded();
    float *mass_shifts = number_powers + padded(), *number_shifts = mass_shifts + padded();
    float *numbers = of_means;  // until they are weighed
    thread_local std::vector<float> masses;
    grow(masses, padded());
    float most = kNoLogit, most_numbers = kNoLogit;
    for (int64_t at = 0; at < padded(); at += kLanes) {
      Floats mean = load_floats(means + at), width = Floats{} + deviation;
      if (softcap > 0.0f) capped(softcap, mean, width);
      const Floats p = shares_at(at);
      const Floats c = limit == kOpen ? width + 40.0f : (limit - mean) / width;
      const Floats z = c - width, half_c = normal_half(c), half_z = normal_half(z);
      const Floats bell_c = exp_of_negative(-0.5f * c * c), bell_z = exp_of_negative(-0.5f * z * z);
      const Floats below = 1.0f - bell_z * half_z, cut_below = 1.0f - bell_c * half_c;
      const Floats in_reach = p > 0.0f ? Floats{} : Floats{} + kNoLogit;  // but for empty clusters
      Floats number_power = c > 0.0f ? Floats{} : -0.5f * c * c;
      Floats power = z > 0.0f ? mean + 0.5f * width * width : limit - 0.5f * c * c;
      number_power += in_reach, power += in_reach;
      store_floats(number_powers + at, number_power);
      store_floats(powers + at, power);
      store_floats(numbers + at, p * (c > 0.0f ? cut_below : half_c));
      store_floats(masses.data() + at, p * (z > 0.0f ? below : half_z));
      store_floats(mass_shifts + at, width - kDensity * (z > 0.0f ? bell_z / below : 1.0f / half_z));
      store_floats(number_shifts + at, kDensity * (c > 0.0f ? bell_c / cut_below : 1.0f / half_c));
      for (int lane = 0; lane < kLanes; ++lane) {
        most = std::max(most, power[lane]);
        most_numbers = std::max(most_numbers, number_power[lane]);
      }
    }
    const float mass = raised(powers, most, masses.data());
    const float number = raised(number_powers, most_numbers, numbers);
    Floats slopes{};
    for (int64_t at = 0; at < padded(); at += kLanes) {
      const Floats own = load_floats(masses.data() + at) / mass;
      const Floats plain = share * load_floats(numbers + at) / number;
      slopes += own * load_floats(mass_shifts + at) + plain * load_floats(number_shifts + at);
      store_floats(of_means + at, own - plain + share * (1.0f + ratio) * shares_at(at));
    }
    for (int lane = 0; lane < kLanes; ++lane) of_slopes += slopes[lane];
    of_slopes /= deviation;
    const double weight = double(most) + std::log(double(mass)) - most_numbers -
                          std::log(double(number));
    return std::min(weight, double(limit));
  }

  /// values *= exp(powers - most); returns their sum.
  float raised(const float *powers, float most, float *values) const {
    Floats sums{};
    for (int64_t at = 0; at < padded(); at += kLanes) {
      const Floats own = load_floats(values + at) * exp_of_negative(load_floats(powers + at) - most);
      store_floats(values + at, own);
      sums += own;
    }
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    return total;
  }

  /// Shares of a vector of clusters; 0 behind the last one.
  Floats shares_at(int64_t at) const {
    if (at + kLanes <= clusters) return load_floats(shares + at);
    Floats own{};
    for (int64_t i = at; i < clusters; ++i) own[i - at] = shares[i];
    return own;
  }

  /// Capped logits are taken as normal too: their width by the slope at the mean.
  static void capped(float softcap, Floats &mean, Floats &width) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float bent = std::tanh(mean[lane] / softcap);
      mean[lane] = softcap * bent;
      width[lane] *= std::max(kLeastSlope, 1.0f - bent * bent);
    }
  }

  /// means [count, padded()] of the logits by cluster, 0 behind the last one.
  void dots(const float *queries, int64_t count, float scale, float *means) const {
    thread_local RowScores<float> scores;
    thread_local std::vector<float> rows;
    const hkv_keys of_clusters{keys, clusters, dim, static_cast<int32_t>(dim), HKV_F32};
    const int64_t row = (clusters + 15) / 16 * 16;
    grow(rows, kSlice * row);
    scores.prepare(of_clusters, queries, count);
    for (int64_t first = 0; first < count; first += kSlice) {
      scores.score(first / kSlice, 0, clusters, rows.data(), row, 0);
      for (int64_t i = first; i < std::min(count, first + kSlice); ++i) {
        float *own = means + i * padded();
        for (int64_t at = 0; at < clusters; ++at) own[at] = scale * rows[(i - first) * row + at];
        std::fill(own + clusters, own + padded(), 0.0f);
      }
    }
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

  /// out [count, columns] = weights [count, step] times `rows` rows of a matrix, which is read once for
  /// every four of them.
  static void product(const float *weights, int64_t step, int64_t count, const float *matrix,
                      int64_t columns, float *out, int64_t rows) {
    const RowVectors vectors(static_cast<int>(columns));
    thread_local std::vector<float> sums;
    grow(sums, count * vectors.padded());
    std::fill_n(sums.data(), count * vectors.padded(), 0.0f);
    add_rows(matrix, columns, rows, vectors, count, weights, step, sums.data());
    for (int64_t i = 0; i < count; ++i)
      vectors.unpad(sums.data() + i * vectors.padded(), out + i * columns);
  }

  static constexpr float kLeastSlope = 1e-6f;
};

}  // namespace hkv
