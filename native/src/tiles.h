// Tiles of attention: a few rows of queries in registers, against panels of keys and of values that
// stay in cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "pairs.h"
#include "softmax.h"
#include "transpose.h"
#include "unrolled.h"

namespace hkv {

#if defined(__AVX512F__) || defined(__aarch64__) || defined(HKV_EMULATED_AMX)
constexpr int kWide = 4;  // vectors of a panel: there are 32 registers
#else
constexpr int kWide = 2;
#endif
constexpr int kPanel = kWide * kLanes;  // keys, or channels of values, of a panel
constexpr int64_t kTileKeys = 256;
static_assert(kTileKeys % kPanel == 0, "a tile has whole panels");

/// Columns that whole panels hold.
inline int64_t in_panels(int64_t columns) { return (columns + kPanel - 1) / kPanel * kPanel; }

/// Arithmetic of tiles in float32, of which anything is made.
struct InFloats {
  using Packed = float;  // what vectors of packed queries, keys, values and weights hold
  using Vector = Floats;
  static constexpr int kElements = 1;  // of a Packed
  static constexpr int kRows = 6;      // queries of a group: with a panel's vectors their sums fill
                                       // the registers
  static constexpr int kStrip = 8;     // groups that share a panel in the first cache
  static constexpr int kDepth = 1;     // Packed that one product sums up: channels and keys are
                                       // padded with 0 to a multiple of it
  static constexpr bool kRowMajor = false;  // queries of a group lie one after the other

  template <typename Element>
  static float pack(const Element *from, int64_t) {
    return to_float(*from);
  }
  template <typename Element>
  static Floats pack(const Element *from) {
    return load_floats(from);
  }
  /// Elements of one row, and none of a next.
  template <typename Element>
  static float join(const Element *row, const Element *) {
    return to_float(*row);
  }
  template <typename Element>
  static Floats join_vector(const Element *row, const Element *) {
    return load_floats(row);
  }
  static Floats unpack(const float *from) { return load_floats(from); }
  static Floats add(Floats sums, Floats a, float b) { return sums + a * b; }
};

/// How bfloat16 lies in pairs.
struct Pairs {
  using Packed = uint32_t;
  using Vector = Words;
  static constexpr int kElements = 2;

  /// The second of a pair is 0 where only one is left.
  static uint32_t pack(const Bfloat *from, int64_t left) {
    return left > 1 ? join(from, from + 1) : from->bits;
  }
  static Words pack(const Bfloat *from) { return load_words(from); }
  /// Pairs of one row and the next, which is 0 where there is none.
  static uint32_t join(const Bfloat *row, const Bfloat *next) {
    return row->bits | (next == nullptr ? 0u : static_cast<uint32_t>(next->bits) << 16);
  }
  static Words join_vector(const Bfloat *row, const Bfloat *next) {
    const Words first = (Words)load_floats(row) >> 16;
    return next == nullptr ? first : first | (Words)load_floats(next);
  }
  /// kLanes weights, rounded.
  static void round(Floats values, uint32_t *to) {
    store_bfloats(reinterpret_cast<Bfloat *>(to), values);
  }
  static Floats unpack(const uint32_t *from) {
    return load_floats(reinterpret_cast<const Bfloat *>(from));
  }
};

#if HKV_HAS_PAIRS

/// Arithmetic of tiles of bfloat16 in pairs, where `has_pairs`.
struct InPairs : Pairs {
  static constexpr int kRows = 6, kStrip = 8, kDepth = 1;
  static constexpr bool kRowMajor = false;
  static Floats add(Floats sums, Words a, uint32_t b) { return add_pairs(sums, a, b - Words{}); }
};

#endif

/// How many Packed hold so many elements, in whole depths.
template <typename In>
int64_t packed(int64_t elements) {
  constexpr int64_t kDeep = In::kElements * In::kDepth;
  return (elements + kDeep - 1) / kDeep * In::kDepth;
}

/// A query [dim] as row `row` of a group, which is 0 there: [packed dim][kRows], or the other way
/// round.
template <typename In, typename Element>
void pack_query(const Element *query, int64_t dim, typename In::Packed *group, int64_t row) {
  const int64_t step = In::kRowMajor ? 1 : In::kRows;
  group += In::kRowMajor ? row * packed<In>(dim) : row;
  for (int64_t d = 0; d < dim; d += In::kElements, group += step)
    *group = In::pack(query + d, dim - d);
}

/// Keys [count, dim] as panels [packed dim][kPanel], one after the other; what is beyond `count` and
/// `dim` is 0.
template <typename In, typename Element>
void pack_keys(const Element *keys, int64_t stride, int64_t dim, int64_t count,
               typename In::Packed *panels) {
  const int64_t width = packed<In>(dim), whole = dim / (kLanes * In::kElements) * kLanes;
  for (int64_t first = 0; first < count; first += kPanel, panels += width * kPanel) {
    const int64_t there = std::min<int64_t>(kPanel, count - first);
    int64_t key = 0;
    for (; key + kLanes <= there; key += kLanes)
      for (int64_t at = 0; at < whole; at += kLanes) {
        const Element *from = keys + (first + key) * stride + at * In::kElements;
        Words square[kLanes];
        unrolled<kLanes>([&](auto i) { square[i] = (Words)In::pack(from + i * stride); });
        transpose(square);
        unrolled<kLanes>([&](auto i) { store(panels + (at + i) * kPanel + key, square[i]); });
      }
    for (int64_t row = 0; row < there; ++row)
      for (int64_t at = row < key ? whole : 0; at < width; ++at) {
        const int64_t d = at * In::kElements;
        panels[at * kPanel + row] = d < dim ? In::pack(keys + (first + row) * stride + d, dim - d) : 0;
      }
    for (int64_t at = 0; there < kPanel && at < width; ++at)
      std::fill(panels + at * kPanel + there, panels + (at + 1) * kPanel, 0);
  }
}

/// Values [count, dim] as panels [packed kTileKeys][kPanel] of channels; those beyond `dim`, and
/// values beyond `count` up to a whole depth, are 0.
template <typename In, typename Element>
void pack_values(const Element *values, int64_t stride, int64_t dim, int64_t count,
                 typename In::Packed *panels) {
  for (int64_t first = 0; first < dim; first += kPanel, panels += packed<In>(kTileKeys) * kPanel) {
    const int64_t there = std::min<int64_t>(kPanel, dim - first);
    auto *to = panels;
    for (int64_t key = 0; key < count; key += In::kElements, to += kPanel) {
      const Element *row = values + key * stride + first;
      const Element *next = key + 1 < count ? row + stride : nullptr;
      const auto later = [&](int64_t d) { return next == nullptr ? nullptr : next + d; };
      int64_t d = 0;
      for (; d + kLanes <= there; d += kLanes) store(to + d, In::join_vector(row + d, later(d)));
      for (; d < there; ++d) to[d] = In::join(row + d, later(d));
      std::fill(to + there, to + kPanel, 0);
    }
    std::fill(to, panels + packed<In>(count) * kPanel, 0);
  }
}

/// Products of a group of queries with a panel of keys, to scores [kRows][kTileKeys].
template <typename In>
HKV_INLINE inline void score_panel(const typename In::Packed *queries,
                                   const typename In::Packed *panel, int64_t width,
                                   float *scores) {
  Floats sums[In::kRows][kWide] = {};
  for (int64_t d = 0; d < width; ++d, queries += In::kRows, panel += kPanel) {
    typename In::Vector keys[kWide];
    unrolled<kWide>([&](auto i) { std::memcpy(&keys[i], panel + i * kLanes, sizeof keys[i]); });
    unrolled<In::kRows>([&](auto row) {
      unrolled<kWide>([&](auto i) { sums[row][i] = In::add(sums[row][i], keys[i], queries[row]); });
    });
  }
  unrolled<In::kRows>([&](auto row) {
    unrolled<kWide>(
        [&](auto i) { store_floats(scores + row * kTileKeys + i * kLanes, sums[row][i]); });
  });
}

/// Adds values [count][kPanel], weighted by weights [kRows][packed kTileKeys], to sums of a row
/// each, `stride` apart.
template <typename In>
HKV_INLINE inline void add_panel(const typename In::Packed *weights,
                                 const typename In::Packed *panel, int64_t count, float *out,
                                 int64_t stride) {
  constexpr int64_t kStep = kTileKeys / In::kElements;
  Floats sums[In::kRows][kWide];
  unrolled<In::kRows>([&](auto row) {
    unrolled<kWide>([&](auto i) { sums[row][i] = load_floats(out + row * stride + i * kLanes); });
  });
  for (int64_t key = 0; key < count; ++key, ++weights, panel += kPanel) {
    typename In::Vector values[kWide];
    unrolled<kWide>([&](auto i) { std::memcpy(&values[i], panel + i * kLanes, sizeof values[i]); });
    unrolled<In::kRows>([&](auto row) {
      unrolled<kWide>([&](auto i) { sums[row][i] = In::add(sums[row][i], values[i], weights[row * kStep]); });
    });
  }
  unrolled<In::kRows>([&](auto row) {
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

/// The softmax of one query over its tiles: the largest logit so far, times log2(e), and the sum of the
/// weights.
struct RunningSoftmax {
  float largest = kNoLogit, total = 0.0f;

  float lse() const { return (largest + std::log2(total)) * 0.693147180559945309f; }

  /// Gives `store` the weights of scores [first, last) in vectors; those outside [from, to) are not
  /// seen and get 0. Scores are overwritten. Returns what earlier weights are to be multiplied by.
  template <typename Store>
  HKV_INLINE float take(float *scores, int64_t first, int64_t last, int64_t from, int64_t to,
                        float scale, float softcap, const Store &store) {
    float factor = 1.44269504088896341f;  // log2(e)
    if (softcap > 0.0f || !(scale > 0.0f)) {
      for (int64_t at = first; at < last; at += kLanes) {
        const Floats logits = load_floats(scores + at) * scale;
        store_floats(scores + at, softcap > 0.0f ? soft_capped(logits, softcap) : logits);
      }
    } else {
      factor *= scale;
    }
    std::fill(scores + first, scores + from, kNoLogit);
    std::fill(scores + to, scores + last, kNoLogit);
    Floats most[kWide];  // several: each waits for its last
    unrolled<kWide>([&](auto i) { most[i] = Floats{} + kNoLogit; });
    for (int64_t at = first; at < last; at += kPanel)
      unrolled<kWide>([&](auto i) { most[i] = larger(load_floats(scores + at + i * kLanes), most[i]); });
    unrolled<kWide>([&](auto i) { most[0] = larger(most[i], most[0]); });
    const float now = std::max(largest, joined_lanes(most[0], larger) * factor);
    Floats sums{};
    for (int64_t at = first; at < last; at += kLanes) {
      const Floats weights = exp2_of_negative(load_floats(scores + at) * factor - now);
      store(at, weights);
      sums += weights;
    }
    const float shrink = now > largest ? exp2_of_negative(Floats{} + (largest - now))[0] : 1.0f;
    total = total * shrink + joined_lanes(sums, [](Floats a, Floats b) { return a + b; });
    largest = now;
    return shrink;
  }
};

}  // namespace hkv
