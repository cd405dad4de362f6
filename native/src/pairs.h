// Products of pairs of bfloat16, summed in float32. The library for AVX-512 has them and runs on
// CPUs without them too: ask `has_pairs` first.
#pragma once

#include "convert.h"

#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 10)
#define HKV_HAS_PAIRS 1
#else
#define HKV_HAS_PAIRS 0
#endif

namespace hkv {

inline bool has_pairs() {
#if HKV_HAS_PAIRS
  static const bool has = __builtin_cpu_supports("avx512bf16") != 0;
  return has;
#else
  return false;
#endif
}

#if HKV_HAS_PAIRS

/// sums[i] + the product of pair i of `a` with pair i of `b`, elements 2 i and 2 i + 1. Written as
/// the instruction: an intrinsic would need all that it is inlined into compiled for it.
HKV_INLINE inline Floats add_pairs(Floats sums, Words a, Words b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
  return sums;
}

#endif

/// Stores in bfloat16, to nearest, ties to even; NaN stays one, and what is subnormal may become 0.
HKV_INLINE inline void store_bfloats(Bfloat *to, Floats values) {
#if HKV_HAS_PAIRS && !defined(HKV_EMULATED_AMX)
  __m256i rounded;
  asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(values));
  std::memcpy(to, &rounded, sizeof rounded);
#else
  for (int lane = 0; lane < kLanes; ++lane) round_to(values[lane], to[lane]);
#endif
}

}  // namespace hkv
