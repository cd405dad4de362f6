/* An attention-aware graph over the keys of one KV head, and its joint search.
 *
 * Only keys that some query retrieved are nodes of the graph, numbered in the order of the keys; most
 * others can never be found, and cost nothing. A graph is three plain arrays:
 *   keys_of   [num_nodes] int32: the key of each node, ascending
 *   lists     [num_nodes, hkv_graph_list_bytes] uint8: each node's neighbours, packed as
 *             hkv_graph_pack does
 *   entries   [num_entries] int32: nodes where a search starts, or -1
 * Keys from `linked` on are not part of the graph, or not yet: a search scans all of them, as
 * hkv_flat_search does, divided over the threads. A head without a graph has linked = 0.
 */
#ifndef HYBRID_KV_GRAPH_H
#define HYBRID_KV_GRAPH_H

#include "hybrid_kv.h"
#include "hybrid_kv_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HKV_POINT_DIMS 32
#define HKV_POINT_LIMIT 4095
#define HKV_MAX_DEGREE 256

/* What a graph is built from. Lists may hold -1 anywhere.
 * extra names further neighbours of each key, for example its nearest keys; NULL for none.
 */
typedef struct hkv_projection {
  const int32_t *lists; /* [num_queries, list_length] keys that a query retrieved, best first */
  const int32_t *extra; /* [num_keys, extra_length] or NULL */
  int64_t num_keys;
  int64_t num_queries;
  int32_t list_length;
  int32_t extra_length;
  int32_t degree;      /* longest list of neighbours, 1..256 */
  int32_t cap;         /* queries that a key's candidates are taken from, 2..255 */
  int32_t candidates;  /* the heaviest of these are considered as neighbours, at least 1 */
  int32_t num_entries; /* at least 1 */
  float alpha;         /* how much nearer an accepted neighbour must be to stand for another one */
  uint64_t seed;
} hkv_projection;

/* Gives a list to every key that `lists` or `extra` name and that has none: updates list_of
 * [num_keys] and num_lists, which are all -1 and 0 where there is no graph yet.
 */
HKV_API int hkv_graph_cover(const hkv_projection *projection, int32_t *list_of,
                            int64_t *num_lists);

/* Fills neighbours [num_lists, degree] from list `first_list` on, and links them from the lists
 * before, which hold a graph already. Fills entries [num_entries] if first_list is 0. Neighbours and
 * entries are numbers of lists; each list is padded at its end with -1.
 * points: [num_lists, 32], |value| <= 4095: where the queries see the key of each list; keys that
 * queries cannot tell apart lie close together.
 */
HKV_API int hkv_graph_project(hkv_pool *pool, const hkv_projection *projection,
                              const int32_t *list_of, int64_t num_lists, int64_t first_list,
                              const int16_t *points, int32_t *neighbours, int32_t *entries);

/* Bytes of one packed list: two for each of `degree` neighbours, rounded up to 16, and an eighth of a
 * byte for each bit beyond 16 that node numbers need; rounded up to whole words, or to cache lines
 * where that adds at most an eighth. 0 where degree or num_nodes is out of range.
 */
HKV_API int64_t hkv_graph_list_bytes(int32_t degree, int64_t num_nodes);

/* neighbours [num_nodes, degree] int32, padded with -1, to lists [num_nodes, hkv_graph_list_bytes]:
 * the low 16 bits of all neighbours, then a bitmap for each higher bit. Unpacking leaves -1 for none
 * wherever it stood. */
HKV_API int hkv_graph_pack(hkv_pool *pool, int32_t degree, int64_t num_nodes,
                           const int32_t *neighbours, uint8_t *lists);
HKV_API int hkv_graph_unpack(hkv_pool *pool, int32_t degree, int64_t num_nodes,
                             const uint8_t *lists, int32_t *neighbours);

/* One KV head that can be searched; everything belongs to the caller. */
typedef struct hkv_graph_head {
  hkv_keys keys;      /* originals, for exact scores */
  hkv_quantised rows; /* of the nodes, in rows */
  hkv_quantised tail; /* of keys[linked:], in blocks */
  const uint8_t *lists;
  const int32_t *keys_of;
  const int32_t *entries;
  int64_t linked;
  int64_t num_nodes;
  int32_t degree;
  int32_t num_entries;
} hkv_graph_head;

typedef struct hkv_graph_query {
  const int32_t *beams; /* [heads] only the best so many keys of a query are expanded */
  int32_t queries;      /* of each head; up to 16 of them walk together */
  int32_t top_k;        /* results per query */
  int32_t pool_size;    /* keys per query that are ranked exactly, at least top_k */
  int32_t width;        /* keys expanded per query and step */
  int32_t num_warm;     /* further keys per query where the search starts */
  float beta;           /* results score at most this much below the best; infinity for no limit */
  const int32_t *walks; /* [heads] how many walks share the queries, at least; NULL for one */
} hkv_graph_query;

/* Searches queries [heads, queries, dim] of all heads.
 * warm: [heads, queries, num_warm] int64, keys; -1 for none, and keys
 *       without a node are passed over; NULL if num_warm is 0
 * ids, scores: [heads, queries, top_k], exact scores, best first, then -1 and -infinity
 * rows, dots: [heads], keys read and dot products computed
 * Queries that walk together see each other's keys: of more walks each reads fewer and finds fewer.
 * What is found does not depend on the pool.
 */
HKV_API int hkv_graph_search(hkv_pool *pool, int32_t heads, const hkv_graph_head *head,
                             const hkv_graph_query *query, const float *queries,
                             const int64_t *warm, int64_t *ids, float *scores, int64_t *rows,
                             int64_t *dots);

#ifdef __cplusplus
}
#endif
#endif
