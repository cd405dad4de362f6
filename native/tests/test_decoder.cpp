// A decoder layer around its attention, against the same in double.
#include <cmath>

#include "arrays.h"
#include "hybrid_kv_decoder.h"

namespace {

constexpr int32_t kDim = 6, kHidden = 37, kInner = 53, kQueries = 4 * kDim, kKeys = 2 * kDim;
constexpr float kEpsilon = 0.01f, kResidual = 0.7f;

/// A layer of random weights, and what it makes of a token.
struct Layer {
  Rows query, key, value, output, gate, up, down, bias, first, second, of_heads, third, fourth;

  explicit Layer(int32_t dtype)
      : query(weights(kQueries, 1), kHidden, dtype, 3),
        key(weights(kKeys, 2), kHidden, dtype),
        value(weights(kKeys, 3), kHidden, dtype),
        output(random_floats(kHidden * kQueries, 4), kQueries, dtype),
        gate(weights(kInner, 5), kHidden, dtype),
        up(weights(kInner, 6), kHidden, dtype),
        down(random_floats(kHidden * kInner, 7), kInner, dtype),
        bias(random_floats(kQueries, 8), 1, dtype),
        first(random_floats(kHidden, 9), kHidden, dtype),
        second(random_floats(kHidden, 10), kHidden, dtype),
        of_heads(random_floats(kDim, 11), kDim, dtype),
        third(random_floats(kHidden, 16), kHidden, dtype),
        fourth(random_floats(kHidden, 17), kHidden, dtype) {}

  static std::vector<float> weights(int64_t outputs, uint64_t seed) {
    return random_floats(outputs * kHidden, seed);
  }

  static hkv_matrix matrix(const Rows &rows, int64_t outputs, int64_t inputs,
                           const void *bias = nullptr) {
    return {0, 0, outputs, inputs, rows.keys().stride, rows.keys().data, bias};
  }

  /// As Llama's, but that queries have norms and keys have none; or as Gemma's, with residuals scaled.
  hkv_decoder described(int32_t dtype, bool gemma = false) const {
    const int32_t centred = gemma ? HKV_NORM_CENTRED : HKV_NORM;
    const auto norm = [&](const Rows &rows) { return hkv_norm{rows.keys().data, kEpsilon, centred}; };
    return {dtype, kDim, gemma ? HKV_GELU_TANH : HKV_SILU, gemma ? kResidual : 1.0f,
            norm(first), norm(of_heads), {}, gemma ? norm(third) : hkv_norm{},
            norm(second), gemma ? norm(fourth) : hkv_norm{},
            matrix(query, kQueries, kHidden, bias.keys().data), matrix(key, kKeys, kHidden),
            matrix(value, kKeys, kHidden), matrix(output, kHidden, kQueries),
            matrix(gate, kInner, kHidden), matrix(up, kInner, kHidden),
            matrix(down, kHidden, kInner)};
  }
};

std::vector<double> normed(const std::vector<double> &x, const Rows &weight, bool gemma) {
  double squares = 0;
  for (const double one : x) squares += one * one;
  const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + double{kEpsilon});
  std::vector<double> out;
  for (size_t i = 0; i < x.size(); ++i)
    out.push_back(x[i] * scale *
                  (static_cast<double>(weight.at(0, static_cast<int32_t>(i))) + (gemma ? 1 : 0)));
  return out;
}

std::vector<double> product(const Rows &weight, int64_t outputs, const std::vector<double> &x) {
  std::vector<double> out;
  for (int64_t row = 0; row < outputs; ++row) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i)
      sum += static_cast<double>(weight.at(row, static_cast<int32_t>(i))) * x[i];
    out.push_back(sum);
  }
  return out;
}

float found(const std::vector<uint16_t> &out, int64_t at, int32_t dtype) {
  const uint16_t bits = out[static_cast<size_t>(at)];
  if (dtype == HKV_F16) return Rows::float_of(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

/// Near where values are rounded some times on the way.
void check_near(const std::vector<uint16_t> &out, int64_t first, int32_t dtype,
                const std::vector<double> &wanted) {
  double squares = 0;
  for (const double one : wanted) squares += one * one;
  const double rms = std::sqrt(squares / static_cast<double>(wanted.size()));
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double value = static_cast<double>(found(out, first + static_cast<int64_t>(i), dtype));
    CHECK(std::fabs(value - wanted[i]) <= (dtype == HKV_F16 ? 0.01 : 0.08) * rms);
  }
}

std::vector<double> row(const Rows &rows, int64_t at, int32_t size) {
  std::vector<double> out;
  for (int32_t i = 0; i < size; ++i) out.push_back(static_cast<double>(rows.at(at, i)));
  return out;
}

/// Heads of a token, normed where there is a norm, of which the first channels are turned.
std::vector<double> turned(std::vector<double> heads, const Rows *norm, const Rows &cosines,
                           const Rows &sines, int32_t rotary_dim, int64_t token, bool gemma) {
  for (size_t head = 0; head < heads.size(); head += kDim) {
    std::vector<double> one(heads.begin() + static_cast<long>(head),
                            heads.begin() + static_cast<long>(head) + kDim);
    if (norm != nullptr) one = normed(one, *norm, gemma);
    for (int32_t i = 0; i < kDim; ++i) heads[head + static_cast<size_t>(i)] = one[static_cast<size_t>(i)];
    for (int32_t i = 0, half = rotary_dim / 2; i < rotary_dim; ++i) {
      const double pair =
          i < half ? -one[static_cast<size_t>(i + half)] : one[static_cast<size_t>(i - half)];
      heads[head + static_cast<size_t>(i)] =
          one[static_cast<size_t>(i)] * static_cast<double>(cosines.at(token, i)) +
          pair * static_cast<double>(sines.at(token, i));
    }
  }
  return heads;
}

void add(std::vector<double> &x, std::vector<double> other, const Rows &norm, bool gemma) {
  if (gemma) other = normed(other, norm, gemma);
  for (size_t i = 0; i < x.size(); ++i) x[i] += other[i] * (gemma ? double{kResidual} : 1);
}

void check_layer(int32_t dtype, int64_t tokens, bool gemma = false, int32_t rotary_dim = kDim,
                 hkv_pool *pool = nullptr) {
  const Layer layer(dtype);
  const hkv_decoder described = layer.described(dtype, gemma);
  const Rows hidden(random_floats(tokens * kHidden, 12), kHidden, dtype);
  const Rows attended(random_floats(tokens * kQueries, 13), kQueries, dtype);
  const int32_t width = rotary_dim == 0 ? 1 : rotary_dim;
  const Rows cosines(random_floats(tokens * width, 14), width, dtype);
  const Rows sines(random_floats(tokens * width, 15), width, dtype);
  std::vector<uint16_t> q(static_cast<size_t>(tokens * kQueries)),
      k(static_cast<size_t>(tokens * kKeys)), v(k.size()),
      out(static_cast<size_t>(tokens * kHidden));
  CHECK_OK(hkv_decoder_inputs(pool, &described, tokens, hidden.keys().data, rotary_dim,
                              cosines.keys().data, sines.keys().data, q.data(), k.data(),
                              v.data()));
  CHECK_OK(hkv_decoder_outputs(pool, &described, tokens, hidden.keys().data, attended.keys().data,
                               out.data()));
  for (int64_t token = 0; token < tokens; ++token) {
    std::vector<double> x = row(hidden, token, kHidden);
    const std::vector<double> in = normed(x, layer.first, gemma);
    std::vector<double> queries = product(layer.query, kQueries, in);
    for (int32_t i = 0; i < kQueries; ++i)
      queries[static_cast<size_t>(i)] += static_cast<double>(layer.bias.at(i, 0));
    check_near(q, token * kQueries, dtype, 
               turned(queries, &layer.of_heads, cosines, sines, rotary_dim, token, gemma));
    check_near(k, token * kKeys, dtype,
               turned(product(layer.key, kKeys, in), nullptr, cosines, sines, rotary_dim, token, gemma));
    check_near(v, token * kKeys, dtype, product(layer.value, kKeys, in));
    add(x, product(layer.output, kHidden, row(attended, token, kQueries)), layer.third, gemma);
    const std::vector<double> inner = normed(x, layer.second, gemma);
    std::vector<double> gate = product(layer.gate, kInner, inner);
    const std::vector<double> up = product(layer.up, kInner, inner);
    for (size_t i = 0; i < gate.size(); ++i) {
      const double z = gate[i], root = std::sqrt(2 / std::acos(-1.0));
      gate[i] = up[i] * (gemma ? z / 2 * (1 + std::tanh(root * (z + 0.044715 * z * z * z)))
                               : z / (1 + std::exp(-z)));
    }
    add(x, product(layer.down, kHidden, gate), layer.fourth, gemma);
    check_near(out, token * kHidden, dtype, x);
  }
}

}  // namespace

CLAIM(a_decoder_layer_is_its_operations_one_after_the_other) {
  for (const int32_t dtype : {HKV_F16, HKV_BF16})
    for (int64_t tokens = 0; tokens <= HKV_LINEAR_TOKENS; ++tokens)
      for (const bool gemma : {false, true}) check_layer(dtype, tokens, gemma);
}

CLAIM(a_part_of_each_head_may_be_rotated) {
  for (const int32_t dtype : {HKV_F16, HKV_BF16})
    for (const int32_t rotary_dim : {2, 4}) check_layer(dtype, 3, true, rotary_dim);
}

CLAIM(heads_need_not_be_rotated) {
  for (const int32_t dtype : {HKV_F16, HKV_BF16}) check_layer(dtype, 3, false, 0);
}

CLAIM(threads_share_the_products_of_a_decoder_layer) {
  hkv_pool *pool = nullptr;
  CHECK_OK(hkv_pool_create(3, nullptr, 0, &pool));
  check_layer(HKV_BF16, 2, true, kDim, pool);
  hkv_pool_destroy(pool);
}

CLAIM(layers_that_do_not_fit_together_are_refused) {
  const Layer layer(HKV_BF16);
  const Rows rows(random_floats(8 * 64, 1), 64, HKV_BF16);
  const void *data = rows.keys().data;
  std::vector<uint16_t> out(8 * 64);
  int64_t rotary_dim = kDim;
  const void *angles = data;
  const auto status = [&](auto change, int64_t tokens = 1, const void *from = nullptr) {
    hkv_decoder wrong = layer.described(HKV_BF16);
    change(wrong);
    const void *hidden = from == nullptr ? data : nullptr;
    const int inputs = hkv_decoder_inputs(nullptr, &wrong, tokens, hidden, rotary_dim, angles, angles,
                                          out.data(), out.data(), out.data());
    return inputs == HKV_OK ? hkv_decoder_outputs(nullptr, &wrong, tokens, hidden, data, out.data())
                            : inputs;
  };
  const auto as_it_is = [](hkv_decoder &) {};
  CHECK(status(as_it_is) == HKV_OK);
  CHECK(status(as_it_is, 1, data) == HKV_INVALID);
  for (const int64_t wrong : {int64_t{-2}, int64_t{3}, int64_t{kDim} + 2}) {
    rotary_dim = wrong;
    CHECK(status(as_it_is) == HKV_INVALID);
  }
  angles = nullptr;
  rotary_dim = 0;
  CHECK(status(as_it_is) == HKV_OK);
  rotary_dim = kDim;
  CHECK(status(as_it_is) == HKV_INVALID);
  angles = data;
  CHECK(status(as_it_is, -1) == HKV_INVALID);
  CHECK(status(as_it_is, HKV_LINEAR_TOKENS + 1) == HKV_INVALID);
  CHECK(hkv_decoder_inputs(nullptr, nullptr, 1, data, kDim, data, data, out.data(), out.data(),
                           out.data()) == HKV_INVALID);
  const auto no_feed_forward = [](hkv_decoder &one) {
    one.gate = one.up = one.down = {};
    one.before_feed_forward = {};
  };
  CHECK(status(no_feed_forward) == HKV_OK);
  CHECK(status([](hkv_decoder &one) { one.gate = one.up = {}; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.gate = one.down = {}; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.up = one.down = {}; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.before_feed_forward = {}; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.dtype = 7; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.dtype = HKV_F32; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.head_dim = 5; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.head_dim = 10; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.query.kind = 99; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.query.weight = nullptr; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.key.num_inputs = 36; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.value.num_outputs = 0; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.output.num_outputs = 36; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.output.num_inputs = 36; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.gate.num_outputs = 52; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.up.num_inputs = 36; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.down.num_outputs = 36; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.down.stride = 3; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.before_attention.weight = nullptr; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.before_feed_forward.epsilon = -1.0f; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.of_keys.epsilon = -1.0f; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.after_attention.epsilon = -1.0f; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.after_feed_forward.epsilon = -1.0f; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.activation = 2; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.before_attention.form = 3; }) == HKV_INVALID);
  CHECK(status([](hkv_decoder &one) { one.residual_scale = 0.0f; }) == HKV_INVALID);
}
