/* A decoder layer around its attention, for a few tokens: norms, products, rotation and feed-forward in two
 * calls. Values are rounded to the dtype wherever a model's own operations are.
 *
 *   x = norm(hidden); queries, keys, values = x W^T; queries and keys are normed and rotated
 *   (attention)
 *   hidden += residual_scale * norm(attended W^T)
 *   x = norm(hidden); hidden += residual_scale * norm((activation(x W_gate^T) * x W_up^T) W_down^T)
 */
#ifndef HYBRID_KV_DECODER_H
#define HYBRID_KV_DECODER_H

#include "hybrid_kv_linear.h"
#include "hybrid_kv_packed.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A linear layer's weight: packed blocks, as hkv_packed_linear takes them, or plain 16-bit rows of the decoder
 * layer's dtype, as hkv_linear does. */
typedef struct hkv_matrix {
  int32_t kind;  /* enum hkv_packed_kind; 0: plain */
  int32_t exact; /* of packed weights */
  int64_t num_outputs, num_inputs;
  int64_t stride; /* of rows: bytes of packed, elements of plain ones */
  const void *weight;
  const void *bias; /* [num_outputs] of the dtype, or NULL */
} hkv_matrix;

/* HKV_NORM: the weight is multiplied with x that was rounded. HKV_NORM_ONCE: the product alone is rounded.
 * HKV_NORM_CENTRED: that too, and the weight is stored less 1. */
enum hkv_norm_form { HKV_NORM = 0, HKV_NORM_ONCE = 1, HKV_NORM_CENTRED = 2 };

/* weight * (x / sqrt(mean(x^2) + epsilon)). */
typedef struct hkv_norm {
  const void *weight; /* of the dtype; NULL: no norm */
  float epsilon;
  int32_t form; /* enum hkv_norm_form */
} hkv_norm;

typedef struct hkv_decoder {
  int32_t dtype;     /* enum hkv_dtype of hidden states, norms and rotations */
  int32_t head_dim;  /* of queries, keys and values; even */
  int32_t activation; /* enum hkv_activation */
  float residual_scale; /* of what is added to hidden states, mostly 1; not 0 */
  hkv_norm before_attention, of_queries, of_keys, after_attention; /* all but the first may be absent */
  hkv_norm before_feed_forward, after_feed_forward; /* the second may be absent */
  hkv_matrix query, key, value, output;
  hkv_matrix gate, up, down; /* no outputs: the feed-forward is the caller's, and so is the norm before it */
} hkv_decoder;

/* What attention takes of `tokens` (at most HKV_LINEAR_TOKENS) hidden states [tokens, hidden]: queries, keys and
 * values [tokens, heads * head_dim]. All are of the dtype.
 *
 * rotary_dim: leading channels of a head that are rotated, even; 0 for none. cosines, sines: [tokens, rotary_dim].
 */
HKV_API int hkv_decoder_inputs(hkv_pool *pool, const hkv_decoder *layer, int64_t tokens, const void *hidden,
                               int64_t rotary_dim, const void *cosines, const void *sines, void *queries,
                               void *keys, void *values);

/* The layer's output [tokens, hidden] from its hidden states and what they attended [tokens, heads * head_dim];
 * without a feed-forward, what goes into the norm before it. */
HKV_API int hkv_decoder_outputs(hkv_pool *pool, const hkv_decoder *layer, int64_t tokens, const void *hidden,
                                const void *attended, void *out);

#ifdef __cplusplus
}
#endif
#endif
