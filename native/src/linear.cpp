// Products of a matrix of 16-bit weights with a few tokens.
#include "hybrid_kv_linear.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "error.h"
#include "pairs.h"
#include "pool.h"

namespace hkv {
namespace {

constexpr int kPair = 2 * kLanes;      // channels that are added in one go
constexpr int kChannels = 2 * kPair;   // of one round of the loop over a row
constexpr int64_t kAhead = 8 * 1024;   // bytes between what is asked for and what is read
constexpr int64_t kItemBytes = 128 * 1024;  // of weights that a worker takes at a time

/// May ask for what lies behind the weights, which does no harm.
inline void ask_ahead(const void *from) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(from) + kAhead;
  __builtin_prefetch(reinterpret_cast<const void *>(address));
}

/// Two vectors of a row's next channels, in the order that `place` gives.
HKV_INLINE inline void load_pair(const Bfloat *from, Floats &first, Floats &second) {
  const Words words = load_words(from);
  first = (Floats)(words << 16);
  second = (Floats)(words & 0xffff0000u);
}

HKV_INLINE inline void load_pair(const Half *from, Floats &first, Floats &second) {
  first = load_floats(from);
  second = load_floats(from + kLanes);
}

/// Where `load_pair` puts a channel: of 16-bit words that are widened where they lie, even ones come
/// first.
inline int64_t place(const Bfloat *, int64_t channel) {
  const int64_t in_pair = channel % kPair;
  return channel - in_pair + in_pair / 2 + in_pair % 2 * kLanes;
}
inline int64_t place(const Half *, int64_t channel) { return channel; }

inline float sum_lanes(Floats lanes) {
  float sum = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) sum += lanes[lane];
  return sum;
}

/// One row's products with `Tokens` rows of inputs, each `padded` floats; sums[t] is added to.
template <typename Element, int Tokens>
HKV_INLINE inline void add_row(const Element *row, const float *inputs, int64_t padded,
                               int64_t channels, float *sums) {
  // A lone token needs four chains of additions to keep up with memory.
  constexpr int kChains = Tokens == 1 ? 4 : 2;
  Floats parts[Tokens][kChains] = {};
  for (int64_t at = 0; at < channels; at += kChannels) {
    for (int64_t line = 0; line < kChannels; line += 32)
      ask_ahead(row + at + line);
    Floats weights[4];
    load_pair(row + at, weights[0], weights[1]);
    load_pair(row + at + kPair, weights[2], weights[3]);
    for (int token = 0; token < Tokens; ++token)
      for (int i = 0; i < 4; ++i)
        parts[token][i % kChains] +=
            weights[i] * load_floats(inputs + token * padded + at + i * kLanes);
  }
  for (int token = 0; token < Tokens; ++token) {
    for (int i = 1; i < kChains; ++i) parts[token][0] += parts[token][i];
    sums[token] += sum_lanes(parts[token][0]);
  }
}

#if HKV_HAS_PAIRS

/// As `add_row`, with instructions that multiply and add pairs of 16-bit floats: fewer of them
/// leave room for reads. inputs: [Tokens, padded] in 16 bits.
template <int Tokens>
__attribute__((target("avx512bf16"))) inline void add_row_of_pairs(const Bfloat *row,
                                                                   const Bfloat *inputs,
                                                                   int64_t padded, int64_t channels,
                                                                   float *sums) {
  const auto load = [](const Bfloat *from) __attribute__((target("avx512bf16"), always_inline)) {
    return (__m512bh)_mm512_loadu_si512(from);
  };
  __m512 parts[Tokens][2];
  for (int token = 0; token < Tokens; ++token)
    parts[token][0] = parts[token][1] = _mm512_setzero_ps();
  for (int64_t at = 0; at < channels; at += kChannels)
    for (int half = 0; half < 2; ++half) {
      const Bfloat *from = row + at + half * kPair;
      ask_ahead(from);
      const __m512bh weights = load(from);
      for (int token = 0; token < Tokens; ++token)
        parts[token][half] =
            _mm512_dpbf16_ps(parts[token][half], weights,
                             load(inputs + token * padded + at + half * kPair));
    }
  for (int token = 0; token < Tokens; ++token)
    sums[token] += sum_lanes((Floats)parts[token][0] + (Floats)parts[token][1]);
}

#endif

/// Inputs of all tokens, padded with zeros: as floats in the order of `load_pair`, and, where pairs
/// are multiplied, as they came.
template <typename Element>
struct Inputs {
  int64_t padded;
  bool as_pairs = false;
  std::vector<float> floats;
  std::vector<Element> pairs;

  void prepare(const Element *inputs, int64_t tokens, int64_t channels) {
    padded = (channels + kChannels - 1) / kChannels * kChannels;
    as_pairs = std::is_same_v<Element, Bfloat> && has_pairs();
    if (as_pairs) {
      pairs.assign(static_cast<size_t>(tokens * padded), Element{0});
      for (int64_t token = 0; token < tokens; ++token)
        std::copy_n(inputs + token * channels, channels, pairs.data() + token * padded);
      return;
    }
    floats.assign(static_cast<size_t>(tokens * padded), 0.0f);
    for (int64_t token = 0; token < tokens; ++token)
      for (int64_t channel = 0; channel < channels; ++channel)
        floats[static_cast<size_t>(token * padded + place(inputs, channel))] =
            to_float(inputs[token * channels + channel]);
  }

  /// Adds the products of `count` channels from `first` on, whole rounds of the loop.
  template <int Tokens>
  HKV_INLINE void add(const Element *row, int64_t first, int64_t count, float *sums) const {
#if HKV_HAS_PAIRS
    if constexpr (std::is_same_v<Element, Bfloat>)
      if (as_pairs)
        return add_row_of_pairs<Tokens>(row, pairs.data() + first, padded, count, sums);
#endif
    add_row<Element, Tokens>(row, floats.data() + first, padded, count, sums);
  }
};

template <typename Element>
struct Layer {
  const Element *weight, *bias;
  int64_t num_outputs, num_inputs, stride;
  Element *out;

  /// Rows [first, last) with all tokens.
  template <int Tokens>
  void multiply(const Inputs<Element> &inputs, int64_t first, int64_t last) const {
    const int64_t whole = num_inputs / kChannels * kChannels, rest = num_inputs - whole;
    for (int64_t output = first; output < last; ++output) {
      const Element *row = weight + output * stride;
      float sums[Tokens] = {};
      inputs.template add<Tokens>(row, 0, whole, sums);
      if (rest > 0) {
        Element end[kChannels] = {};
        std::copy_n(row + whole, rest, end);
        inputs.template add<Tokens>(end, whole, kChannels, sums);
      }
      for (int token = 0; token < Tokens; ++token)
        round_to(bias == nullptr ? sums[token] : sums[token] + to_float(bias[output]),
                 out[token * num_outputs + output]);
    }
  }

  void multiply(const Inputs<Element> &inputs, int64_t tokens, int64_t first, int64_t last) const {
    switch (tokens) {
      case 1: return multiply<1>(inputs, first, last);
      case 2: return multiply<2>(inputs, first, last);
      case 3: return multiply<3>(inputs, first, last);
      case 4: return multiply<4>(inputs, first, last);
      case 5: return multiply<5>(inputs, first, last);
      case 6: return multiply<6>(inputs, first, last);
      case 7: return multiply<7>(inputs, first, last);
      default: return multiply<8>(inputs, first, last);
    }
  }
};

template <typename Element>
void run(hkv_pool *pool, const Layer<Element> &layer, int64_t tokens, const Element *inputs) {
  thread_local Inputs<Element> own;
  own.prepare(inputs, tokens, layer.num_inputs);
  const Inputs<Element> &shared = own;
  const int64_t row_bytes = std::max<int64_t>(1, layer.num_inputs * sizeof(Element));
  const int64_t rows = std::max<int64_t>(1, kItemBytes / row_bytes);
  parallel_for(pool, (layer.num_outputs + rows - 1) / rows, [&](int64_t item, int) {
    const int64_t first = item * rows;
    layer.multiply(shared, tokens, first, std::min(layer.num_outputs, first + rows));
  });
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_linear(hkv_pool *pool, int32_t dtype, int64_t num_outputs, int64_t num_inputs,
                          const void *weight, int64_t stride, const void *bias, int64_t tokens,
                          const void *inputs, void *out) {
  return hkv::guarded([&] {
    hkv::require(dtype == HKV_F16 || dtype == HKV_BF16,
                 "dtype must be float16 (1) or bfloat16 (2)");
    hkv::require(tokens >= 0 && tokens <= HKV_LINEAR_TOKENS, "tokens must be 0 to 8");
    hkv::require(num_outputs >= 0 && num_inputs >= 0, "sizes must be at least 0");
    hkv::require(stride >= num_inputs, "stride must be at least the number of inputs");
    if (tokens == 0 || num_outputs == 0) return;
    hkv::require(out != nullptr, "out must not be NULL");
    hkv::require(num_inputs == 0 || (weight != nullptr && inputs != nullptr),
                 "arrays must not be NULL");
    hkv::with_dtype(dtype, [&](auto *element) {
      using Pointer = decltype(element);
      using Element = std::remove_const_t<std::remove_pointer_t<Pointer>>;
      if constexpr (!std::is_same_v<Element, float>)
        hkv::run<Element>(pool,
                          {static_cast<Pointer>(weight), static_cast<Pointer>(bias), num_outputs,
                           num_inputs, stride, static_cast<Element *>(out)},
                          tokens, static_cast<Pointer>(inputs));
    });
  });
}
