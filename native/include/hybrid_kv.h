/* The engine's C door: plain C, no Python, no torch, no global state beside the last error.
 *
 * One library is built per instruction set (see `hkv_isa`); all of them have these symbols, and the
 * caller loads the one that its CPU can run. Every function that can fail returns HKV_OK or a
 * status below and leaves a sentence in `hkv_last_error` of the calling thread. Sizes are elements
 * unless a name says bytes; arrays are row-major and belong to the caller.
 */
#ifndef HYBRID_KV_H
#define HYBRID_KV_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HKV_API __attribute__((visibility("default")))

/* Raised with every change of a signature or of a struct below; the caller refuses another one. */
#define HKV_ABI_VERSION 29

enum hkv_status {
  HKV_OK = 0,
  HKV_INVALID = 1,   /* an argument is out of range */
  HKV_NO_MEMORY = 2, /* an allocation failed; results are unfinished, and the call may be repeated */
  HKV_FAILED = 3,    /* anything else */
  HKV_NOT_FINITE = 4 /* an array holds NaN or infinity where that cannot be */
};

enum hkv_dtype { HKV_F32 = 0, HKV_F16 = 1, HKV_BF16 = 2 };

/* Of a gated feed-forward; the last of experts alone. */
enum hkv_activation { HKV_SILU = 0, HKV_GELU_TANH = 1, HKV_CLAMPED_SILU = 2 };

HKV_API int hkv_abi_version(void);

/* "baseline", "avx2", "avxvnni" or "avx512": what this library was compiled for. */
HKV_API const char *hkv_isa(void);

/* Those of these names that this CPU and its operating system can run, the fastest last, with spaces
 * between them. Ask the library of "baseline": no other is sure to get as far as the answer. */
HKV_API const char *hkv_runnable_isas(void);

/* What went wrong last on this thread; valid until its next call. */
HKV_API const char *hkv_last_error(void);

/* Worker threads that spin for a while before they sleep. The caller of a parallel function works
 * too, so that `threads` = 1 starts no thread. One parallel call runs at a time; others wait.
 * affinity: CPU numbers to pin the workers to in turn, or NULL; num_affinity of them.
 */
typedef struct hkv_pool hkv_pool;
HKV_API int hkv_pool_create(int32_t threads, const int32_t *affinity, int32_t num_affinity,
                            hkv_pool **pool);
/* Stops the workers, when the loop that runs has ended; calls that have the pool, and later ones, run
 * on their own threads from then on. */
HKV_API int hkv_pool_close(hkv_pool *pool);
/* No call may have the pool any more. */
HKV_API void hkv_pool_destroy(hkv_pool *pool);
HKV_API int32_t hkv_pool_threads(const hkv_pool *pool);

#ifdef __cplusplus
}
#endif
#endif
