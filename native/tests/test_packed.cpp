// Products of packed weights, against blocks that are decoded here once more, value by value.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "arrays.h"
#include "hybrid_kv_experts.h"

namespace {

struct Kind {
  int32_t number;
  int64_t values, bytes;
};
constexpr Kind kKinds[] = {
    {HKV_Q4_0, 32, 18},   {HKV_Q4_1, 32, 20},   {HKV_Q5_0, 32, 22},
    {HKV_Q5_1, 32, 24},   {HKV_Q8_0, 32, 34},   {HKV_Q4_K, 256, 144},
    {HKV_Q5_K, 256, 176}, {HKV_Q6_K, 256, 210}, {HKV_IQ4_NL, 32, 18},
    {HKV_MXFP4, 32, 17},
};

double half_of(const uint8_t *at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return static_cast<double>(Rows::float_of(bits));
}

/// Value `i` of a block, as the format defines it.
double value_of(const Kind &kind, const uint8_t *block, int i) {
  const double scale = half_of(block);
  const auto nibble = [&](const uint8_t *from) {
    return i < 16 ? from[i] & 15 : from[i - 16] >> 4;
  };
  const auto fifth = [&](const uint8_t *from) { return (from[i / 8] >> i % 8 & 1) * 16; };
  static const int levels[] = {-127, -104, -83, -65, -49, -35, -22, -10,
                               1,    13,   25,  38,  53,  69,  89,  113};
  static const double floats[] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};
  switch (kind.number) {
    case HKV_Q4_0: return scale * (nibble(block + 2) - 8);
    case HKV_Q4_1: return scale * nibble(block + 4) + half_of(block + 2);
    case HKV_Q5_0: return scale * (nibble(block + 6) + fifth(block + 2) - 16);
    case HKV_Q5_1: return scale * (nibble(block + 8) + fifth(block + 4)) + half_of(block + 2);
    case HKV_Q8_0: return scale * static_cast<int8_t>(block[2 + i]);
    case HKV_IQ4_NL: return scale * levels[nibble(block + 2)];
    case HKV_MXFP4: return std::ldexp(floats[nibble(block + 1)], block[0] - 127);
    case HKV_Q6_K: {
      const int part = i / 32 % 4, at = i / 128 * 64 + part % 2 * 32 + i % 32;
      const int low = block[at] >> part / 2 * 4 & 15;
      const int high = block[128 + i / 128 * 32 + i % 32] >> part * 2 & 3;
      return half_of(block + 208) * static_cast<int8_t>(block[192 + i / 16]) *
             (low + high * 16 - 32);
    }
    default: {
      const int part = i / 32;
      const uint8_t *packed = block + 4;
      const auto six = [&](int first) {
        return part < 4 ? packed[first + part] & 63
                        : (packed[4 + part] >> (first == 0 ? 0 : 4) & 15) |
                              (packed[first + part - 4] >> 6) << 4;
      };
      const bool is_five = kind.number == HKV_Q5_K;
      const uint8_t *low = block + (is_five ? 48 : 16) + part / 2 * 32;
      const int code = (low[i % 32] >> part % 2 * 4 & 15) +
                       (is_five ? (block[16 + i % 32] >> part & 1) * 16 : 0);
      return scale * six(0) * code - half_of(block + 2) * six(4);
    }
  }
}

/// Random blocks whose memory begins at an odd address and ends with the last row.
class Weight {
 public:
  Weight(const Kind &kind, int64_t rows, int64_t columns, int64_t gap, uint64_t seed)
      : kind_(kind),
        row_bytes_(columns / kind.values * kind.bytes),
        stride_(row_bytes_ + gap),
        bytes_(new uint8_t[static_cast<size_t>(1 + (rows - 1) * stride_ + row_bytes_)]) {
    Random random(seed);
    std::fill_n(bytes_.get(), 1 + (rows - 1) * stride_ + row_bytes_, uint8_t{0xff});
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t at = 0; at < row_bytes_; at += kind.bytes) {
        uint8_t *block = bytes_.get() + 1 + row * stride_ + at;
        for (int64_t i = 0; i < kind.bytes; ++i) block[i] = static_cast<uint8_t>(random.bits());
        const bool has_two = kind.number == HKV_Q4_1 || kind.number == HKV_Q5_1 ||
                             kind.number == HKV_Q4_K || kind.number == HKV_Q5_K;
        uint8_t *scale = block + (kind.number == HKV_Q6_K ? 208 : 0);
        for (int i = 0; i <= has_two; ++i) {  // of 2^-7 to 2^-6, of both signs
          scale[2 * i] = static_cast<uint8_t>(random.bits());
          scale[2 * i + 1] = static_cast<uint8_t>(0x20 | (random.bits() & 0x83));
        }
        if (kind.number == HKV_MXFP4) *scale = static_cast<uint8_t>(120 + random.bits() % 4);
      }
  }

  const uint8_t *data() const { return bytes_.get() + 1; }
  int64_t stride() const { return stride_; }
  double at(int64_t row, int64_t column) const {
    return value_of(kind_, data() + row * stride_ + column / kind_.values * kind_.bytes,
                    static_cast<int>(column % kind_.values));
  }

 private:
  const Kind &kind_;
  int64_t row_bytes_, stride_;
  std::unique_ptr<uint8_t[]> bytes_;
};

double as_it_is(double value) { return value; }

/// As bfloat16 holds it, to nearest.
double in_bfloat(double value) {
  int exponent;
  const double mantissa = std::frexp(value, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

/// The error of products of random inputs with a bias, as a share of the outputs' root mean square, where
/// weights and inputs are `rounded`.
double error_of(const Kind &kind, int64_t rows, int64_t columns, int64_t tokens, bool exact, int64_t gap,
                hkv_pool *pool, double (*rounded)(double)) {
  const Weight weight(kind, rows, columns, gap, static_cast<uint64_t>(rows + columns));
  const std::vector<float> inputs = random_floats(tokens * columns, 2), bias = random_floats(rows, 3);
  std::vector<float> out(static_cast<size_t>(tokens * rows), NAN);
  CHECK_OK(hkv_packed_linear(pool, kind.number, rows, columns, weight.data(), weight.stride(),
                             bias.data(), HKV_F32, tokens, inputs.data(), exact, out.data()));
  std::vector<double> wide, values(static_cast<size_t>(columns));
  for (const float input : inputs) wide.push_back(rounded(static_cast<double>(input)));
  double squares = 0, errors = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) values[static_cast<size_t>(i)] = rounded(weight.at(row, i));
    for (int64_t token = 0; token < tokens; ++token) {
      double sum = static_cast<double>(bias[static_cast<size_t>(row)]);
      for (int64_t i = 0; i < columns; ++i)
        sum += values[static_cast<size_t>(i)] * wide[static_cast<size_t>(token * columns + i)];
      const double error = static_cast<double>(out[static_cast<size_t>(token * rows + row)]) - sum;
      squares += sum * sum;
      errors += error * error;
    }
  }
  return std::sqrt(errors / squares);
}

void check_product(const Kind &kind, int64_t rows, int64_t columns, int64_t tokens, bool exact,
                   int64_t gap = 0, hkv_pool *pool = nullptr) {
  CHECK(error_of(kind, rows, columns, tokens, exact, gap, pool, as_it_is) < (exact ? 1e-4 : 1e-2));
}

/// In tiles only what lies next to a tie may be rounded otherwise.
void check_tiles(const Kind &kind, int64_t rows, int64_t columns, int64_t tokens, int64_t gap = 0,
                 hkv_pool *pool = nullptr) {
  CHECK(error_of(kind, rows, columns, tokens, false, gap, pool, in_bfloat) < 3e-4);
}

int refusal(int64_t num_outputs, int64_t num_inputs, int64_t stride, int64_t tokens,
            int32_t kind = HKV_Q4_0, int32_t dtype = HKV_F32, bool has_arrays = true) {
  static const uint8_t weight[18 * 2] = {};
  static const float inputs[32] = {};
  static float out[2];
  return hkv_packed_linear(nullptr, kind, num_outputs, num_inputs, has_arrays ? weight : nullptr,
                           stride, nullptr, dtype, tokens, inputs, 0, out);
}

/// Two of three experts have tokens: each is a product of its own.
void check_experts(const Kind &kind, bool exact, hkv_pool *pool, int64_t tokens = 12) {
  constexpr int64_t kRows = 133, kExperts = 3, kFirst = 3;
  const int64_t columns = 512, gap = 5;
  const Weight weight(kind, kExperts * kRows, columns, gap, 11);
  const std::vector<float> inputs = random_floats(tokens * columns, 2);
  const int64_t experts[] = {2, 1}, ends[] = {kFirst, tokens};
  std::vector<float> out(static_cast<size_t>(tokens * kRows), NAN), alone = out;
  CHECK_OK(hkv_packed_experts(pool, kind.number, kExperts, kRows, columns, weight.data(),
                              weight.stride(), HKV_F32, 2, experts, ends, inputs.data(), exact,
                              out.data()));
  for (int group = 0; group < 2; ++group) {
    const int64_t begin = group == 0 ? 0 : kFirst;
    CHECK_OK(hkv_packed_linear(nullptr, kind.number, kRows, columns,
                               weight.data() + experts[group] * kRows * weight.stride(),
                               weight.stride(), nullptr, HKV_F32, ends[group] - begin,
                               inputs.data() + begin * columns, exact, alone.data() + begin * kRows));
  }
  CHECK(std::memcmp(out.data(), alone.data(), out.size() * sizeof(float)) == 0);
}

/// The sums of tokens' feed-forwards are those of their products, whatever they come with.
void check_mixture(const Kind &up, const Kind &down, hkv_pool *pool) {
  constexpr int64_t kExperts = 3, kHidden = 256, kInner = 512, kTokens = 5, kChosen = 2;
  const Weight gates(up, kExperts * kInner, kHidden, 3, 5), ups(kKinds[4], kExperts * kInner, kHidden, 0, 6);
  const Weight downs(down, kExperts * kHidden, kInner, 5, 7);
  const std::vector<float> hidden = random_floats(kTokens * kHidden, 2);
  const int64_t experts[] = {2, 0, 0, 1, 1, 2, 2, 0, 0, 2};
  const float shares[] = {.5f, .25f, 1, -1, .125f, 2, .75f, .5f, 1, 1};
  const auto matrix = [](const Kind &kind, const Weight &of, int64_t rows) {
    return hkv_expert_matrix{kind.number, of.stride(), rows * of.stride(), of.data(), nullptr, 0, 0};
  };
  const hkv_experts of{HKV_F32, HKV_SILU, 1, 0, 0, kExperts, kHidden, kInner, matrix(up, gates, kInner),
                       matrix(kKinds[4], ups, kInner), matrix(down, downs, kHidden)};
  std::vector<float> out(static_cast<size_t>(kTokens * kHidden), NAN), one(static_cast<size_t>(kHidden));
  CHECK_OK(hkv_mixture(pool, &of, kTokens, kChosen, experts, shares, hidden.data(), out.data()));
  for (int64_t token = 0; token < kTokens; ++token) {
    const float *x = hidden.data() + token * kHidden;
    CHECK_OK(hkv_mixture(nullptr, &of, 1, kChosen, experts + token * kChosen, shares + token * kChosen, x,
                         one.data()));
    CHECK(std::memcmp(one.data(), out.data() + token * kHidden, one.size() * sizeof(float)) == 0);
    std::vector<float> sums(static_cast<size_t>(kHidden), 0.0f), part = sums;
    for (int64_t k = token * kChosen; k < (token + 1) * kChosen; ++k) {
      std::vector<float> inner[2];
      for (int i = 0; i < 2; ++i) {
        const hkv_expert_matrix &by = i == 0 ? of.gate : of.up;
        inner[i].resize(static_cast<size_t>(kInner));
        CHECK_OK(hkv_packed_linear(nullptr, by.kind, kInner, kHidden,
                                   static_cast<const uint8_t *>(by.weight) + experts[k] * by.expert_stride,
                                   by.stride, nullptr, HKV_F32, 1, x, 1, inner[i].data()));
      }
      for (size_t i = 0; i < inner[0].size(); ++i)
        inner[0][i] = inner[0][i] / (1 + std::exp(-inner[0][i])) * inner[1][i];
      CHECK_OK(hkv_packed_linear(nullptr, down.number, kHidden, kInner,
                                 downs.data() + experts[k] * of.down.expert_stride, downs.stride(), nullptr,
                                 HKV_F32, 1, inner[0].data(), 1, part.data()));
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += shares[k] * part[i];
    }
    double errors = 0, squares = 0;
    for (size_t i = 0; i < sums.size(); ++i) {
      errors += std::pow(static_cast<double>(sums[i] - one[i]), 2);
      squares += std::pow(static_cast<double>(sums[i]), 2);
    }
    CHECK(std::sqrt(errors / squares) < 1e-4);
  }
}

int mixture_refusal(const std::function<void(hkv_experts &)> &change, int64_t tokens = 1, int64_t chosen = 1,
                    int64_t expert = 1, bool has_arrays = true) {
  static const uint8_t weight[18 * 64] = {};
  static const float hidden[32] = {};
  static float out[32];
  const hkv_expert_matrix matrix{HKV_Q4_0, 18, 18 * 32, weight, nullptr, 0, 0};
  hkv_experts of{HKV_F32, HKV_SILU, 0, 0, 0, 2, 32, 32, matrix, matrix, matrix};
  change(of);
  const float share = 1;
  return hkv_mixture(nullptr, &of, tokens, chosen, &expert, &share, has_arrays ? hidden : nullptr, out);
}

int experts_refusal(int64_t num_experts, int64_t groups, int64_t expert, int64_t end, int64_t rows = 2,
                    bool has_groups = true, bool has_arrays = true) {
  static const uint8_t weight[18 * 4] = {};
  static const float inputs[64] = {};
  static float out[4];
  const int64_t experts[] = {expert, 0}, ends[] = {end, 2};
  return hkv_packed_experts(nullptr, HKV_Q4_0, num_experts, rows, 32, has_arrays ? weight : nullptr,
                            18, HKV_F32, groups, has_groups ? experts : nullptr,
                            has_groups ? ends : nullptr, inputs, 0, out);
}

}  // namespace

CLAIM(packed_weights_are_multiplied_as_their_format_says) {
  for (const Kind &kind : kKinds) {
    for (const int64_t tokens : {1, 2, 3, 4, 5, 7, 17})
      check_product(kind, 19, kind.values == 32 ? 320 : 512, tokens, true);
    check_product(kind, 1, kind.values, 1, true);
    check_product(kind, 3, kind.values, 9, false, 5);
  }
}

CLAIM(packed_rows_end_anywhere_in_a_chunk) {
  for (const Kind &kind : kKinds)
    for (int64_t blocks = 1; kind.values == 32 && blocks < 8; ++blocks)
      for (const int64_t tokens : {1, 3}) {
        check_product(kind, 6, 256 + blocks * 32, tokens, true);
        check_product(kind, 6, blocks * 32, tokens, true, 7 * kind.bytes + 3);  // 0xff is behind a row
      }
}

CLAIM(threads_share_the_rows_of_packed_weights) {
  const ScopedPool pool(3);
  for (const Kind &kind : kKinds)
    for (const int64_t tokens : {1, 9}) check_product(kind, 517, 256, tokens, false, 0, pool.get());
}

CLAIM(prompts_of_packed_weights_come_in_blocks) { check_product(kKinds[5], 70, 256, 530, false); }

CLAIM(many_tokens_are_multiplied_in_tiles) {
  const int64_t least = hkv_packed_tile_tokens();
  if (least == 0) return;
  const ScopedPool pool(3);
  for (const Kind &kind : kKinds) {
    const bool is_short = kind.values == 32;
    check_tiles(kind, 37, is_short ? 576 : 512, least, 3);
    check_tiles(kind, 16, kind.values, 81);
    for (int64_t blocks = 1; is_short && blocks < 8; ++blocks) check_tiles(kind, 3, blocks * 32, least + 1, 1);
    check_experts(kind, false, nullptr, least + 3);
    check_experts(kind, false, pool.get(), least + 3);
  }
  check_tiles(kKinds[0], 291, 32, 130, 0, pool.get());
  check_tiles(kKinds[5], 35, 256, 800);
}

CLAIM(outputs_in_tiles_do_not_depend_on_other_tokens) {
  const int64_t least = hkv_packed_tile_tokens(), tokens = 520;
  if (least == 0) return;
  constexpr int64_t kRows = 40, kColumns = 288;
  const Weight weight(kKinds[4], kRows, kColumns, 0, 1);
  const std::vector<float> inputs = random_floats(tokens * kColumns, 2);
  std::vector<float> all(static_cast<size_t>(tokens * kRows)), some(static_cast<size_t>(least * kRows));
  const auto multiply = [&](int64_t first, int64_t count, float *out) {
    CHECK_OK(hkv_packed_linear(nullptr, HKV_Q8_0, kRows, kColumns, weight.data(), weight.stride(), nullptr,
                               HKV_F32, count, inputs.data() + first * kColumns, 0, out));
  };
  multiply(0, tokens, all.data());
  for (const int64_t first : {int64_t{0}, int64_t{7}, tokens - least}) {
    multiply(first, least, some.data());
    CHECK(std::memcmp(some.data(), all.data() + first * kRows, some.size() * sizeof(float)) == 0);
  }
}

CLAIM(packed_products_refuse_what_cannot_be) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  CHECK_OK(refusal(2, 32, 18, 1));
  CHECK_OK(refusal(0, 32, 18, 1));
  CHECK_OK(refusal(2, 32, 18, 0));
  CHECK_REFUSED(refusal(2, 32, 18, 1, 10), "kind must be Q4_0");
  CHECK_REFUSED(refusal(2, 32, 18, 1, HKV_Q4_0, 3), "dtype");
  CHECK_REFUSED(refusal(2, 33, 18, 1), "multiple");
  CHECK_REFUSED(refusal(2, 32, 17, 1), "stride");
  CHECK_REFUSED(refusal(2, 32, -18, 1), "stride");
  CHECK_REFUSED(refusal(-1, 32, 18, 1), "at least 0");
  CHECK_REFUSED(refusal(2, -32, 18, 1), "at least 0");
  CHECK_REFUSED(refusal(2, 32, 18, -1), "at least 0");
  CHECK_REFUSED(refusal(2, 32, 18, 1, HKV_Q4_0, HKV_F32, false), "NULL");
  CHECK_REFUSED(refusal(kHuge, 32, 18, 1), "sizes");
  CHECK_REFUSED(refusal(2, kHuge, 18, 1), "sizes");
  CHECK_REFUSED(refusal(2, 32, 18, kHuge), "sizes");
  CHECK_REFUSED(refusal(2, 32, kHuge, 1), "sizes");
}

CLAIM(tokens_go_to_the_matrix_of_their_expert) {
  const ScopedPool pool(3);
  for (const Kind &kind : kKinds)
    for (const bool exact : {false, true}) {
      check_experts(kind, exact, nullptr);
      check_experts(kind, exact, pool.get());
    }
}

CLAIM(experts_that_cannot_be_are_refused) {
  constexpr int64_t kHuge = int64_t{1} << 61;
  CHECK_OK(experts_refusal(2, 2, 1, 1));
  CHECK_OK(experts_refusal(2, 0, 1, 1, 2, false));
  CHECK_OK(experts_refusal(0, 0, 0, 0));
  CHECK_OK(experts_refusal(2, 2, 1, 1, 0));
  CHECK_REFUSED(experts_refusal(-1, 0, 1, 1), "at least 0");
  CHECK_REFUSED(experts_refusal(2, -1, 1, 1), "at least 0");
  CHECK_REFUSED(experts_refusal(2, 2, 2, 1), "numbers of matrices");
  CHECK_REFUSED(experts_refusal(2, 2, -1, 1), "numbers of matrices");
  CHECK_REFUSED(experts_refusal(2, 2, 1, 0), "ascend");
  CHECK_REFUSED(experts_refusal(2, 2, 1, 2), "ascend");
  CHECK_REFUSED(experts_refusal(2, 1, 1, -1), "at least 0");
  CHECK_REFUSED(experts_refusal(2, 2, 1, 1, 2, false), "NULL");
  CHECK_REFUSED(experts_refusal(2, 2, 1, 1, 2, true, false), "NULL");
  CHECK_REFUSED(experts_refusal(kHuge, 1, 1, 1), "sizes");
  CHECK_REFUSED(experts_refusal(2, 1, 1, kHuge), "sizes");
}

CLAIM(a_mixture_is_the_sum_of_its_experts) {
  const ScopedPool pool(3);
  for (const Kind &kind : kKinds) {
    check_mixture(kind, kKinds[0], nullptr);
    check_mixture(kKinds[5], kind, pool.get());
  }
}

/// Blocks of zeros: biases alone are what the gate sees.
CLAIM(biases_of_experts_lie_in_strides_behind_clamped_gates) {
  static const uint8_t weight[18 * 64] = {};
  std::vector<float> of_both(2 * 64, 0), of_down(2 * 32, .5f), hidden(32, 1), out(32);
  of_both[64] = 9, of_both[65] = -9;  // of the second expert's first gate, and what it gates
  const hkv_expert_matrix gate{HKV_Q4_0, 18, 18 * 32, weight, of_both.data(), 2, 64};
  const hkv_expert_matrix up{HKV_Q4_0, 18, 18 * 32, weight, of_both.data() + 1, 2, 64};
  const hkv_expert_matrix down{HKV_Q4_0, 18, 18 * 32, weight, of_down.data(), 1, 32};
  hkv_experts of{HKV_F32, HKV_CLAMPED_SILU, 1, 1.702f, 7, 2, 32, 32, gate, up, down};
  const int64_t experts[] = {0, 1};
  const float shares[] = {1, 2};
  CHECK_OK(hkv_mixture(nullptr, &of, 1, 2, experts, shares, hidden.data(), out.data()));
  for (const float one : out) CHECK(one == 1.5f);
}

CLAIM(mixtures_that_cannot_be_are_refused) {
  constexpr int64_t kHuge = int64_t{1} << 61;
  const auto same = [](hkv_experts &) {};
  CHECK_OK(mixture_refusal(same));
  CHECK_OK(mixture_refusal(same, 0));
  CHECK_OK(mixture_refusal(same, 1, 0));
  CHECK_REFUSED(mixture_refusal(same, 9), "0 to 8");
  CHECK_REFUSED(mixture_refusal(same, 1, -1), "at least");
  CHECK_REFUSED(mixture_refusal(same, 1, kHuge), "sizes");
  CHECK_REFUSED(mixture_refusal(same, 1, 1, 2), "numbers of matrices");
  CHECK_REFUSED(mixture_refusal(same, 1, 1, -1), "numbers of matrices");
  CHECK_REFUSED(mixture_refusal(same, 1, 1, 1, false), "NULL");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.dtype = 3; }), "dtype");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.activation = 3; }), "activation");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.hidden = 0; }), "at least 1");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.hidden = 33; }), "multiple");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.num_experts = kHuge; }), "sizes");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.gate.kind = 10; }), "kind must be Q4_0");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.up.stride = 17; }), "stride");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.down.expert_stride = 18 * 32 - 1; }), "expert_stride");
  CHECK_REFUSED(mixture_refusal([](hkv_experts &of) { of.down.weight = nullptr; }), "NULL");
}
