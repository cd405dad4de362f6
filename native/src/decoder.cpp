// A decoder layer around its attention.
#include "hybrid_kv_decoder.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "error.h"
#include "softmax.h"

namespace hkv {
namespace {

/// Goes on where a product was made, and passes on why it was not.
void require_done(int status) {
  if (status == HKV_OK) return;
  if (status == HKV_NO_MEMORY) throw std::bad_alloc();
  if (status == HKV_INVALID) throw Invalid(hkv_last_error());
  throw std::runtime_error(hkv_last_error());
}

/// Memory of one thread for what lies between the products of a call.
template <typename Element>
struct Scratch {
  std::vector<Element> normed, gate, up, sum;
  std::vector<float> floats;
};

/// Of the first `dim` channels of heads; cosines, sines: [tokens, dim].
template <typename Element>
struct Rotation {
  int64_t dim;
  const Element *cosines, *sines;
};

template <typename Element>
class Decoder {
 public:
  Decoder(hkv_pool *pool, const hkv_decoder &layer, int64_t tokens)
      : pool_(pool), layer_(layer), tokens_(tokens) {}

  void inputs(const Element *hidden, const Rotation<Element> &by, Element *queries, Element *keys,
              Element *values) {
    const int64_t width = layer_.query.num_inputs;
    grow(own().normed, tokens_ * width);
    norm(layer_.before_attention, hidden, tokens_, width, own().normed.data());
    multiply(layer_.query, own().normed.data(), queries);
    multiply(layer_.key, own().normed.data(), keys);
    multiply(layer_.value, own().normed.data(), values);
    rotate(layer_.of_queries, layer_.query.num_outputs, by, queries);
    rotate(layer_.of_keys, layer_.key.num_outputs, by, keys);
  }

  void outputs(const Element *hidden, const Element *attended, Element *out) {
    const int64_t width = layer_.output.num_outputs, inner = layer_.gate.num_outputs;
    if (inner == 0) {
      multiply(layer_.output, attended, out);
      add(layer_.after_attention, hidden, width, out);
      return;
    }
    Scratch<Element> &mine = own();
    grow(mine.sum, tokens_ * width);
    grow(mine.normed, tokens_ * width);
    grow(mine.gate, tokens_ * inner);
    grow(mine.up, tokens_ * inner);
    multiply(layer_.output, attended, mine.sum.data());
    add(layer_.after_attention, hidden, width, mine.sum.data());
    norm(layer_.before_feed_forward, mine.sum.data(), tokens_, width, mine.normed.data());
    multiply(layer_.gate, mine.normed.data(), mine.gate.data());
    multiply(layer_.up, mine.normed.data(), mine.up.data());
    gate(layer_.activation, mine.up.data(), tokens_ * inner, mine.gate.data(), mine.floats);
    multiply(layer_.down, mine.gate.data(), out);
    add(layer_.after_feed_forward, mine.sum.data(), width, out);
  }

 private:
  static Scratch<Element> &own() {
    thread_local Scratch<Element> scratch;
    return scratch;
  }

  void multiply(const hkv_matrix &by, const Element *from, Element *to) const {
    if (by.kind == 0) {
      require_done(hkv_linear(pool_, layer_.dtype, by.num_outputs, by.num_inputs, by.weight,
                              by.stride, by.bias, tokens_, from, to));
      return;
    }
    const float *bias = nullptr;
    if (by.bias != nullptr) {
      grow(own().floats, by.num_outputs);
      convert(static_cast<const Element *>(by.bias), by.num_outputs, own().floats.data());
      bias = own().floats.data();
    }
    require_done(hkv_packed_linear(pool_, by.kind, by.num_outputs, by.num_inputs, by.weight,
                                   by.stride, bias, layer_.dtype, tokens_, from, by.exact, to));
  }

  /// Rows [count, width], each by itself; `to` may be `from`.
  void norm(const hkv_norm &by, const Element *from, int64_t count, int64_t width, Element *to) const {
    const auto *weight = static_cast<const Element *>(by.weight);
    std::vector<float> &row = own().floats;
    grow(row, in_vectors(width));
    for (int64_t at = 0; at < count; ++at, from += width, to += width) {
      std::fill(row.begin() + width, row.begin() + in_vectors(width), 0.0f);
      convert(from, width, row.data());
      Floats squares{};
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats some = load_floats(row.data() + i);
        squares += some * some;
      }
      float sum = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += squares[lane];
      const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + by.epsilon);
      for (int64_t i = 0; i < width; ++i) {
        const float one = row[static_cast<size_t>(i)] * scale, by_weight = to_float(weight[i]);
        const float value = by.form == HKV_NORM ? as<Element>(one) : one;
        round_to(value * (by.form == HKV_NORM_CENTRED ? 1.0f + by_weight : by_weight), to[i]);
      }
    }
  }

  /// Norms and rotates the heads of rows [tokens, width]; channel i and the one half a rotation behind it
  /// are a pair.
  void rotate(const hkv_norm &norms, int64_t width, Rotation<Element> by, Element *heads) const {
    const int64_t dim = layer_.head_dim, half = by.dim / 2;
    if (norms.weight != nullptr) norm(norms, heads, tokens_ * width / dim, dim, heads);
    if (half == 0) return;
    for (int64_t token = 0; token < tokens_; ++token, by.cosines += by.dim, by.sines += by.dim)
      for (int64_t head = 0; head < width / dim; ++head, heads += dim)
        for (int64_t i = 0; i < half; ++i) {
          const float low = to_float(heads[i]), high = to_float(heads[i + half]);
          round_to(product(low, by.cosines[i]) + product(-high, by.sines[i]), heads[i]);
          round_to(product(high, by.cosines[i + half]) + product(low, by.sines[i + half]),
                   heads[i + half]);
        }
  }

  static float product(float value, Element by) { return as<Element>(value * to_float(by)); }

  /// Rows [tokens, width] become hidden + residual_scale * norm(rows).
  void add(const hkv_norm &by, const Element *hidden, int64_t width, Element *rows) const {
    if (by.weight != nullptr) norm(by, rows, tokens_, width, rows);
    const float scale = layer_.residual_scale;
    for (int64_t i = 0; i < tokens_ * width; ++i)
      round_to(to_float(hidden[i]) + as<Element>(to_float(rows[i]) * scale), rows[i]);
  }

  hkv_pool *pool_;
  const hkv_decoder &layer_;
  int64_t tokens_;
};

void check_norm(const hkv_norm &norm, bool must) {
  require(norm.weight != nullptr || !must, "norms before attention and feed-forward must not be NULL");
  require(norm.epsilon >= 0.0f, "epsilon must be at least 0");
  require(norm.form >= HKV_NORM && norm.form <= HKV_NORM_CENTRED, "form of a norm must be 0 to 2");
}

/// Sizes that fit together; products check the rest.
void check(const hkv_decoder &layer, int64_t tokens) {
  require(tokens >= 0 && tokens <= HKV_LINEAR_TOKENS, "tokens must be 0 to 8");
  const int64_t dim = layer.head_dim, hidden = layer.query.num_inputs, inner = layer.gate.num_outputs;
  require(dim >= 2 && dim % 2 == 0, "head_dim must be even and at least 2");
  require(hidden >= 1 && inner >= 0, "sizes must be at least 1");
  for (const hkv_matrix *one : {&layer.query, &layer.key, &layer.value})
    require(one->num_inputs == hidden && one->num_outputs >= dim && one->num_outputs % dim == 0,
            "queries, keys and values must be whole heads of the hidden states");
  require(layer.output.num_inputs == layer.query.num_outputs && layer.output.num_outputs == hidden,
          "matrices must fit together");
  const bool feeds = inner != 0;
  require(layer.up.num_outputs == inner && layer.down.num_inputs == inner &&
              layer.gate.num_inputs == (feeds ? hidden : 0) && layer.up.num_inputs == (feeds ? hidden : 0) &&
              layer.down.num_outputs == (feeds ? hidden : 0),
          "matrices must fit together");
  for (const hkv_matrix *one : {&layer.query, &layer.key, &layer.value, &layer.output, &layer.gate,
                                &layer.up, &layer.down})
    require(one->kind != 0 || one->num_outputs == 0 || layer.dtype != HKV_F32,
            "plain matrices must have a dtype of 16 bits");
  check_activation(layer.activation);
  require(layer.residual_scale != 0.0f, "residual_scale must not be 0");
  check_norm(layer.before_attention, true);
  check_norm(layer.before_feed_forward, feeds);
  for (const hkv_norm *one : {&layer.of_queries, &layer.of_keys, &layer.after_attention,
                              &layer.after_feed_forward})
    check_norm(*one, false);
}

/// Calls body with the work of a layer and a null pointer of its element type.
template <typename Body>
int with_decoder(hkv_pool *pool, const hkv_decoder *layer, int64_t tokens, Body &&body) {
  return guarded([&] {
    require(layer != nullptr, "layer must not be NULL");
    check(*layer, tokens);
    with_dtype(layer->dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      if (tokens > 0) body(Decoder<Element>(pool, *layer, tokens), element);
    });
  });
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_decoder_inputs(hkv_pool *pool, const hkv_decoder *layer, int64_t tokens,
                                  const void *hidden, int64_t rotary_dim, const void *cosines,
                                  const void *sines, void *queries, void *keys, void *values) {
  return hkv::with_decoder(pool, layer, tokens, [&](auto decoder, auto *element) {
    using Pointer = decltype(element);
    using Element = std::remove_const_t<std::remove_pointer_t<Pointer>>;
    hkv::require(rotary_dim >= 0 && rotary_dim <= layer->head_dim && rotary_dim % 2 == 0,
                 "rotary_dim must be even, and 0 to head_dim");
    hkv::require(hidden != nullptr && queries != nullptr && keys != nullptr && values != nullptr &&
                     (rotary_dim == 0 || (cosines != nullptr && sines != nullptr)),
                 "arrays must not be NULL");
    const hkv::Rotation<Element> by{rotary_dim, static_cast<Pointer>(cosines),
                                    static_cast<Pointer>(sines)};
    decoder.inputs(static_cast<Pointer>(hidden), by, static_cast<Element *>(queries),
                   static_cast<Element *>(keys), static_cast<Element *>(values));
  });
}

extern "C" int hkv_decoder_outputs(hkv_pool *pool, const hkv_decoder *layer, int64_t tokens,
                                   const void *hidden, const void *attended, void *out) {
  return hkv::with_decoder(pool, layer, tokens, [&](auto decoder, auto *element) {
    using Pointer = decltype(element);
    using Out = std::remove_const_t<std::remove_pointer_t<Pointer>> *;
    hkv::require(hidden != nullptr && attended != nullptr && out != nullptr, "arrays must not be NULL");
    decoder.outputs(static_cast<Pointer>(hidden), static_cast<Pointer>(attended),
                    static_cast<Out>(out));
  });
}
