// Tiles of attention by AMX: 32 queries against panels of keys and of values.
#pragma once

#include "amx.h"
#include "tiles.h"

#if HKV_HAS_AMX

namespace hkv {

/// Arithmetic of tiles of bfloat16 by AMX, where `has_amx`; AmxTiles must live.
struct InAmx : Pairs {
  static constexpr int kRows = 2 * kAmxRows, kStrip = 2, kDepth = kAmxPairs;
  static constexpr bool kRowMajor = true;
  static_assert(kPanel % kRows == 0, "sums are as wide as high");
};

/// Adds rows [32][`depth`] of pairs, `row_step` apart, times columns [`depth`][32], `column_step`
/// apart, to tiles 0 to 3.
HKV_INLINE inline void add_products(const uint32_t *rows, int64_t row_step, const uint32_t *columns,
                                    int64_t column_step, int64_t depth) {
  using Tiles = AmxTiles;
  const int64_t stride = row_step * 4, column_stride = column_step * 4;
  for (int64_t at = 0; at < depth; at += kAmxPairs, columns += kAmxPairs * column_step) {
    Tiles::load<4>(rows + at, stride);
    Tiles::load<6>(columns, column_stride);
    Tiles::load<7>(columns + kAmxRows, column_stride);
    Tiles::add_products<0, 4, 6>();
    Tiles::add_products<1, 4, 7>();
    Tiles::load<5>(rows + kAmxRows * row_step + at, stride);
    Tiles::add_products<2, 5, 6>();
    Tiles::add_products<3, 5, 7>();
  }
}

/// Calls body(number, array) for the tiles 0 to 3 of sums [32][32], rows `step` apart.
template <typename Body>
HKV_INLINE inline void each_tile(float *sums, int64_t step, const Body &body) {
  unrolled<4>([&](auto tile) HKV_INLINE {
    body(tile, sums + tile / 2 * kAmxRows * step + tile % 2 * kAmxRows);
  });
}

template <>
HKV_INLINE inline void score_panel<InAmx>(const uint32_t *queries, const uint32_t *panel,
                                          int64_t width, float *scores) {
  for (int64_t first = 0; first < kPanel; first += InAmx::kRows) {
    unrolled<4>([&](auto tile) HKV_INLINE { AmxTiles::zero<tile>(); });
    add_products(queries, width, panel + first, kPanel, width);
    each_tile(scores + first, kTileKeys,
              [&](auto tile, float *to) HKV_INLINE { AmxTiles::store<tile>(to, kTileKeys * 4); });
  }
}

template <>
HKV_INLINE inline void add_panel<InAmx>(const uint32_t *weights, const uint32_t *panel,
                                        int64_t count, float *out, int64_t stride) {
  constexpr int64_t kStep = kTileKeys / InAmx::kElements;
  for (int64_t first = 0; first < kPanel; first += InAmx::kRows) {
    each_tile(out + first, stride, [&](auto tile, const float *from)
                                       HKV_INLINE { AmxTiles::load<tile>(from, stride * 4); });
    add_products(weights, kStep, panel + first, kPanel, count);
    each_tile(out + first, stride, [&](auto tile, float *to)
                                       HKV_INLINE { AmxTiles::store<tile>(to, stride * 4); });
  }
}

}  // namespace hkv

#endif
