// Products of a matrix with a few tokens.
#include <cmath>

#include "arrays.h"
#include "hybrid_kv_linear.h"

namespace {

/// Outputs of random weights and inputs against sums in double.
void check_linear(int64_t num_outputs, int32_t num_inputs, int64_t tokens, int32_t dtype,
                  bool with_bias, hkv_pool *pool = nullptr) {
  const Rows weight(random_floats(num_outputs * num_inputs, 1), num_inputs, dtype, 3);
  const Rows inputs(random_floats(tokens * num_inputs, 2), num_inputs, dtype);
  const Rows bias(random_floats(num_outputs, 3), 1, dtype);
  std::vector<uint16_t> out(static_cast<size_t>(tokens * num_outputs), 0x7fff);
  CHECK_OK(hkv_linear(pool, dtype, num_outputs, num_inputs, weight.keys().data,
                      weight.keys().stride, with_bias ? bias.keys().data : nullptr, tokens,
                      inputs.keys().data, out.data()));
  for (int64_t token = 0; token < tokens; ++token) {
    std::vector<float> input;
    for (int32_t i = 0; i < num_inputs; ++i) input.push_back(inputs.at(token, i));
    for (int64_t output = 0; output < num_outputs; ++output) {
      const uint16_t bits = out[static_cast<size_t>(token * num_outputs + output)];
      uint32_t wide = static_cast<uint32_t>(bits) << 16;
      float found;
      std::memcpy(&found, &wide, 4);
      if (dtype == HKV_F16) found = Rows::float_of(bits);
      const double sum = weight.dot(output, input.data()) +
                         (with_bias ? static_cast<double>(bias.at(output, 0)) : 0.0);
      const double rounding = (dtype == HKV_F16 ? 0x1p-11 : 0x1p-8) * std::fabs(sum);
      CHECK(std::fabs(static_cast<double>(found) - sum) <= 1.01 * rounding + 1e-4);
    }
  }
}

}  // namespace

CLAIM(few_tokens_are_multiplied_at_every_width) {
  for (const int32_t dtype : {HKV_F16, HKV_BF16})
    for (const int32_t num_inputs : {1, 7, 37, 64, 72, 128, 131, 300})
      for (int64_t tokens = 1; tokens <= HKV_LINEAR_TOKENS; ++tokens)
        check_linear(11, num_inputs, tokens, dtype, tokens % 2 == 0);
}

CLAIM(threads_share_the_rows_of_a_product) {
  hkv_pool *pool = nullptr;
  CHECK_OK(hkv_pool_create(3, nullptr, 0, &pool));
  for (const int32_t dtype : {HKV_F16, HKV_BF16}) check_linear(1037, 1000, 3, dtype, true, pool);
  hkv_pool_destroy(pool);
}

CLAIM(empty_products_are_done_and_wrong_ones_refused) {
  const Rows rows(random_floats(64, 1), 8, HKV_BF16);
  const void *data = rows.keys().data;
  std::vector<uint16_t> out(8, 0x7fff);
  CHECK_OK(hkv_linear(nullptr, HKV_BF16, 8, 8, nullptr, 8, nullptr, 0, nullptr, nullptr));
  CHECK_OK(hkv_linear(nullptr, HKV_BF16, 0, 8, nullptr, 8, nullptr, 1, data, nullptr));
  CHECK_OK(hkv_linear(nullptr, HKV_BF16, 8, 0, nullptr, 0, nullptr, 1, nullptr, out.data()));
  for (const uint16_t value : out) CHECK(value == 0);
  const auto call = [&](int32_t dtype, int64_t stride, int64_t tokens, const void *weight,
                        void *to) {
    return hkv_linear(nullptr, dtype, 8, 8, weight, stride, nullptr, tokens, data, to);
  };
  CHECK_REFUSED(call(HKV_F32, 8, 1, data, out.data()), "dtype");
  CHECK_REFUSED(call(HKV_BF16, 7, 1, data, out.data()), "stride");
  CHECK_REFUSED(call(HKV_BF16, 8, 9, data, out.data()), "tokens");
  CHECK_REFUSED(call(HKV_BF16, 8, 1, nullptr, out.data()), "NULL");
  CHECK_REFUSED(call(HKV_BF16, 8, 1, data, nullptr), "NULL");
}
