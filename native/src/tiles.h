// Tiles of attention: a few rows of queries in registers, against panels of keys and of values that
// stay in cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "convert.h"
#include "softmax.h"
#include "unrolled.h"

namespace hkv {

constexpr int kTileRows = 6;  // queries whose sums fill the registers, with a panel's vectors
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWide = 4;  // vectors of a panel: there are 32 registers
#else
constexpr int kWide = 2;
#endif
constexpr int kPanel = kWide * kLanes;  // keys, or channels of values, of a panel
constexpr int64_t kTileKeys = 256;
static_assert(kTileKeys % kPanel == 0, "a tile has whole panels");

/// Columns that whole panels hold.
inline int64_t in_panels(int64_t columns) { return (columns + kPanel - 1) / kPanel * kPanel; }

/// Keys [count, dim] as panels [dim][kPanel], one after the other; what is beyond `count` is 0.
template <typename Element>
void pack_keys(const Element *keys, int64_t stride, int64_t dim, int64_t count, float *panels) {
  for (int64_t first = 0; first < count; first += kPanel, panels += dim * kPanel) {
    const int64_t there = std::min<int64_t>(kPanel, count - first);
    for (int64_t key = 0; key < there; ++key) {
      const Element *from = keys + (first + key) * stride;
      for (int64_t d = 0; d < dim; ++d) panels[d * kPanel + key] = to_float(from[d]);
    }
    for (int64_t d = 0; there < kPanel && d < dim; ++d)
      std::fill(panels + d * kPanel + there, panels + (d + 1) * kPanel, 0.0f);
  }
}

/// Values [count, dim] as panels [kTileKeys][kPanel] of channels; channels beyond `dim` are 0.
template <typename Element>
void pack_values(const Element *values, int64_t stride, int64_t dim, int64_t count, float *panels) {
  for (int64_t first = 0; first < dim; first += kPanel, panels += kTileKeys * kPanel) {
    const int64_t there = std::min<int64_t>(kPanel, dim - first);
    for (int64_t key = 0; key < count; ++key) {
      convert(values + key * stride + first, there, panels + key * kPanel);
      std::fill(panels + key * kPanel + there, panels + (key + 1) * kPanel, 0.0f);
    }
  }
}

/// Products of queries [dim][kTileRows] with a panel of keys, to scores [kTileRows][kTileKeys].
HKV_INLINE inline void score_panel(const float *queries, const float *panel, int64_t dim,
                                   float *scores) {
  Floats sums[kTileRows][kWide] = {};
  for (int64_t d = 0; d < dim; ++d, queries += kTileRows, panel += kPanel) {
    Floats keys[kWide];
    unrolled<kWide>([&](auto i) { keys[i] = load_floats(panel + i * kLanes); });
    unrolled<kTileRows>([&](auto row) {
      unrolled<kWide>([&](auto i) { sums[row][i] += keys[i] * queries[row]; });
    });
  }
  unrolled<kTileRows>([&](auto row) {
    unrolled<kWide>(
        [&](auto i) { store_floats(scores + row * kTileKeys + i * kLanes, sums[row][i]); });
  });
}

/// Adds values [count][kPanel], weighted by weights [kTileRows][kTileKeys], to sums of a row each,
/// `stride` apart.
HKV_INLINE inline void add_panel(const float *weights, const float *panel, int64_t count,
                                 float *out, int64_t stride) {
  Floats sums[kTileRows][kWide];
  unrolled<kTileRows>([&](auto row) {
    unrolled<kWide>([&](auto i) { sums[row][i] = load_floats(out + row * stride + i * kLanes); });
  });
  for (int64_t key = 0; key < count; ++key, ++weights, panel += kPanel) {
    Floats values[kWide];
    unrolled<kWide>([&](auto i) { values[i] = load_floats(panel + i * kLanes); });
    unrolled<kTileRows>([&](auto row) {
      unrolled<kWide>([&](auto i) { sums[row][i] += values[i] * weights[row * kTileKeys]; });
    });
  }
  unrolled<kTileRows>([&](auto row) {
    unrolled<kWide>([&](auto i) { store_floats(out + row * stride + i * kLanes, sums[row][i]); });
  });
}

/// softcap * tanh(x / softcap), to about 1e-7 of softcap.
inline Floats soft_capped(Floats x, float softcap) {
  const Floats sized = x / softcap;
  const Floats power = exp_of_negative(sized > 0.0f ? sized * -2.0f : sized * 2.0f);
  const Floats size = softcap * (1.0f - power) / (1.0f + power);
  return sized > 0.0f ? size : -size;
}

/// The softmax of one query over its tiles: the largest logit so far, and the sum of the weights.
struct RunningSoftmax {
  float largest = kNoLogit, total = 0.0f;

  /// Scores [first, last) become weights; those outside [from, to) are not seen and get 0.
  /// Returns what earlier weights are to be multiplied by.
  HKV_INLINE float take(float *scores, int64_t first, int64_t last, int64_t from, int64_t to,
                        float scale, float softcap) {
    Floats most = Floats{} + kNoLogit;
    for (int64_t at = first; at < last; at += kLanes) {
      Floats logits = load_floats(scores + at) * scale;
      if (softcap > 0.0f) logits = soft_capped(logits, softcap);
      store_floats(scores + at, logits);
      most = logits > most ? logits : most;
    }
    if (from > first || to < last) {
      std::fill(scores + first, scores + from, kNoLogit);
      std::fill(scores + to, scores + last, kNoLogit);
      most = Floats{} + kNoLogit;
      for (int64_t at = first; at < last; at += kLanes) {
        const Floats logits = load_floats(scores + at);
        most = logits > most ? logits : most;
      }
    }
    float now = largest;
    for (int lane = 0; lane < kLanes; ++lane) now = std::max(now, most[lane]);
    Floats sums{};
    for (int64_t at = first; at < last; at += kLanes) {
      const Floats weights = exp_of_negative(load_floats(scores + at) - now);
      store_floats(scores + at, weights);
      sums += weights;
    }
    const float shrink = now > largest ? std::exp(largest - now) : 1.0f;
    total *= shrink;
    for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
    largest = now;
    return shrink;
  }
};

}  // namespace hkv
