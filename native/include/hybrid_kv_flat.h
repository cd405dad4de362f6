/* The flat scan: every key of every KV head of a layer is scored, the best are returned.
 *
 * Results are sorted, best first; of equal scores the lower id comes first. Places without a key
 * hold id -1 and score -inf.
 */
#ifndef HYBRID_KV_FLAT_H
#define HYBRID_KV_FLAT_H

#include "hybrid_kv_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct hkv_flat_head {
  hkv_keys keys;                  /* scored where quantised is NULL; else only re-ranked */
  const hkv_quantised *quantised; /* its blocks are scored; or NULL */
} hkv_flat_head;

enum hkv_id_type { HKV_IDS_INT32 = 0, HKV_IDS_INT64 = 1 };

/* The best `top_k` keys of every query by dot product.
 *
 * queries: [heads, num_queries, dim]; a key is read once for up to 16 of them. All heads have the
 * same dim.
 * rerank: with quantised keys, so many candidates (at least top_k) are scored again with `keys`;
 * 0 returns the scores of the codes.
 * ids, scores: [heads, num_queries, top_k].
 * scored: how many scores were computed; or NULL.
 */
HKV_API int hkv_flat_search(hkv_pool *pool, int32_t heads, const hkv_flat_head *head,
                            const float *queries, int64_t num_queries, int64_t top_k,
                            int64_t rerank, int32_t id_type, void *ids, float *scores,
                            int64_t *scored);

/* As hkv_flat_search for one head and very many queries, which come in any dtype and stride:
 * blocks of keys stay in the cache for many queries, which are divided over the threads.
 *
 * scores: [queries.count, top_k] or NULL.
 */
HKV_API int hkv_knn(hkv_pool *pool, const hkv_flat_head *head, const hkv_keys *queries,
                    int64_t top_k, int64_t rerank, int32_t id_type, void *ids, float *scores);

/* Sums the bytes at `data`, a multiple of 64, as fast as one core can read them. */
HKV_API uint64_t hkv_stream(const void *data, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
