// Products of packed weights with any number of tokens, of one matrix or several.
#pragma once

#include <algorithm>
#include <type_traits>
#include <variant>
#include <vector>

#include "error.h"
#include "packed_panels.h"
#include "packed_rows.h"
#include "packed_tiles.h"
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

/// From so many tokens on tiles are faster than panels on a Xeon with AMX (4,096 squared, one thread): 1.1
/// to 1.3 times, Q5_0 and Q5_K 1.0; with 64 tokens 1.1 to 1.5 times, with 32 .7 to 1.2. Passes over drafts
/// have fewer.
constexpr int64_t kMinTileTokens = 48;
/// Sums of so many rows and tiles of tokens stay in the level-2 cache beside the inputs of a chunk.
constexpr int64_t kBlockRows = 256, kBlockTiles = 32;

/// Whether a product is made in tiles of bfloat16.
inline bool in_tiles(int64_t tokens, int64_t num_inputs, bool exact) {
  return !exact && tokens >= kMinTileTokens && num_inputs > 0 && has_amx();
}

#if HKV_HAS_AMX

/// As `multiply_rows`, in tiles.
template <typename Kind>
void multiply_tiles(const PackedLayer &layer, const TileInputs &inputs, const Outputs &outputs,
                    int64_t first, int64_t last) {
  constexpr int64_t kBytes = kChunkBytes<Kind>;
  const int64_t panels = (last - first + kHeight - 1) / kHeight;
  // For each block of tokens weights are decoded anew: rather a block half as long again than one more.
  const int64_t blocks = std::max<int64_t>(1, (inputs.tiles + kBlockTiles / 2) / kBlockTiles);
  const int64_t block = (inputs.tiles + 2 * blocks - 1) / (2 * blocks) * 2;
  const LineArray<float> sums(static_cast<size_t>(panels * block * kPanelWords));
  const auto sums_at = [&](int64_t panel, int64_t tile) {
    return sums.data() + (panel * block + tile) * kPanelWords;
  };
  DecodedChunk decoded;
  alignas(64) float totals[kTileTokens][kHeight];
  [[maybe_unused]] const AmxTiles tiles;
  for (int64_t begin = 0; begin < inputs.tiles; begin += block) {
    const int64_t end = std::min(inputs.tiles, begin + block);
    for (int64_t at = 0; at < inputs.chunks * panels; ++at) {
      const int64_t chunk = at / panels, panel = at % panels, next = at + 1;
      const int64_t row = first + panel * kHeight, steps = inputs.steps_of(chunk);
      decoded.decode<Kind>(layer.row(row) + chunk * kBytes, layer.stride, std::min(kHeight, last - row), steps);
      GradualPrefetch prefetch(layer.row(first),
                               next % panels * kHeight * layer.stride + next / panels * kBytes, kBytes,
                               steps * ((end - begin + 1) / 2), kHeight, layer.stride);
      add_chunk(decoded, inputs, chunk, begin, end, prefetch, sums_at(panel, 0));
    }
    for (int64_t tile = begin; tile < end; ++tile)
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t token = tile * kTileTokens, row = first + panel * kHeight;
        for (int64_t i = 0; i < kHeightTiles; ++i)
          transpose_tile(sums_at(panel, tile - begin) + i * kTileWords, &totals[0][i * kAmxRows], kHeight);
        outputs.store(row, std::min(kHeight, last - row), token,
                      std::min(kTileTokens, inputs.tokens - token), &totals[0][0], kHeight);
      }
  }
}

#else

template <typename Kind>
void multiply_tiles(const PackedLayer &, const TileInputs &, const Outputs &, int64_t, int64_t) {}

#endif

/// Inputs as a product takes them.
using ProductInputs = std::variant<RoundedInputs, TileInputs>;

/// Room for inputs of `tokens` tokens for the product with a matrix of a kind.
template <typename Kind>
ProductInputs inputs_for(int64_t tokens, int64_t num_inputs, bool exact) {
  if (in_tiles(tokens, num_inputs, exact)) return TileInputs(tokens, num_inputs);
  const bool paired = kPairs<Kind> && !in_panels<Kind>(tokens * (exact ? 2 : 1));
  return RoundedInputs(tokens, num_inputs, exact, Kind::kScaleValues, paired);
}

/// from: [tokens of the inputs, num_inputs], of the dtype.
inline void round_all(hkv_pool *pool, int32_t dtype, const void *from, int64_t begin,
                      ProductInputs &inputs) {
  with_dtype(dtype, [&](auto *element) {
    const auto *all = static_cast<decltype(element)>(from);
    if (auto *tiles = std::get_if<TileInputs>(&inputs)) {
      parallel_for(pool, tiles->tiles, [&](int64_t tile, int) {
        tiles->round_tile(tile, all + begin * tiles->num_inputs);
      });
      return;
    }
    auto &rounded = std::get<RoundedInputs>(inputs);
    const int64_t tokens = rounded.columns / rounded.parts;
    parallel_for(tokens > 4 ? pool : nullptr, tokens, [&](int64_t token, int) {
      rounded.round_token(token, all + (begin + token) * rounded.num_inputs);
    });
  });
}

/// Inputs, the matrix that they are multiplied with, and the row of the outputs where they begin.
struct Product {
  PackedLayer layer;
  const ProductInputs *inputs;
  int64_t begin;
};

/// Rows of a matrix that a worker takes at a time.
template <typename Kind>
int64_t item_rows(const hkv_pool *pool, const Product *products, int64_t count) {
  const PackedLayer &any = products->layer;
  const bool tiles = std::any_of(products, products + count, [](const Product &product) {
    return std::holds_alternative<TileInputs>(*product.inputs);
  });
  if (!tiles) {
    const int64_t row_bytes = std::max<int64_t>(1, any.num_inputs / Kind::kValues * Kind::kBytes);
    return std::max(kItemRows, kItemBytes / row_bytes / kItemRows * kItemRows);
  }
  const int64_t items = pool == nullptr ? 1 : 4 * pool->threads();
  int64_t rows = kBlockRows;
  while (rows > kItemRows && count * ((any.num_outputs + rows - 1) / rows) < items) rows /= 2;
  return rows;
}

/// Products with matrices of one shape, at least one.
template <typename Kind>
void multiply(hkv_pool *pool, const Product *products, int64_t count, int32_t dtype, void *out) {
  const int64_t rows = item_rows<Kind>(pool, products, count);
  const int64_t parts = (products->layer.num_outputs + rows - 1) / rows;
  parallel_for(pool, count * parts, [&](int64_t item, int) {
    const auto &[layer, inputs, begin] = products[item / parts];
    const int64_t first = item % parts * rows, last = std::min(layer.num_outputs, first + rows);
    if (const auto *tiles = std::get_if<TileInputs>(inputs))
      return multiply_tiles<Kind>(layer, *tiles, {out, dtype, layer, 1, begin}, first, last);
    const auto &rounded = std::get<RoundedInputs>(*inputs);
    const auto body = in_panels<Kind>(rounded.columns) ? multiply_panels<Kind> : multiply_rows<Kind>;
    body(layer, rounded, {out, dtype, layer, rounded.parts, begin}, first, last);
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
