// Exact scores that are the same bits on every instruction set.
//
// Channel c is added in lane c % 16, the lanes are then halved four times; products and sums are
// rounded one by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "row_scores.h"

namespace hkv {

constexpr int kExactLanes = 16;

/// Floats of a query that is padded with 0 for `score_exactly`.
constexpr int exact_room(int dim) { return (dim + kExactLanes - 1) / kExactLanes * kExactLanes; }

namespace detail {

typedef float FourFloats __attribute__((vector_size(16)));

inline FourFloats load_four(const float *from) {
  FourFloats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

/// The sums of four rows' 16 lanes.
inline void halve_lanes(const float *lanes, float *out) {
  float quarters[4][4];  // [lane][row]
  for (int row = 0; row < 4; ++row) {
    const float *of = lanes + row * kExactLanes;
    const FourFloats four =
        (load_four(of) + load_four(of + 8)) + (load_four(of + 4) + load_four(of + 12));
    for (int lane = 0; lane < 4; ++lane) quarters[lane][row] = four[lane];
  }
  const FourFloats even = load_four(quarters[0]) + load_four(quarters[2]);
  const FourFloats sums = even + (load_four(quarters[1]) + load_four(quarters[3]));
  std::memcpy(out, &sums, sizeof sums);
}

/// Four rows with a padded query: out[row]. later: rows that are asked for meanwhile.
template <typename Element>
HKV_INLINE inline void score_four(const Element *const rows[4], const Element *const later[4],
                                  int dim, const float *query, float *out) {
  constexpr int kParts = kExactLanes / kLanes;
  Floats sums[4][kParts] = {};
  const auto add = [&](const Element *at, int row, int channel) HKV_INLINE {
    for (int part = 0; part < kParts; ++part) {
      const Floats factor = load_floats(query + channel + part * kLanes);
      sums[row][part] += rounded(load_floats(at + part * kLanes) * factor);
    }
  };
  int channel = 0;
  for (; channel + kExactLanes <= dim; channel += kExactLanes)
    for (int row = 0; row < 4; ++row) {
      __builtin_prefetch(later[row] + channel);
      add(rows[row] + channel, row, channel);
    }
  if (channel < dim)
    for (int row = 0; row < 4; ++row) {
      Element padded[kExactLanes] = {};
      std::memcpy(static_cast<void *>(padded), rows[row] + channel,
                  static_cast<size_t>(dim - channel) * sizeof(Element));
      __builtin_prefetch(later[row] + channel);
      add(padded, row, channel);
    }
  float lanes[4 * kExactLanes];
  for (int row = 0; row < 4; ++row)
    for (int part = 0; part < kParts; ++part)
      store_floats(lanes + row * kExactLanes + part * kLanes, sums[row][part]);
  halve_lanes(lanes, out);
}

}  // namespace detail

/// Exact scores of some rows of one head with one query, padded to exact_room(dim).
template <typename Element>
inline void score_exactly(const hkv_keys &keys, const float *query, const uint32_t *ids,
                          int64_t count, float *out) {
  const int64_t ahead = rows_ahead<Element>(keys.dim);
  const Element *base = static_cast<const Element *>(keys.data);
  const auto row = [&](int64_t i) { return base + int64_t{ids[i]} * keys.stride; };
  for (int64_t i = 0; i < std::min(ahead, count); ++i) prefetch_row(row(i), keys.dim);
  for (int64_t at = 0; at < count; at += 4) {
    const Element *rows[4], *later[4];
    for (int i = 0; i < 4; ++i) {
      rows[i] = row(std::min(at + i, count - 1));
      later[i] = row(std::min(at + ahead + i, count - 1));
    }
    float four[4];
    detail::score_four<Element>(rows, later, keys.dim, query, four);
    std::copy_n(four, std::min<int64_t>(4, count - at), out + at);
  }
}

}  // namespace hkv
