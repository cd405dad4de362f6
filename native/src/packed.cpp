// Products of packed weights with any number of tokens.
#include "hybrid_kv_packed.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "error.h"
#include "packed_panels.h"
#include "packed_rows.h"
#include "pool.h"

namespace hkv {
namespace {

// What a worker takes at a time: as many bytes of weights, in whole panels.
constexpr int64_t kItemBytes = 128 * 1024, kItemRows = 64;

struct PackedLayer {
  const uint8_t *weight;
  int64_t num_outputs, num_inputs, stride;
  const float *bias;
  const uint8_t *end;  // of the last row

  const uint8_t *row(int64_t output) const { return weight + output * stride; }
};

/// out [tokens, num_outputs]: the sums of a token's columns, and the bias.
struct Outputs {
  void *out;
  int32_t dtype;
  const PackedLayer &layer;
  int parts;

  /// Stores `count` outputs of the columns' tokens; totals: [columns, stride].
  void store(int64_t first, int64_t count, int64_t column, int64_t columns, const float *totals,
             int64_t stride) const {
    const float *bias = layer.bias == nullptr ? nullptr : layer.bias + first;
    with_dtype(dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      for (int64_t at = 0; at < columns; at += parts) {
        const float *one = totals + at * stride, *rest = one + stride;
        Element *to = static_cast<Element *>(out) + (column + at) / parts * layer.num_outputs + first;
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

template <typename Kind>
void multiply(hkv_pool *pool, const PackedLayer &layer, const RoundedInputs &inputs,
              const Outputs &outputs) {
  const int64_t row_bytes = std::max<int64_t>(1, layer.num_inputs / Kind::kValues * Kind::kBytes);
  const int64_t rows = std::max(kItemRows, kItemBytes / row_bytes / kItemRows * kItemRows);
  const auto body = in_panels<Kind>(inputs.columns) ? multiply_panels<Kind> : multiply_rows<Kind>;
  parallel_for(pool, (layer.num_outputs + rows - 1) / rows, [&](int64_t item, int) {
    const int64_t first = item * rows;
    body(layer, inputs, outputs, first, std::min(layer.num_outputs, first + rows));
  });
}

/// inputs: [tokens, num_inputs], of the dtype.
void round_inputs(hkv_pool *pool, int32_t dtype, int64_t tokens, const void *from,
                  RoundedInputs &inputs) {
  with_dtype(dtype, [&](auto *element) {
    const auto *first = static_cast<decltype(element)>(from);
    parallel_for(tokens > 4 ? pool : nullptr, tokens, [&](int64_t token, int) {
      inputs.round_token(token, first + token * inputs.num_inputs);
    });
  });
}

/// Bytes or elements of an array [count, each]; raises Invalid where no array is so large.
int64_t array_size(int64_t count, int64_t each) {
  int64_t size;
  require(!__builtin_mul_overflow(count, each, &size) && size <= INT64_MAX / 16,
          "sizes must be those of arrays");
  return size;
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_packed_linear(hkv_pool *pool, int32_t kind, int64_t num_outputs,
                                 int64_t num_inputs, const void *weight, int64_t stride,
                                 const float *bias, int32_t dtype, int64_t tokens,
                                 const void *inputs, int32_t exact, void *out) {
  return hkv::guarded([&] {
    hkv::with_kind(kind, [&](auto of) {
      using Kind = decltype(of);
      hkv::require(num_outputs >= 0 && num_inputs >= 0 && tokens >= 0, "sizes must be at least 0");
      hkv::require(num_inputs % Kind::kValues == 0,
                   "the number of inputs must be a multiple of a block's values");
      hkv::array_size(tokens, num_inputs);
      hkv::array_size(tokens, num_outputs);
      hkv::require(stride >= hkv::array_size(num_inputs / Kind::kValues, Kind::kBytes),
                   "stride must be at least the bytes of a row");
      hkv::array_size(num_outputs, stride);
      hkv::require(dtype >= HKV_F32 && dtype <= HKV_BF16,
                   "dtype must be float32 (0), float16 (1) or bfloat16 (2)");
      if (tokens == 0 || num_outputs == 0) return;
      hkv::require(out != nullptr, "out must not be NULL");
      hkv::require(num_inputs == 0 || (weight != nullptr && inputs != nullptr),
                   "arrays must not be NULL");
      const auto *rows = static_cast<const uint8_t *>(weight);
      const int64_t row_bytes = num_inputs / Kind::kValues * Kind::kBytes;
      const hkv::PackedLayer layer{rows, num_outputs, num_inputs, stride, bias,
                                   rows + (num_outputs - 1) * stride + row_bytes};
      const int64_t columns = tokens * (exact != 0 ? 2 : 1);
      hkv::RoundedInputs rounded(tokens, num_inputs, exact != 0, Kind::kScaleValues,
                                 hkv::kPairs<Kind> && !hkv::in_panels<Kind>(columns));
      hkv::round_inputs(pool, dtype, tokens, inputs, rounded);
      hkv::multiply<Kind>(pool, layer, rounded, {out, dtype, layer, rounded.parts});
    });
  });
}
