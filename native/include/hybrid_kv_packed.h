/* Products of tokens with weights that stay packed in blocks, as a GGUF file has them.
 *
 * Inputs are rounded to 8 bits by blocks of 32 values, whatever the weights' kind. Sums are integers
 * within a block and float32 beyond it. Many tokens are multiplied in tiles where the CPU has them:
 * inputs and weights are rounded to bfloat16, and what is subnormal counts as 0. Weights may lie at any
 * address, as in a mapped file; no byte before the first row or behind the last is read.
 */
#ifndef HYBRID_KV_PACKED_H
#define HYBRID_KV_PACKED_H

#include "hybrid_kv.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers that GGUF has for them. */
enum hkv_packed_kind {
  HKV_Q4_0 = 2,
  HKV_Q4_1 = 3,
  HKV_Q5_0 = 6,
  HKV_Q5_1 = 7,
  HKV_Q8_0 = 8,
  HKV_Q4_K = 12,
  HKV_Q5_K = 13,
  HKV_Q6_K = 14,
  HKV_IQ4_NL = 20,
  HKV_MXFP4 = 39
};

/* The fewest tokens of one matrix that are multiplied in tiles, unless exactly; 0 where none are. Then a
 * token's outputs do not depend on the others. */
HKV_API int64_t hkv_packed_tile_tokens(void);

/* out[t, n] = bias[n] + sum over k of inputs[t, k] weight[n, k].
 *
 * weight: num_outputs rows of blocks, `stride` bytes from one row to the next; num_inputs is a
 * multiple of a block's values. bias: [num_outputs] of float32, or NULL. inputs: [tokens,
 * num_inputs]; out: [tokens, num_outputs], both of `dtype` (enum hkv_dtype).
 * exact: nonzero adds what the rounding to 8 bits leaves, in another 8 bits: twice the arithmetic.
 */
HKV_API int hkv_packed_linear(hkv_pool *pool, int32_t kind, int64_t num_outputs, int64_t num_inputs,
                              const void *weight, int64_t stride, const float *bias, int32_t dtype,
                              int64_t tokens, const void *inputs, int32_t exact, void *out);

#ifdef __cplusplus
}
#endif
#endif
