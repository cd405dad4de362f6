/* One decode step of one layer and batch row in one call: cold entries are searched, ranked exactly
 * and attended by the scores of their ranking; resident pages are attended where they lie, all of
 * them or those of the highest bounds; the parts are merged. The step's token is stored before, where
 * it has not been yet. A layer without resident pages is the host's part of a step of a device.
 *
 * A layer is described once, when it changes; a step says what is new in each call.
 */
#ifndef HYBRID_KV_STEP_H
#define HYBRID_KV_STEP_H

#include "hybrid_kv_attend.h"
#include "hybrid_kv_flat.h"
#include "hybrid_kv_graph.h"
#include "hybrid_kv_pages.h"
#include "hybrid_kv_sketch.h"

#ifdef __cplusplus
extern "C" {
#endif

enum hkv_search_kind { HKV_SEARCH_FLAT = 0, HKV_SEARCH_GRAPH = 1, HKV_SEARCH_SKETCH = 2 };

/* How some KV heads are searched; a head may be in several of a layer's searches. */
typedef struct hkv_search {
  int32_t kind;           /* enum hkv_search_kind */
  int32_t num_heads;
  const int32_t *heads;   /* [num_heads] which KV heads of the layer */
  const void *head;       /* [num_heads] hkv_flat_head, hkv_graph_head or hkv_sketch_head */
  int64_t first_row;      /* row of the extent's entries that the first key of these is */
  int64_t width;          /* results per query */
  int64_t num_ranked;     /* flat: `rerank`; graph: `pool_size`; sketches say it by head */
  const int32_t *beams;   /* graph: [num_heads] */
  const int32_t *walks;   /* graph: [num_heads] */
  int32_t num_expanded;   /* graph: `width` */
} hkv_search;

/* The entries of every KV head of an extent as Gaussians over keys and values, one for each cluster of keys
 * with covariances in common, all float32: what a query does not find is attended as the part of them below
 * the lowest logit that it found, with the mean logit and the mean value of what it did not find.
 */
typedef struct hkv_tail {
  const float *shares;              /* [heads, clusters] of the entries */
  const float *keys, *values;       /* [heads, clusters, dim] means; NULL: what is not found is left out */
  const float *key_key, *key_value; /* [heads, dim of keys, dim] covariances about these */
  int64_t clusters;                 /* at least 1 */
  int32_t first_order;              /* not 0: by the mean logit alone, and without a limit */
  int64_t entries; /* that are searched, where those of the extent are a pool of several rows'; 0: all of it */
} hkv_tail;

/* Cold entries that lie together, and what finds them. */
typedef struct hkv_extent {
  hkv_kv kv; /* of all KV heads, those that the row sees: what a search finds behind them is passed
              * over; keys are read by the searches, or to rank what a step names */
  const hkv_search *searches;
  int32_t num_searches; /* at least 1 */
  hkv_tail tail;
} hkv_extent;

/* The cold entries of the row, numbered from the first extent's first on. */
typedef struct hkv_cold {
  const hkv_extent *extents;
  int32_t num_extents; /* 0: nothing is cold */
  int64_t width;       /* entries that a query attends, at most: the best of all searches */
} hkv_cold;

typedef struct hkv_resident {
  hkv_kv kv;            /* the pages of all KV heads: page p has rows p * page_size and so on */
  const int64_t *slots; /* [num_pages] pages of the row, the newest last */
  int64_t num_pages;
  int64_t page_size;
  int64_t num_chosen;  /* pages that a KV head attends; num_pages for all */
  int64_t oldest;      /* of the row's first pages so many are always chosen */
  int64_t newest;      /* and of its last ones, at least 1 */
  hkv_page_digests digests; /* of the first KV head, by slot; read only where pages are chosen */
  int64_t digest_step;      /* elements from one KV head to the next, alike in both */
} hkv_resident;

typedef struct hkv_layer {
  int32_t heads;
  int64_t num_queries; /* of each KV head: the query heads of one token */
  hkv_resident resident;
  hkv_cold cold;
  const hkv_pages *pages; /* the same pages as `resident.kv`, to store tokens in; or NULL */
  const hkv_kv *whole;    /* [num_whole] cold entries of all KV heads that every query attends */
  int32_t num_whole;
} hkv_layer;

typedef struct hkv_step {
  const void *queries; /* [heads, num_queries, dim of keys] of `query_dtype` */
  int32_t query_dtype;
  int32_t out_dtype;
  int64_t tail_fill; /* filled tokens of the newest page, the new one among them */
  float scale, softcap; /* as in hkv_attend */
  const int64_t *warm;  /* [heads, num_queries, num_warm] entries where graphs start; or NULL */
  int64_t num_warm;
  int64_t *ids; /* [heads, num_queries, cold.width] what is attended, best first, then -1 */
  void *out;    /* [heads, num_queries, dim of values] of `out_dtype` */
  float *lse;   /* [heads, num_queries] */
  const void *new_keys, *new_values; /* of a token to store, of head h at h * step elements; or NULL */
  int64_t new_key_step, new_value_step, new_position;
  const int64_t *named; /* [heads, num_queries, num_named] cold entries, each once for a query, -1
                         * for none, which are ranked in the place of the searches; or NULL */
  int64_t num_named;
  /* [heads, num_queries, num_found] what the searches of the first extent would find, its rows, best
   * first, then -1, and their scores: that extent is not searched; or NULL */
  const int64_t *found;
  const float *found_scores;
  int64_t num_found;
  float *estimated; /* [heads, num_queries] the part of `lse` that is estimated, -inf for none; or NULL */
  /* [heads, num_queries] |out - out'| / |out|, where out' is what the step gives if of the n entries that a
   * query has found only the floor(n / 2) best are read: the same scores, the unread estimated with fewer
   * read and the lowest logit of those as the limit, pages and extents attended whole as they are. 0 where
   * nothing is found; of one found entry out' reads none. In float32, before rounding to out_dtype. Or NULL */
  float *half;
} hkv_step;

/* Seconds by part of the work, and counts. */
typedef struct hkv_step_report {
  double search_s, cold_s, select_s, resident_s, merge_s;
  int64_t scored;         /* dot products spent on choosing */
  int64_t retrieved;      /* cold entries attended by all queries together */
  int64_t most_retrieved; /* by one of them at most */
  int64_t rows_read;      /* cold values that were read, each once for the queries of its head */
} hkv_step_report;

/* Where it fails, no token was stored: its place in the newest page is still free, and its position is
 * written last. HKV_NOT_FINITE: a key of the new token is NaN or infinite.
 */
HKV_API int hkv_attend_step(hkv_pool *pool, const hkv_layer *layer, const hkv_step *step,
                            hkv_step_report *report);

/* One step as hkv_attend_step takes it. */
typedef struct hkv_one_step {
  const hkv_layer *layer;
  const hkv_step *step;
  hkv_step_report *report;
  int32_t status; /* is written: what that call returns */
} hkv_one_step;

/* Steps that have nothing in common, such as those of several rows: the pool's threads share them out,
 * or the work of each where these are fewer. One that fails leaves the others alone.
 */
HKV_API int hkv_attend_steps(hkv_pool *pool, int64_t num_steps, hkv_one_step *steps);

#ifdef __cplusplus
}
#endif
#endif
