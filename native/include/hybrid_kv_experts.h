/* Experts of a mixture, whose weights stay packed in blocks. */
#ifndef HYBRID_KV_EXPERTS_H
#define HYBRID_KV_EXPERTS_H

#include "hybrid_kv_linear.h"
#include "hybrid_kv_packed.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Products as of hkv_packed_linear, for tokens that go to different experts, each with a matrix of its
 * own.
 *
 * weight: num_experts matrices of num_outputs rows, one behind the other. experts: [groups], whose
 * matrix a group of tokens is multiplied with. ends: [groups], behind which token a group ends; it
 * begins where the one before ends. inputs: [ends of the last, num_inputs]; out: [the same,
 * num_outputs].
 */
HKV_API int hkv_packed_experts(hkv_pool *pool, int32_t kind, int64_t num_experts,
                               int64_t num_outputs, int64_t num_inputs, const void *weight,
                               int64_t stride, int32_t dtype, int64_t groups,
                               const int64_t *experts, const int64_t *ends, const void *inputs,
                               int32_t exact, void *out);

/* Matrices of one kind, one for each expert. */
typedef struct hkv_expert_matrix {
  int32_t kind;          /* enum hkv_packed_kind */
  int64_t stride;        /* bytes from one row to the next */
  int64_t expert_stride; /* bytes from one expert's first row to the next one's */
  const void *weight;
  const void *bias;                         /* of the dtype, or NULL */
  int64_t bias_stride, bias_expert_stride; /* elements from one output's to the next, from one expert's */
} hkv_expert_matrix;

/* Gated feed-forwards: (activation(gate) * up) W_down^T with gate = x W_gate^T and up = x W_up^T, and
 * biases behind each product. HKV_CLAMPED_SILU: gates are at most `limit`, what they gate within +-limit;
 * gate / (1 + exp(-alpha gate)) * (up + 1). */
typedef struct hkv_experts {
  int32_t dtype;      /* enum hkv_dtype, to which values are rounded wherever a model's own operations are */
  int32_t activation; /* enum hkv_activation */
  int32_t exact;      /* as of hkv_packed_linear */
  float alpha, limit; /* of HKV_CLAMPED_SILU */
  int64_t num_experts, hidden, inner;
  hkv_expert_matrix gate, up, down; /* of [inner, hidden] twice, and [hidden, inner] */
} hkv_experts;

/* The sums of a few tokens' feed-forwards: out[t] = sum over k of shares[t, k] times that of expert
 * experts[t, k]. They are float32, by ascending numbers of experts, and rounded once; a token's does not
 * depend on the others.
 *
 * tokens: at most HKV_LINEAR_TOKENS. experts, shares: [tokens, chosen]. hidden, out: [tokens, hidden] of
 * the dtype.
 */
HKV_API int hkv_mixture(hkv_pool *pool, const hkv_experts *of, int64_t tokens, int64_t chosen,
                        const int64_t *experts, const float *shares, const void *hidden, void *out);

#ifdef __cplusplus
}
#endif
#endif
