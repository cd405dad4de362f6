// Sizes of sketches, and the projection of keys and queries into their dims.
#pragma once

#include <algorithm>
#include <cstdint>

#include "convert.h"
#include "hybrid_kv_sketch.h"
#include "quantise.h"

namespace hkv {

constexpr int kRoom = 16;        // columns of a map come in so many
constexpr int kProjectRows = 4;  // that are projected at once
constexpr float kRoundWhole = 0x1.8p23f;  // adding it leaves no bits behind the point

/// Lines of a block by the bits of their codes.
struct SketchLines {
  explicit SketchLines(const hkv_sketch_map &map)
      : of_8(map.lines_of_8), of_4(map.lines_of_4), of_2(map.lines_of_2) {}

  int dims() const { return kQuadChannels * (of_8 + 2 * of_4 + 4 * of_2); }
  int room() const { return (dims() + kRoom - 1) / kRoom * kRoom; }
  int64_t block_bytes() const { return int64_t{of_8 + of_4 + of_2} * kLineBytes; }

  const int of_8, of_4, of_2;
};

/// Raises Invalid unless the map can be read.
void check_sketch_map(const hkv_sketch_map &map);

/// Raises Invalid unless the pages of a tier that has some lie within the keys.
void check_sketch_pages(const hkv_sketch_tier &tier, const hkv_keys &keys);

/// Blocks of one tier that lie next to each other.
struct BlockRun {
  const uint8_t *at;  // the first one
  int64_t end;        // the block behind the last one
  int64_t later;      // bytes to the blocks that a scan reads some kilobytes later
};

/// The run that begins with `block` and ends before `last`; `ahead` bytes are read in between.
inline BlockRun run_of(const hkv_sketch_tier &tier, int64_t block, int64_t last, int64_t block_bytes,
                       int64_t ahead) {
  if (tier.pages == nullptr) return {tier.blocks + block * block_bytes, last, ahead};
  const int64_t of_page = tier.page_keys / HKV_BLOCK_KEYS, skipped = tier.first / HKV_BLOCK_KEYS;
  const int64_t page = (block + skipped) / of_page, within = (block + skipped) % of_page;
  const int64_t pages = (last + skipped - 1) / of_page;  // the last one
  const int64_t far = std::min(pages, page + std::max<int64_t>(1, ahead / (of_page * block_bytes)));
  return {tier.blocks + tier.pages[page] * tier.page_bytes + within * block_bytes,
          std::min(last, block + of_page - within),
          (tier.pages[far] - tier.pages[page]) * tier.page_bytes};
}

/// The row of the keys at a place of a tier.
inline uint32_t row_of(const hkv_sketch_tier &tier, uint32_t place) {
  if (tier.ids != nullptr) return static_cast<uint32_t>(tier.ids[place]);
  if (tier.pages == nullptr) return place;
  const uint32_t token = place + static_cast<uint32_t>(tier.first);
  const uint32_t keys = static_cast<uint32_t>(tier.page_keys);
  return static_cast<uint32_t>(tier.first_row + tier.pages[token / keys] * tier.page_rows +
                               token % keys);
}

/// out[row][room] = start + sum over channels of columns[channel] * rows[row][channel].
///
/// The order of sums is that of the channels, whatever the width of vectors; `Rows` is how many rows
/// share what is loaded.
template <int Rows>
inline void project_rows(const float *rows, int dim, const float *columns, int room,
                         const float *start, float *out) {
  constexpr int kVectors = 64 / kLanes < 4 ? 4 : kLanes == 8 ? 2 : 4;
  for (int first = 0; first < room; first += kVectors * kLanes) {
    const int vectors = std::min(kVectors, (room - first) / kLanes);
    Floats sums[Rows][kVectors];
    for (int row = 0; row < Rows; ++row)
      for (int i = 0; i < kVectors; ++i)
        sums[row][i] = i < vectors && start != nullptr ? load_floats(start + first + i * kLanes)
                                                       : Floats{};
    const auto add = [&](auto count) {
      for (int channel = 0; channel < dim; ++channel) {
        const float *column = columns + int64_t{channel} * room + first;
        Floats factors[kVectors];
        for (int i = 0; i < decltype(count)::value; ++i)
          factors[i] = load_floats(column + i * kLanes);
        for (int row = 0; row < Rows; ++row) {
          const Floats value = Floats{} + rows[row * dim + channel];
          for (int i = 0; i < decltype(count)::value; ++i)
            sums[row][i] += rounded(factors[i] * value);
        }
      }
    };
    if (vectors == kVectors)
      add(std::integral_constant<int, kVectors>());
    else if (vectors == 3)
      add(std::integral_constant<int, std::min(3, kVectors)>());
    else if (vectors == 2)
      add(std::integral_constant<int, std::min(2, kVectors)>());
    else
      add(std::integral_constant<int, 1>());
    for (int row = 0; row < Rows; ++row)
      for (int i = 0; i < vectors; ++i)
        store_floats(out + row * room + first + i * kLanes, sums[row][i]);
  }
}

/// Projects rows [count, dim] into out [count, room].
inline void project(const float *rows, int64_t count, int dim, const float *columns, int room,
                    const float *start, float *out) {
  int64_t row = 0;
  for (; row + kProjectRows <= count; row += kProjectRows)
    project_rows<kProjectRows>(rows + row * dim, dim, columns, room, start, out + row * room);
  for (; row < count; ++row)
    project_rows<1>(rows + row * dim, dim, columns, room, start, out + row * room);
}

/// Whether all of values [count] are finite; count is a multiple of 16.
inline bool all_finite(const float *values, int64_t count) {
  Floats sums{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats value = load_floats(values + i);
    sums += value - value;  // 0, or NaN
  }
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  return sum == 0.0f;
}

}  // namespace hkv
