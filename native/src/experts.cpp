// Experts of a mixture: products of tokens with the matrices of their experts, and the sum of a token's
// feed-forwards.
#include "hybrid_kv_experts.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "packed_products.h"

namespace hkv {
namespace {

/// A token at one of its experts.
struct Visit {
  int64_t expert, token, place;  // the last among all
  float share;
};

/// Memory of one thread for what lies between the products of a call.
template <typename Element>
struct Scratch {
  std::vector<Visit> visits;
  std::vector<ProductInputs> rounded;
  std::vector<Product> products;
  std::vector<Element> inner, parts;  // [2, visits, inner] of gates and what they gate; [visits, hidden]
  std::vector<float> floats;
};

/// The sum of each token's feed-forwards, by the order of their experts' numbers. A visit is a product of
/// its own, so that a token gets the same whatever tokens it comes with.
template <typename Element>
class Mixture {
 public:
  Mixture(hkv_pool *pool, const hkv_experts &of, int64_t tokens)
      : pool_(pool), of_(of), tokens_(tokens) {}

  void sum(int64_t chosen, const int64_t *experts, const float *shares, const Element *hidden,
           Element *out) {
    note_visits(chosen, experts, shares);
    if (count() > 0) feed_forward(hidden);
    add_parts(out);
  }

 private:
  static Scratch<Element> &own() {
    thread_local Scratch<Element> scratch;
    return scratch;
  }

  /// The visits' parts of `hidden`.
  void feed_forward(const Element *hidden) {
    const int64_t visits = count(), inner = of_.inner;
    Scratch<Element> &mine = own();
    grow(mine.inner, 2 * visits * inner);
    grow(mine.parts, visits * of_.hidden);
    Element *gates = mine.inner.data(), *ups = gates + visits * inner;
    if (of_.gate.kind == of_.up.kind) {
      feed({&of_.gate, &of_.up}, tokens_, hidden, gates);
    } else {
      feed({&of_.gate}, tokens_, hidden, gates);
      feed({&of_.up}, tokens_, hidden, ups);
    }
    add_biases(of_.gate, gates);
    add_biases(of_.up, ups);
    if (of_.activation == HKV_CLAMPED_SILU)
      gate_clamped(of_.alpha, of_.limit, ups, visits * inner, gates);
    else
      gate(of_.activation, ups, visits * inner, gates, mine.floats);
    feed({&of_.down}, visits, gates, mine.parts.data());
  }

  int64_t count() const { return static_cast<int64_t>(own().visits.size()); }

  void note_visits(int64_t chosen, const int64_t *experts, const float *shares) {
    std::vector<Visit> &visits = own().visits;
    visits.clear();
    for (int64_t at = 0; at < tokens_ * chosen; ++at) {
      require(experts[at] >= 0 && experts[at] < of_.num_experts, "experts must be numbers of matrices");
      visits.push_back({experts[at], at / chosen, at, shares[at]});
    }
    std::sort(visits.begin(), visits.end(), [](const Visit &a, const Visit &b) {
      return a.expert != b.expert ? a.expert < b.expert : a.place < b.place;
    });
  }

  /// Products of the visits with matrices of one kind, [matrices, visits, outputs of a matrix].
  /// from: [inputs, num_inputs], of the tokens or of the visits.
  void feed(std::initializer_list<const hkv_expert_matrix *> by, int64_t inputs, const Element *from,
            Element *to) {
    Scratch<Element> &mine = own();
    const bool is_down = *by.begin() == &of_.down;
    const int64_t rows = is_down ? of_.hidden : of_.inner, columns = is_down ? of_.inner : of_.hidden;
    with_kind((*by.begin())->kind, [&](auto kind) {
      using Kind = decltype(kind);
      mine.rounded.clear();
      mine.rounded.reserve(static_cast<size_t>(inputs));  // products point to them
      for (int64_t at = 0; at < inputs; ++at) {
        mine.rounded.push_back(inputs_for<Kind>(1, columns, of_.exact != 0));
        round_all(nullptr, of_.dtype, from, at, mine.rounded.back());
      }
      mine.products.clear();
      for (const hkv_expert_matrix *one : by)
        for (int64_t at = 0; at < count(); ++at) {
          const Visit &visit = mine.visits[static_cast<size_t>(at)];
          const auto *first = static_cast<const uint8_t *>(one->weight) + visit.expert * one->expert_stride;
          mine.products.push_back({layer_at<Kind>(first, rows, columns, one->stride, nullptr),
                                   &mine.rounded[static_cast<size_t>(is_down ? at : visit.token)],
                                   static_cast<int64_t>(mine.products.size())});
        }
      multiply<Kind>(pool_, mine.products.data(), static_cast<int64_t>(mine.products.size()), of_.dtype, to);
    });
  }

  /// Where a visit's biases begin; null for none.
  const Element *bias_of(const hkv_expert_matrix &by, const Visit &visit) const {
    const auto *bias = static_cast<const Element *>(by.bias);
    return bias == nullptr ? nullptr : bias + visit.expert * by.bias_expert_stride;
  }

  /// rows: [visits, inner]
  void add_biases(const hkv_expert_matrix &by, Element *rows) const {
    if (by.bias == nullptr) return;
    for (const Visit &visit : own().visits) {
      const Element *bias = bias_of(by, visit);
      for (int64_t i = 0; i < of_.inner; ++i, ++rows)
        round_to(to_float(*rows) + to_float(bias[i * by.bias_stride]), *rows);
    }
  }

  void add_parts(Element *out) const {
    Scratch<Element> &mine = own();
    const int64_t width = of_.hidden;
    mine.floats.assign(static_cast<size_t>(tokens_ * width), 0.0f);
    const Element *part = mine.parts.data();
    for (const Visit &visit : mine.visits) {
      float *sum = mine.floats.data() + visit.token * width;
      const Element *bias = bias_of(of_.down, visit);
      if (bias == nullptr)
        for (int64_t i = 0; i < width; ++i) sum[i] += to_float(part[i]) * visit.share;
      else
        for (int64_t i = 0; i < width; ++i)
          sum[i] += (to_float(part[i]) + to_float(bias[i * of_.down.bias_stride])) * visit.share;
      part += width;
    }
    for (int64_t i = 0; i < tokens_ * width; ++i) round_to(mine.floats[static_cast<size_t>(i)], out[i]);
  }

  hkv_pool *pool_;
  const hkv_experts &of_;
  int64_t tokens_;
};

/// Raises Invalid unless matrices [num_experts, rows, columns] can be these.
void check_matrix(const hkv_experts &of, const hkv_expert_matrix &by, int64_t rows, int64_t columns,
                  int64_t visits) {
  with_kind(by.kind, [&](auto kind) {
    check_sizes<decltype(kind)>(1, rows, columns, by.stride, visits, of.dtype);
  });
  require(by.expert_stride >= array_size(rows, by.stride),
          "expert_stride must be at least the bytes of a matrix");
  array_size(of.num_experts, by.expert_stride);
  require(by.weight != nullptr, "arrays must not be NULL");
}

void check(const hkv_experts &of, int64_t tokens, int64_t chosen) {
  require(tokens >= 0 && tokens <= HKV_LINEAR_TOKENS, "tokens must be 0 to 8");
  require(of.hidden >= 1 && of.inner >= 1 && of.num_experts >= 0 && chosen >= 0,
          "sizes must be at least 1");
  const int64_t visits = array_size(tokens, chosen);
  for (const hkv_expert_matrix *one : {&of.gate, &of.up})
    check_matrix(of, *one, of.inner, of.hidden, 2 * visits);
  check_matrix(of, of.down, of.hidden, of.inner, visits);
  if (of.activation != HKV_CLAMPED_SILU) check_activation(of.activation);
}

}  // namespace
}  // namespace hkv

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
      hkv::check_sizes<Kind>(num_experts, num_outputs, num_inputs, stride,
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
      std::vector<hkv::ProductInputs> rounded;
      std::vector<hkv::Product> products;
      rounded.reserve(static_cast<size_t>(groups));  // products point to them
      products.reserve(static_cast<size_t>(groups));
      int64_t begin = 0;
      for (int64_t group = 0; group < groups; begin = ends[group++]) {
        rounded.push_back(hkv::inputs_for<Kind>(ends[group] - begin, num_inputs, exact != 0));
        hkv::round_all(pool, dtype, inputs, begin, rounded.back());
        const int64_t first = experts[group] * num_outputs * stride;
        const auto *matrix = static_cast<const uint8_t *>(weight) + first;
        const auto layer = hkv::layer_at<Kind>(matrix, num_outputs, num_inputs, stride, nullptr);
        products.push_back({layer, &rounded.back(), begin});
      }
      hkv::multiply<Kind>(pool, products.data(), groups, dtype, out);
    });
  });
}

extern "C" int hkv_mixture(hkv_pool *pool, const hkv_experts *of, int64_t tokens, int64_t chosen,
                           const int64_t *experts, const float *shares, const void *hidden, void *out) {
  return hkv::guarded([&] {
    hkv::require(of != nullptr, "of must not be NULL");
    hkv::check(*of, tokens, chosen);
    if (tokens == 0) return;
    hkv::require(hidden != nullptr && out != nullptr &&
                     (chosen == 0 || (experts != nullptr && shares != nullptr)),
                 "arrays must not be NULL");
    hkv::with_dtype(of->dtype, [&](auto *element) {
      using Pointer = decltype(element);
      using Element = std::remove_const_t<std::remove_pointer_t<Pointer>>;
      hkv::Mixture<Element>(pool, *of, tokens)
          .sum(chosen, experts, shares, static_cast<Pointer>(hidden), static_cast<Element *>(out));
    });
  });
}
