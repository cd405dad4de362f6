/* A linear layer for a few tokens: what a decode step asks of a model's weights.
 *
 * Such a product waits for memory, so that each row of weights is read once, in order, for all
 * tokens, and is asked for well before it is needed. Sums are float32, rounded once at the end.
 */
#ifndef HYBRID_KV_LINEAR_H
#define HYBRID_KV_LINEAR_H

#include "hybrid_kv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HKV_LINEAR_TOKENS 8

/* out[t, n] = bias[n] + sum over k of inputs[t, k] weight[n, k], all arrays of one dtype.
 *
 * weight: [num_outputs, num_inputs], `stride` elements from one row to the next, at least
 * num_inputs; bias: [num_outputs] or NULL; inputs: [tokens, num_inputs]; out: [tokens, num_outputs].
 * tokens: at most HKV_LINEAR_TOKENS. dtype: enum hkv_dtype, of 16 bits.
 */
HKV_API int hkv_linear(hkv_pool *pool, int32_t dtype, int64_t num_outputs, int64_t num_inputs,
                       const void *weight, int64_t stride, const void *bias, int64_t tokens,
                       const void *inputs, void *out);

#ifdef __cplusplus
}
#endif
#endif
