// Products of packed weights with any number of tokens, of one matrix or several.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "error.h"
#include "packed_panels.h"
#include "packed_rows.h"
#include "pool.h"

namespace hkv {

// What a worker takes at a time: as many bytes of weights, in whole panels.
constexpr int64_t kItemBytes = 128 * 1024, kItemRows = 64;

struct PackedLayer {
  const uint8_t *weight;
  int64_t num_outputs, num_inputs, stride;
  const float *bias;
  const uint8_t *end;  // of the last row

  const uint8_t *row(int64_t output) const { return weight + output * stride; }
};

/// out [tokens, num_outputs] from token `begin` on: the sums of a token's columns, and the bias.
struct Outputs {
  void *out;
  int32_t dtype;
  const PackedLayer &layer;
  int parts;
  int64_t begin;

  /// Stores `count` outputs of the columns' tokens; totals: [columns, stride].
  void store(int64_t first, int64_t count, int64_t column, int64_t columns, const float *totals,
             int64_t stride) const {
    const float *bias = layer.bias == nullptr ? nullptr : layer.bias + first;
    with_dtype(dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      for (int64_t at = 0; at < columns; at += parts) {
        const float *one = totals + at * stride, *rest = one + stride;
        const int64_t token = begin + (column + at) / parts;
        Element *to = static_cast<Element *>(out) + token * layer.num_outputs + first;
        for (int64_t i = 0; i < count; ++i) {
          const float sum = parts == 2 ? one[i] + rest[i] : one[i];
          round_to(bias == nullptr ? sum : sum + bias[i], to[i]);
        }
      }
    });
  }
};

/// Rows [first, last), each with all columns.
template <typename Kind>
void multiply_rows(const PackedLayer &layer, const RoundedInputs &inputs, const Outputs &outputs,
                   int64_t first, int64_t last) {
  std::vector<float> totals(static_cast<size_t>(inputs.columns * kRowsTogether));
  for (int64_t output = first; output < last; output += kRowsTogether) {
    const int count = static_cast<int>(std::min<int64_t>(kRowsTogether, last - output));
    sum_rows<Kind>({layer.row(output), layer.stride, count, layer.end}, inputs, totals.data());
    outputs.store(output, count, 0, inputs.columns, totals.data(), kRowsTogether);
  }
}

#if defined(__AVX2__)

/// From so many columns on panels are faster than rows.
template <typename Kind>
constexpr int64_t kMinColumns = 5;
template <int Kind, int Bits>
constexpr int64_t kMinColumns<Parts<Kind, Bits>> = 4;

constexpr int64_t kManyColumns = 64;  // for which a panel is high
constexpr int64_t kColumnBlock = 512;  // whose sums of a panel stay in the cache

template <typename Kind>
bool in_panels(int64_t columns) {
  return columns >= kMinColumns<Kind>;
}

/// As `multiply_rows`, in panels.
template <typename Kind>
void multiply_panels(const PackedLayer &layer, const RoundedInputs &inputs,
                     const Outputs &outputs, int64_t first, int64_t last) {
  const int64_t height = inputs.columns < kManyColumns ? kTileRows : kMaxPanelRows;
  const int64_t block = std::min(kColumnBlock, inputs.columns);
  std::vector<float> totals(static_cast<size_t>(height * block));
  for (int64_t row = first; row < last; row += height)
    for (int64_t column = 0; column < inputs.columns; column += block) {
      const int64_t rows = std::min(height, last - row);
      const int64_t columns = std::min(block, inputs.columns - column);
      const int64_t padded = (rows + kTileRows - 1) / kTileRows * kTileRows;
      std::fill(totals.begin(), totals.end(), 0.0f);
      add_panel<Kind>(layer.row(row), layer.stride, rows, inputs, column, column + columns,
                      totals.data(), padded);
      outputs.store(row, rows, column, columns, totals.data(), padded);
    }
}

#else

template <typename Kind>
bool in_panels(int64_t) {
  return false;
}
template <typename Kind>
constexpr auto multiply_panels = multiply_rows<Kind>;

#endif

/// Rounded inputs of `tokens` tokens for the product with a matrix of a kind.
template <typename Kind>
RoundedInputs inputs_for(int64_t tokens, int64_t num_inputs, bool exact) {
  const bool paired = kPairs<Kind> && !in_panels<Kind>(tokens * (exact ? 2 : 1));
  return {tokens, num_inputs, exact, Kind::kScaleValues, paired};
}

/// from: [tokens of the inputs, num_inputs], of the dtype.
inline void round_all(hkv_pool *pool, int32_t dtype, const void *from, int64_t begin,
                      RoundedInputs &inputs) {
  const int64_t tokens = inputs.columns / inputs.parts;
  with_dtype(dtype, [&](auto *element) {
    const auto *first = static_cast<decltype(element)>(from) + begin * inputs.num_inputs;
    parallel_for(tokens > 4 ? pool : nullptr, tokens, [&](int64_t token, int) {
      inputs.round_token(token, first + token * inputs.num_inputs);
    });
  });
}

/// Inputs, the matrix that they are multiplied with, and the row of the outputs where they begin.
struct Product {
  PackedLayer layer;
  const RoundedInputs *inputs;
  int64_t begin;
};

/// Products with matrices of one shape, at least one.
template <typename Kind>
void multiply(hkv_pool *pool, const Product *products, int64_t count, int32_t dtype, void *out) {
  const PackedLayer &any = products->layer;
  const int64_t row_bytes = std::max<int64_t>(1, any.num_inputs / Kind::kValues * Kind::kBytes);
  const int64_t rows = std::max(kItemRows, kItemBytes / row_bytes / kItemRows * kItemRows);
  const int64_t parts = (any.num_outputs + rows - 1) / rows;
  parallel_for(pool, count * parts, [&](int64_t item, int) {
    const auto &[layer, inputs, begin] = products[item / parts];
    const auto body = in_panels<Kind>(inputs->columns) ? multiply_panels<Kind> : multiply_rows<Kind>;
    const int64_t first = item % parts * rows, last = std::min(layer.num_outputs, first + rows);
    body(layer, *inputs, {out, dtype, layer, inputs->parts, begin}, first, last);
  });
}

/// Bytes or elements of an array [count, each]; raises Invalid where no array is so large.
inline int64_t array_size(int64_t count, int64_t each) {
  int64_t size;
  require(!__builtin_mul_overflow(count, each, &size) && size <= INT64_MAX / 16,
          "sizes must be those of arrays");
  return size;
}

/// Raises Invalid unless these are sizes of `matrices` matrices and of arrays of tokens.
template <typename Kind>
void check_sizes(int64_t matrices, int64_t num_outputs, int64_t num_inputs, int64_t stride,
           int64_t tokens, int32_t dtype) {
  require(num_outputs >= 0 && num_inputs >= 0 && tokens >= 0, "sizes must be at least 0");
  require(num_inputs % Kind::kValues == 0,
          "the number of inputs must be a multiple of a block's values");
  array_size(tokens, num_inputs);
  array_size(tokens, num_outputs);
  require(stride >= array_size(num_inputs / Kind::kValues, Kind::kBytes),
          "stride must be at least the bytes of a row");
  array_size(matrices, array_size(num_outputs, stride));
  require(dtype >= HKV_F32 && dtype <= HKV_BF16,
          "dtype must be float32 (0), float16 (1) or bfloat16 (2)");
}

/// Raises Invalid where arrays of some size are missing.
inline void check_given(int64_t num_inputs, const void *weight, const void *inputs, const void *out) {
  require(out != nullptr, "out must not be NULL");
  require(num_inputs == 0 || (weight != nullptr && inputs != nullptr), "arrays must not be NULL");
}

/// The matrix whose rows begin at `weight`.
template <typename Kind>
PackedLayer layer_at(const void *weight, int64_t num_outputs, int64_t num_inputs, int64_t stride,
                     const float *bias) {
  const auto *rows = static_cast<const uint8_t *>(weight);
  const int64_t row_bytes = num_inputs / Kind::kValues * Kind::kBytes;
  const uint8_t *end = rows + (num_outputs - 1) * stride + row_bytes;
  return {rows, num_outputs, num_inputs, stride, bias, end};
}

}  // namespace hkv
