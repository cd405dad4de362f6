/* Keys of one KV head, as the caller keeps them and quantised to 8 bits.
 *
 * A key k becomes x = (k - mean) / channel, and x becomes codes u = round(x / level) + 128, where
 * `level` is one of 256 logarithmic steps, rounded up so that no code overflows. A query q becomes
 * q' = q * channel and signed codes s = round(q' / scale). Then
 *
 *     q . k  ~  (sum(u * s) - 128 * sum(s)) * level * scale  +  q . mean
 *
 * where the last term is the same for all keys of the head.
 *
 * Two layouts hold the same codes:
 *   rows    one key after the other, each padded with 128 to hkv_row_bytes; a scale code per key
 *           lies in `scale_codes`, an index into `levels`. For reading single keys.
 *   blocks  16 keys interleaved: 64 bytes hold 4 consecutive channels of each of them, channels
 *           padded with 128 to a multiple of 4; the last 64 bytes are the 16 levels themselves,
 *           NaN where there is no key. For reading all keys in turn.
 */
#ifndef HYBRID_KV_ROWS_H
#define HYBRID_KV_ROWS_H

#include "hybrid_kv.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HKV_MAX_DIM 4096
#define HKV_LEVELS 256
#define HKV_BLOCK_KEYS 16

typedef struct hkv_keys {
  const void *data; /* [count, dim] of `dtype` */
  int64_t count;
  int64_t stride; /* elements from one row to the next, at least dim */
  int32_t dim;
  int32_t dtype; /* enum hkv_dtype */
} hkv_keys;

typedef struct hkv_quantised {
  float *mean;          /* [dim] */
  float *channel;       /* [dim], above 0 */
  float *levels;        /* [256], ascending, above 0 */
  uint8_t *rows;        /* [capacity, hkv_row_bytes(dim)], on 64 bytes; or NULL */
  uint8_t *scale_codes; /* [capacity]; NULL exactly where rows is */
  uint8_t *blocks;      /* [ceil(capacity / 16), hkv_block_bytes(dim)], on 64 bytes; or NULL */
  int64_t count;        /* keys held; written by the functions below */
  int64_t capacity;
  int32_t dim;
} hkv_quantised;

HKV_API int64_t hkv_row_bytes(int32_t dim);
HKV_API int64_t hkv_block_bytes(int32_t dim);

/* Takes statistics of all keys of each head and quantises them; replaces what was there. */
HKV_API int hkv_quantise(hkv_pool *pool, int32_t heads, const hkv_keys *keys,
                         hkv_quantised *quantised);

/* Quantises keys[count:] of each head with the statistics at hand; what they cannot represent is
 * clamped. */
HKV_API int hkv_quantise_append(hkv_pool *pool, int32_t heads, const hkv_keys *keys,
                                hkv_quantised *quantised);

/* One query for `quantised`: codes [hkv_row_bytes(dim)] padded with 0, scale, the sum of the codes
 * and q . mean. */
HKV_API int hkv_quantise_query(const hkv_quantised *quantised, const float *query, int8_t *codes,
                               float *scale, int32_t *sum, float *offset);

#ifdef __cplusplus
}
#endif
#endif
