// Products of packed weights with any number of tokens.
#include "hybrid_kv_packed.h"

#include <algorithm>
#include <deque>
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

/// Tokens [begin, end) of the inputs, and the matrix that they are multiplied with.
struct Product {
  template <typename Kind>
  Product(Kind, const PackedLayer &layer, int64_t begin, int64_t end, bool exact)
      : layer(layer),
        begin(begin),
        inputs(end - begin, layer.num_inputs, exact, Kind::kScaleValues,
               kPairs<Kind> && !in_panels<Kind>((end - begin) * (exact ? 2 : 1))) {}

  /// from: [all tokens, num_inputs], of the dtype.
  void round(hkv_pool *pool, int32_t dtype, const void *from) {
    const int64_t tokens = inputs.columns / inputs.parts;
    with_dtype(dtype, [&](auto *element) {
      const auto *first = static_cast<decltype(element)>(from) + begin * inputs.num_inputs;
      parallel_for(tokens > 4 ? pool : nullptr, tokens, [&](int64_t token, int) {
        inputs.round_token(token, first + token * inputs.num_inputs);
      });
    });
  }

  const PackedLayer layer;
  const int64_t begin;
  RoundedInputs inputs;
};

/// Products with matrices of one shape.
template <typename Kind>
void multiply(hkv_pool *pool, const std::deque<Product> &products, int32_t dtype, void *out) {
  const PackedLayer &any = products.front().layer;
  const int64_t row_bytes = std::max<int64_t>(1, any.num_inputs / Kind::kValues * Kind::kBytes);
  const int64_t rows = std::max(kItemRows, kItemBytes / row_bytes / kItemRows * kItemRows);
  const int64_t parts = (any.num_outputs + rows - 1) / rows;
  parallel_for(pool, static_cast<int64_t>(products.size()) * parts, [&](int64_t item, int) {
    const auto &[layer, begin, inputs] = products[static_cast<size_t>(item / parts)];
    const auto body = in_panels<Kind>(inputs.columns) ? multiply_panels<Kind> : multiply_rows<Kind>;
    const int64_t first = item % parts * rows, last = std::min(layer.num_outputs, first + rows);
    body(layer, inputs, {out, dtype, layer, inputs.parts, begin}, first, last);
  });
}

/// Bytes or elements of an array [count, each]; raises Invalid where no array is so large.
int64_t array_size(int64_t count, int64_t each) {
  int64_t size;
  require(!__builtin_mul_overflow(count, each, &size) && size <= INT64_MAX / 16,
          "sizes must be those of arrays");
  return size;
}

/// Raises Invalid unless these are sizes of `matrices` matrices and of arrays of tokens.
template <typename Kind>
void check(int64_t matrices, int64_t num_outputs, int64_t num_inputs, int64_t stride,
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
void check_given(int64_t num_inputs, const void *weight, const void *inputs, const void *out) {
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

}  // namespace
}  // namespace hkv

extern "C" int hkv_packed_linear(hkv_pool *pool, int32_t kind, int64_t num_outputs,
                                 int64_t num_inputs, const void *weight, int64_t stride,
                                 const float *bias, int32_t dtype, int64_t tokens,
                                 const void *inputs, int32_t exact, void *out) {
  return hkv::guarded([&] {
    hkv::with_kind(kind, [&](auto of) {
      using Kind = decltype(of);
      hkv::check<Kind>(1, num_outputs, num_inputs, stride, tokens, dtype);
      if (tokens == 0 || num_outputs == 0) return;
      hkv::check_given(num_inputs, weight, inputs, out);
      std::deque<hkv::Product> products;
      products.emplace_back(of, hkv::layer_at<Kind>(weight, num_outputs, num_inputs, stride, bias),
                            0, tokens, exact != 0);
      products.front().round(pool, dtype, inputs);
      hkv::multiply<Kind>(pool, products, dtype, out);
    });
  });
}

extern "C" int hkv_packed_experts(hkv_pool *pool, int32_t kind, int64_t num_experts,
                                  int64_t num_outputs, int64_t num_inputs, const void *weight,
                                  int64_t stride, int32_t dtype, int64_t groups,
                                  const int64_t *experts, const int64_t *ends, const void *inputs,
                                  int32_t exact, void *out) {
  return hkv::guarded([&] {
    hkv::with_kind(kind, [&](auto of) {
      using Kind = decltype(of);
      hkv::require(num_experts >= 0 && groups >= 0, "sizes must be at least 0");
      hkv::require(groups == 0 || (experts != nullptr && ends != nullptr),
                   "experts and ends must not be NULL");
      hkv::check<Kind>(num_experts, num_outputs, num_inputs, stride,
                       groups == 0 ? 0 : ends[groups - 1], dtype);
      int64_t end = 0;
      for (int64_t group = 0; group < groups; ++group) {
        hkv::require(experts[group] >= 0 && experts[group] < num_experts,
                     "experts must be numbers of matrices");
        hkv::require(ends[group] > end, "ends must ascend from 1 on");
        end = ends[group];
      }
      if (groups == 0 || num_outputs == 0) return;
      hkv::check_given(num_inputs, weight, inputs, out);
      std::deque<hkv::Product> products;
      int64_t begin = 0;
      for (int64_t group = 0; group < groups; begin = ends[group++]) {
        const int64_t first = experts[group] * num_outputs * stride;
        const auto *matrix = static_cast<const uint8_t *>(weight) + first;
        const auto layer = hkv::layer_at<Kind>(matrix, num_outputs, num_inputs, stride, nullptr);
        products.emplace_back(of, layer, begin, ends[group], exact != 0);
        products.back().round(pool, dtype, inputs);
      }
      hkv::multiply<Kind>(pool, products, dtype, out);
    });
  });
}
