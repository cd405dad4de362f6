/* Partial attention over keys and values that are read where they lie, and the merge of parts.
 *
 * out and the natural log-sum-exp are what hybrid_kv merges with other parts; a query without
 * entries gets 0 and -inf.
 */
#ifndef HYBRID_KV_ATTEND_H
#define HYBRID_KV_ATTEND_H

#include "hybrid_kv_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keys and values of all KV heads of all batch rows, equally far apart. */
typedef struct hkv_kv {
  hkv_keys keys;         /* of the first head of the first batch row */
  hkv_keys values;       /* as many rows and the same dtype as keys; dim may differ */
  int64_t key_step[2];   /* elements from one batch row to the next, and from one head */
  int64_t value_step[2]; /* the same */
} hkv_kv;

/* Entries of their own for every query, of one batch row.
 *
 * queries: [heads, num_queries, dim of keys] of `query_dtype`.
 * ids: [heads, num_queries, num_ids] rows; negative ones are absent.
 * bias: [heads, num_queries, num_ids] added to the logits, -inf for absent; NULL for none.
 * softcap: logits become softcap * tanh(logit / softcap) before the bias; 0 for none.
 * out: [heads, num_queries, dim of values]; lse: [heads, num_queries].
 */
HKV_API int hkv_attend(hkv_pool *pool, int32_t heads, const hkv_kv *kv, const void *queries,
                       int32_t query_dtype, int64_t num_queries, const int64_t *ids,
                       int64_t num_ids, const float *bias, float scale, float softcap, float *out,
                       float *lse);

/* What hides entries: a query sees those at its own position and before. */
typedef struct hkv_visible {
  const int64_t *positions; /* [batch, count of keys] */
  int64_t row_step;         /* from one batch row to the next */
  const int64_t *newest;    /* [batch] position of the newest token */
  int64_t new_tokens;       /* query m is that of token m % new_tokens, the last one the newest */
} hkv_visible;

/* Every row of a KV head for each of its queries; made for few of them.
 *
 * queries: [batch, heads, num_queries, dim of keys] of `query_dtype`.
 * visible: NULL where every query sees every row.
 * out: [batch, heads, num_queries, dim of values]; lse: [batch, heads, num_queries].
 */
HKV_API int hkv_attend_rows(hkv_pool *pool, int32_t batch, int32_t heads, const hkv_kv *kv,
                            const void *queries, int32_t query_dtype, int64_t num_queries,
                            const hkv_visible *visible, float scale, float softcap, float *out,
                            float *lse);

/* Queries of the tokens of a prompt. */
typedef struct hkv_prompt {
  const void *queries; /* [batch, heads * group, tokens, dim of keys], each in one piece */
  int64_t step[3];     /* elements from one batch row, query head and token to the next */
  int64_t tokens;
  int64_t group;  /* query heads of a KV head, which lie next to each other */
  int64_t window; /* newest rows that a query sees; 0 for all */
  int32_t dtype;  /* of the queries */
  int32_t causal; /* whether the tokens are the newest rows, each seen by itself and later ones */
  /* Of block-sparse attention, which is causal and has no window: the blocks of HKV_KEY_BLOCK keys
   * that are read, for each block of `block` tokens. Of it count the blocks that end before the
   * block's first token; all rows behind those are read. NULL where every row is. */
  const uint8_t *listed; /* [batch, heads, ceil(tokens / block), count of keys / HKV_KEY_BLOCK] */
  int64_t block;
  /* [tokens] row of each token, ascending, where they are some tokens of a prompt: each sees the
   * rows up to its own. Causal, without window or blocks. NULL where they are the newest rows. */
  const int64_t *positions;
  int32_t arithmetic; /* enum hkv_arithmetic, one that `hkv_has_arithmetic` */
} hkv_prompt;

/* Products in float32, of anything; or of pairs of bfloat16, of which queries, keys and values are
 * then, summed in float32 in vectors or by AMX: weights are rounded to it. */
enum hkv_arithmetic { HKV_FLOATS = 0, HKV_PAIRS = 1, HKV_AMX = 2 };

#define HKV_KEY_BLOCK 64

/* 1 where this CPU, its kernel and this library have the arithmetic, else 0. */
HKV_API int hkv_has_arithmetic(int32_t arithmetic);

/* The rows of a KV head that each of its queries sees; made for many of them.
 *
 * out: [batch, heads * group, tokens, dim of values] of the queries' dtype;
 * lse: [batch, heads * group, tokens].
 * masses: [batch, heads * group, count of keys] softmax weights that each row got from all tokens;
 * NULL where nobody asks, as for block-sparse attention. Threads share the KV heads then, not
 * their tokens.
 * block_masses: [batch, heads * group, tokens, count of keys / HKV_KEY_BLOCK] softmax weights that
 * each block of keys got from each token; NULL where nobody asks. Values are not read where out is
 * NULL, as it may be then.
 */
HKV_API int hkv_attend_prompt(hkv_pool *pool, int32_t batch, int32_t heads, const hkv_kv *kv,
                              const hkv_prompt *asked, float scale, float softcap, void *out,
                              float *lse, float *masses, float *block_masses);

/* Rows of all KV heads in one array, which each head has some of. */
typedef struct hkv_ragged {
  hkv_keys keys;          /* all rows */
  hkv_keys values;        /* as many rows and the same dtype as keys; dim may differ */
  const int64_t *starts;  /* [heads] first row of each head */
  const int64_t *lengths; /* [heads] rows of each head, which lie one after the other */
  const float *bias;      /* [rows] added to the logits; NULL for none */
} hkv_ragged;

/* Every row of a KV head for each of its queries, with as many rows as the head has.
 *
 * queries: [heads, num_queries, dim of keys] of `query_dtype`.
 * out: [heads, num_queries, dim of values]; lse: [heads, num_queries].
 */
HKV_API int hkv_attend_ragged(hkv_pool *pool, int32_t heads, const hkv_ragged *rows,
                              const void *queries, int32_t query_dtype, int64_t num_queries,
                              float scale, float softcap, float *out, float *lse);

typedef struct hkv_part {
  const void *out;  /* [rows, dim] of `dtype`, normalised within the part */
  const float *lse; /* [rows] */
  int32_t dtype;
} hkv_part;

/* Attention over the union of disjoint parts: out [rows, dim] of `dtype` and lse [rows], which may
 * be those of a part of the same dtype. Where every part is empty so is the result.
 */
HKV_API int hkv_merge(hkv_pool *pool, int32_t num_parts, const hkv_part *parts, int64_t rows,
                      int32_t dim, int32_t dtype, void *out, float *lse);

#ifdef __cplusplus
}
#endif
#endif
