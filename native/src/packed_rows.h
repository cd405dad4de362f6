// Products of one row of packed weights: decoded once for all columns of inputs.
#pragma once

#include "packed_inputs.h"
#include "packed_kinds.h"

namespace hkv {

/// Adds a row's products to totals [columns].
template <typename Kind>
void add_row_portable(const uint8_t *row, const RoundedInputs &inputs, float *totals) {
  constexpr int kBlocks = kChunkValues / Kind::kValues;  // of a chunk
  constexpr int kScales = Kind::kValues / Kind::kScaleValues;
  const int64_t blocks = inputs.num_inputs / Kind::kValues;
  int8_t codes[kChunkValues];
  float scales[kBlocks * kScales], offsets[kBlocks * kScales];
  for (int64_t chunk = 0; chunk < inputs.chunks; ++chunk) {
    const int64_t first = chunk * kBlocks;
    const int count = static_cast<int>(std::min<int64_t>(kBlocks, blocks - first));
    for (int block = 0; block < count; ++block)
      Kind::decode(row + (first + block) * Kind::kBytes, codes + block * Kind::kValues,
                   scales + block * kScales, offsets + block * kScales);
    for (int64_t column = 0; column < inputs.columns; ++column) {
      const int8_t *input = inputs.codes(chunk, column);
      const float *input_scales = inputs.scales(chunk, column);
      const float *sums = inputs.sums(chunk, column);
      for (int group = 0; group < count * kScales; ++group) {
        const int at = group * Kind::kScaleValues;
        int32_t product = 0;
        for (int i = at; i < at + Kind::kScaleValues; ++i) product += codes[i] * input[i];
        totals[column] += static_cast<float>(product) * (scales[group] * input_scales[at / kRoundedBlock]);
        if (Kind::kHasOffset) totals[column] += offsets[group] * sums[group];
      }
    }
  }
}

}  // namespace hkv
