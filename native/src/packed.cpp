// Products of packed weights with any number of tokens.
#include "hybrid_kv_packed.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "error.h"
#include "packed_rows.h"
#include "pool.h"

namespace hkv {
namespace {

constexpr int64_t kItemBytes = 128 * 1024;  // of weights that a worker takes at a time

struct PackedLayer {
  const uint8_t *weight;
  int64_t num_outputs, num_inputs, stride;
  const float *bias;

  const uint8_t *row(int64_t output) const { return weight + output * stride; }
};

/// out [tokens, num_outputs]: the sum of a token's columns, and the bias.
template <typename Element>
struct Outputs {
  Element *out;
  const PackedLayer &layer;
  int64_t tokens;
  int parts;

  /// totals: of one output, a column every `stride` floats.
  void store(int64_t output, const float *totals, int64_t stride) const {
    for (int64_t token = 0; token < tokens; ++token) {
      float sum = totals[token * parts * stride];
      if (parts == 2) sum += totals[(token * parts + 1) * stride];
      round_to(layer.bias == nullptr ? sum : sum + layer.bias[output],
               out[token * layer.num_outputs + output]);
    }
  }
};

template <typename Kind, typename Element>
void multiply(hkv_pool *pool, const PackedLayer &layer, int64_t tokens, const Element *from,
              bool exact, Element *out) {
  RoundedInputs inputs(tokens, layer.num_inputs, exact, Kind::kScaleValues);
  parallel_for(tokens > 4 ? pool : nullptr, tokens, [&](int64_t token, int) {
    inputs.round_token(token, from + token * layer.num_inputs);
  });
  const Outputs<Element> outputs{out, layer, tokens, inputs.parts};
  const int64_t row_bytes = std::max<int64_t>(1, layer.num_inputs / Kind::kValues * Kind::kBytes);
  const int64_t rows = std::max<int64_t>(1, kItemBytes / row_bytes);
  parallel_for(pool, (layer.num_outputs + rows - 1) / rows, [&](int64_t item, int) {
    std::vector<float> totals(static_cast<size_t>(inputs.columns));
    const int64_t first = item * rows;
    for (int64_t output = first; output < std::min(layer.num_outputs, first + rows); ++output) {
      std::fill(totals.begin(), totals.end(), 0.0f);
      add_row_portable<Kind>(layer.row(output), inputs, totals.data());
      outputs.store(output, totals.data(), 1);
    }
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
      hkv::with_dtype(dtype, [&](auto *element) {
        using Pointer = decltype(element);
        using Element = std::remove_const_t<std::remove_pointer_t<Pointer>>;
        if (tokens == 0 || num_outputs == 0) return;
        hkv::require(out != nullptr, "out must not be NULL");
        hkv::require(num_inputs == 0 || (weight != nullptr && inputs != nullptr),
                     "arrays must not be NULL");
        hkv::multiply<Kind, Element>(
            pool,
            {static_cast<const uint8_t *>(weight), num_outputs, num_inputs, stride, bias}, tokens,
            static_cast<Pointer>(inputs), exact != 0, static_cast<Element *>(out));
      });
    });
  });
}
