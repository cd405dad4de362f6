// Inputs of packed weights: rounded to 8 bits by blocks of 32 values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>

#include "convert.h"
#include "pool.h"

namespace hkv {

constexpr int kRoundedBlock = 32;
constexpr int kChunkValues = 256;  // as many as the longest block of weights has
constexpr int kChunkBlocks = kChunkValues / kRoundedBlock;

/// Memory on 64 bytes, of undefined content.
template <typename Item>
class LineArray {
 public:
  explicit LineArray(size_t count)
      : items_(static_cast<Item *>(::operator new(count * sizeof(Item), std::align_val_t(64)))) {}
  ~LineArray() { ::operator delete(items_, std::align_val_t(64)); }
  LineArray(LineArray &&other) noexcept : items_(std::exchange(other.items_, nullptr)) {}
  LineArray &operator=(LineArray &&) = delete;
  Item *data() const { return items_; }

 private:
  Item *items_;
};

/// A block of inputs is scale * codes. What is not finite makes the scale NaN, hence all outputs.
/// rest, if not null: what the rounding leaves. sums: of every `sum_values` rounded inputs.
inline void round_block(const float *inputs, int sum_values, int8_t *codes, float *scale,
                        float *sums, float *rest) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves no bits behind the point
  float largest = 0.0f;
  float poison = 0.0f;  // NaN if one of the inputs is not finite
  for (int i = 0; i < kRoundedBlock; ++i) {
    const float magnitude = std::fabs(inputs[i]);
    largest = magnitude > largest ? magnitude : largest;
    poison += inputs[i] * 0.0f;
  }
  *scale = largest / 127.0f + poison;
  const float inverse =
      poison == 0.0f && *scale >= std::numeric_limits<float>::min() ? 1.0f / *scale : 0.0f;
  for (int i = 0; i < kRoundedBlock; ++i) {
    const float rounded = (inverse != 0.0f ? inputs[i] * inverse : 0.0f) + kRound - kRound;
    codes[i] = static_cast<int8_t>(static_cast<int32_t>(rounded));
    if (rest != nullptr) rest[i] = inputs[i] - rounded * *scale;
  }
  for (int first = 0; first < kRoundedBlock; first += sum_values) {
    int32_t sum = 0;
    for (int i = first; i < first + sum_values; ++i) sum += codes[i];
    *sums++ = static_cast<float>(sum) * *scale;
  }
}

/// Rounded tokens, as columns of a product: one for each, or two in exact mode, of which the second
/// holds what the rounding of the first leaves. Behind the last input all is zero.
///
/// They lie in chunks of 256 inputs, and within a chunk by columns: codes [chunk, column, 256],
/// scales [chunk, column, 8], sums [chunk, column, 256 / sum_values]. `paired`: halves of
/// blocks i and i + 4 lie together: [i, half, 2, 16].
class RoundedInputs {
 public:
  RoundedInputs(int64_t tokens, int64_t num_inputs, bool exact, int sum_values, bool paired)
      : columns(tokens * (exact ? 2 : 1)),
        parts(exact ? 2 : 1),
        num_inputs(num_inputs),
        chunks((num_inputs + kChunkValues - 1) / kChunkValues),
        sum_values(sum_values),
        num_sums(kChunkValues / sum_values),
        paired(paired),
        codes_(static_cast<size_t>(chunks * columns) * kChunkValues),
        scales_(static_cast<size_t>(chunks * columns) * kChunkBlocks),
        sums_(static_cast<size_t>(chunks * columns * num_sums)) {}

  const int8_t *codes(int64_t chunk, int64_t column) const {
    return codes_.data() + (chunk * columns + column) * kChunkValues;
  }
  const float *scales(int64_t chunk, int64_t column) const {
    return scales_.data() + (chunk * columns + column) * kChunkBlocks;
  }
  const float *sums(int64_t chunk, int64_t column) const {
    return sums_.data() + (chunk * columns + column) * num_sums;
  }

  /// Rounds one token, [num_inputs].
  template <typename Element>
  void round_token(int64_t token, const Element *inputs) {
    float values[kChunkValues], rest[kChunkValues];
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t first = chunk * kChunkValues;
      const int count = static_cast<int>(std::min<int64_t>(kChunkValues, num_inputs - first));
      convert(inputs + first, count, values);
      std::fill(values + count, values + kChunkValues, 0.0f);
      round_chunk(chunk, token * parts, values, parts == 2 ? rest : nullptr);
      if (parts == 2) round_chunk(chunk, token * parts + 1, rest, nullptr);
    }
  }

  const int64_t columns;
  const int parts;
  const int64_t num_inputs, chunks;
  const int sum_values, num_sums;
  const bool paired;

 private:
  void round_chunk(int64_t chunk, int64_t column, const float *values, float *rest) {
    const int64_t at = chunk * columns + column;
    int8_t *codes = codes_.data() + at * kChunkValues;
    for (int block = 0; block < kChunkBlocks; ++block)
      round_block(values + block * kRoundedBlock, sum_values, codes + block * kRoundedBlock,
                  scales_.data() + at * kChunkBlocks + block,
                  sums_.data() + at * num_sums + block * kRoundedBlock / sum_values,
                  rest == nullptr ? nullptr : rest + block * kRoundedBlock);
    if (!paired) return;
    constexpr int kHalf = kRoundedBlock / 2, kPairs = kChunkBlocks / 2;
    int8_t together[kChunkValues];
    for (int block = 0; block < kChunkBlocks; ++block)
      for (int half = 0; half < 2; ++half)
        std::memcpy(together + ((block % kPairs * 2 + half) * 2 + block / kPairs) * kHalf,
                    codes + (block * 2 + half) * kHalf, kHalf);
    std::memcpy(codes, together, sizeof together);
  }

  LineArray<int8_t> codes_;
  LineArray<float> scales_, sums_;
};

}  // namespace hkv
