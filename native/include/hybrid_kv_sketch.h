/* A sketch: short codes of the keys of one head in the metric of its queries, and their search.
 *
 * A key k becomes codes u = clip(round(A k + start), 0, 2^bits - 1), a query q becomes x = B q and
 * signed codes s = round(x / scale), and
 *
 *     q . k  ~  scale * (sum(u * s) - sum(zero * s)),  zero = (2^bits - 1) / 2,
 *
 * up to a term that all keys of the head share. Projections are sums in the order of the channels,
 * exact scores sums in 16 lanes that are halved four times; all products and sums are rounded one by
 * one, so that every library gives the same bits.
 *
 * Blocks: 16 keys in lines of 64 bytes, 4 bytes of each key. A byte is one code of 8 bits, or codes
 * of several quads of 4 dims, the first quad of the line in its lowest bits. Lines of 8-bit codes come
 * first, then those of 4 and of 2 bits.
 */
#ifndef HYBRID_KV_SKETCH_H
#define HYBRID_KV_SKETCH_H

#include "hybrid_kv_rows.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HKV_SKETCH_DIMS 256 /* at most so many dims; sums of products stay exact in float32 */

typedef struct hkv_sketch_map {
  const float *key_columns;   /* A as [dim, room], room = dims of a code rounded up to 16 with 0 */
  const float *query_columns; /* B as [dim, room] */
  const float *start;         /* [room] */
  int32_t dim;                /* channels of a key */
  int32_t lines_of_8, lines_of_4, lines_of_2; /* lines of a block by the bits of their codes */
} hkv_sketch_map;

typedef struct hkv_sketch_tier {
  const hkv_sketch_map *map;
  const uint8_t *blocks; /* [ceil(count / 16), lines, 64], on 64 bytes */
  const int32_t *ids;    /* [count] rows of the keys, ascending; NULL where they are all in order */
  int64_t count;
  /* Keys in pages, as a paged KV cache has them; ids are NULL then. Place p is token first + p of its
   * sequence, in slot (first + p) % page_keys of page n = pages[(first + p) / page_keys]: that is row
   * first_row + n * page_rows + slot of the keys, and the blocks of page n begin at
   * blocks + n * page_bytes. NULL where the blocks lie in one piece. */
  const int32_t *pages;
  int32_t page_keys; /* a multiple of 16 */
  int32_t first;     /* a multiple of 16 */
  int64_t page_rows, page_bytes, first_row;
} hkv_sketch_tier;

typedef struct hkv_sketch_head {
  hkv_keys keys;
  const hkv_sketch_tier *tiers;
  int32_t num_tiers;
  int64_t num_rerank;  /* so many keys of the tiers are ranked exactly, at least 1 */
  int64_t first_exact; /* rows from there on are in no tier and are ranked exactly */
} hkv_sketch_head;

/* Bytes of a block; 0 where the map's lines are none or too many. */
HKV_API int64_t hkv_sketch_block_bytes(const hkv_sketch_map *map);

/* Writes the codes of some rows of keys, the first at place `first`, into blocks with room for them.
 *
 * rows: [num_rows], within the keys. The first row that is not finite is an error, HKV_NOT_FINITE;
 * what was written from `first` on then means nothing.
 */
HKV_API int hkv_sketch_encode(hkv_pool *pool, const hkv_sketch_map *map, const hkv_keys *keys,
                              const int32_t *rows, int64_t num_rows, int64_t first,
                              uint8_t *blocks);

/* Writes the codes of places `first` .. count - 1 of tiers in pages, each of another head.
 *
 * keys: of each tier. The first row that is not finite is an error, HKV_NOT_FINITE; what was written
 * then means nothing.
 */
HKV_API int hkv_sketch_encode_pages(hkv_pool *pool, int32_t heads, const hkv_sketch_tier *tiers,
                                    const hkv_keys *keys, int64_t first);

/* The best `width` keys of every query among those that are ranked exactly.
 *
 * queries: [heads, num_queries, dim]; one that is not finite is an error, HKV_NOT_FINITE. Ranked are
 * the rows from first_exact on and, of all tiers together, the num_rerank best by their codes; of
 * equal ones those of earlier tiers and lower places. All heads have the same dim.
 * ids, scores: [heads, num_queries, width], best first, of equal scores the lower id; places without
 * a key hold -1 and -inf.
 * scored: scores computed, by codes and exactly. rows_read: rows whose keys were read, each once per
 * head for 64 queries. Both may be NULL.
 */
HKV_API int hkv_sketch_search(hkv_pool *pool, int32_t heads, const hkv_sketch_head *head,
                              const float *queries, int64_t num_queries, int64_t width,
                              int64_t *ids, float *scores, int64_t *scored, int64_t *rows_read);

#ifdef __cplusplus
}
#endif
#endif
