// A linear layer of packed weights.
#include "hybrid_kv_packed.h"

#include "packed_products.h"

extern "C" int64_t hkv_packed_tile_tokens(void) {
  return hkv::in_tiles(hkv::kMinTileTokens, 1, false) ? hkv::kMinTileTokens : 0;
}

extern "C" int hkv_packed_linear(hkv_pool *pool, int32_t kind, int64_t num_outputs,
                                 int64_t num_inputs, const void *weight, int64_t stride,
                                 const float *bias, int32_t dtype, int64_t tokens,
                                 const void *inputs, int32_t exact, void *out) {
  return hkv::guarded([&] {
    hkv::with_kind(kind, [&](auto of) {
      using Kind = decltype(of);
      hkv::check_sizes<Kind>(1, num_outputs, num_inputs, stride, tokens, dtype);
      if (tokens == 0 || num_outputs == 0) return;
      hkv::check_given(num_inputs, weight, inputs, out);
      auto rounded = hkv::inputs_for<Kind>(tokens, num_inputs, exact != 0);
      hkv::round_all(pool, dtype, inputs, 0, rounded);
      const hkv::Product product{
          hkv::layer_at<Kind>(weight, num_outputs, num_inputs, stride, bias), &rounded, 0};
      hkv::multiply<Kind>(pool, &product, 1, dtype, out);
    });
  });
}
