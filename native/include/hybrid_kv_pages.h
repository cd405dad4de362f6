/* Upper bounds of the scores of whole pages, from the least and greatest value of every channel.
 *
 * The bound of a page is the sum over channels of max(q low, q high): no key of the page scores
 * higher (Quest, Tang et al. 2024, section 3.3).
 */
#ifndef HYBRID_KV_PAGES_H
#define HYBRID_KV_PAGES_H

#include "hybrid_kv_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The pages of a layer as they lie in memory, to be written. */
typedef struct hkv_pages {
  void *keys;         /* [heads, slots, page_size, dim] of `dtype` */
  void *values;       /* [heads, slots, page_size, value_dim] of `dtype` */
  int64_t *positions; /* [slots, page_size] */
  void *lows, *highs; /* [heads, slots, dim] of `dtype`: the least and greatest keys; or NULL */
  int64_t slots, page_size;
  int32_t heads, dim, value_dim, dtype;
} hkv_pages;

/* Stores one token at place `offset` of a page whose earlier places are filled, and its page's digest
 * anew. Keys and values of head h are at h * step elements.
 */
HKV_API int hkv_append(const hkv_pages *pages, const void *keys, int64_t key_step,
                       const void *values, int64_t value_step, int64_t slot, int64_t offset,
                       int64_t position);

/* One row per page in each; the two may be halves of longer rows. */
typedef struct hkv_page_digests {
  hkv_keys lows;
  hkv_keys highs; /* as many rows, the same dim and dtype */
} hkv_page_digests;

/* Bounds of all pages: scores [heads, num_queries, num_pages]; all heads have as many pages.
 *
 * queries: [heads, num_queries, dim]; a page is read once for up to 16 of them.
 */
HKV_API int hkv_page_scores(hkv_pool *pool, int32_t heads, const hkv_page_digests *head,
                            const float *queries, int64_t num_queries, float *scores);

/* The `count` pages with the highest bounds, best first; of equal ones the lower page comes first.
 *
 * pages, scores: [heads, num_queries, count]; places without a page hold -1 and -infinity.
 */
HKV_API int hkv_page_search(hkv_pool *pool, int32_t heads, const hkv_page_digests *head,
                            const float *queries, int64_t num_queries, int64_t count,
                            int64_t *pages, float *scores);

#ifdef __cplusplus
}
#endif
#endif
