/* Partial attention of queries over entries of their own, read where they lie.
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

typedef struct hkv_attend_head {
  hkv_keys keys;
  hkv_keys values; /* as many rows and the same dtype as keys; dim may differ */
} hkv_attend_head;

/* queries: [heads, num_queries, dim of keys]; all heads have the same dims.
 * ids: [heads, num_queries, num_ids] rows; negative ones are absent.
 * softcap: logits become softcap * tanh(logit / softcap); 0 for none.
 * out: [heads, num_queries, dim of values]; lse: [heads, num_queries].
 */
HKV_API int hkv_attend(hkv_pool *pool, int32_t heads, const hkv_attend_head *head,
                       const float *queries, int64_t num_queries, const int64_t *ids,
                       int64_t num_ids, float scale, float softcap, float *out, float *lse);

#ifdef __cplusplus
}
#endif
#endif
