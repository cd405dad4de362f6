// 16-bit floats, and vectors of float32 as wide as the instruction set's.
#pragma once

#include <cstdint>
#include <cstring>

#include "error.h"
#include "hybrid_kv.h"

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

/// For what holds its sums in registers: as a call of its own it would pass them through memory. Builds
/// that do not optimise define it as nothing.
#ifndef HKV_INLINE
#define HKV_INLINE __attribute__((always_inline))
#endif

namespace hkv {

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(Bfloat value) {
  return bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}

inline float to_float(Half value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  // Moving the exponent and mantissa into place leaves a factor of 2^112, which also makes
  // subnormals right; infinity and NaN need the full exponent.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (rest >= 0x7c00u << 13) return bits_to_float(sign | rest | 0x7f800000u);
  const float magnitude = bits_to_float(rest) * 0x1p112f;
  return bits_to_float(sign | [&] {
           uint32_t bits;
           std::memcpy(&bits, &magnitude, sizeof bits);
           return bits;
         }());
#endif
}

template <typename Element>
Words load_words(const Element *from) {
  Words value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats load_floats(const float *from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Floats load_floats(const Half *from) {
#if defined(__AVX512F__)
  // The masked forms, here and below, spare GCC a warning about its own headers.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, bits);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#else
  Floats value;
  for (int i = 0; i < kLanes; ++i) value[i] = to_float(from[i]);
  return value;
#endif
}

inline Floats load_floats(const Bfloat *from) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return (Floats)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16);
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
  Floats value;
  for (int i = 0; i < kLanes; ++i) value[i] = to_float(from[i]);
  return value;
#endif
}

/// A product that is rounded before it is added: compilers would join the two operations into one
/// where the instruction set has it, and only there.
inline Floats rounded(Floats product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

inline void store_floats(float *to, Floats value) { std::memcpy(to, &value, sizeof value); }

/// A vector of 32-bit lanes, whatever numbers they are.
template <typename Number, typename Vector>
void store(Number *to, Vector value) {
  static_assert(sizeof(Number) == 4 && sizeof(Vector) == 4 * kLanes, "lanes are numbers");
  std::memcpy(to, &value, sizeof value);
}

template <typename Element>
void convert(const Element *from, int64_t count, float *to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_floats(to + i, load_floats(from + i));
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

inline void round_to(float value, float &to) { to = value; }

/// To nearest, ties to even; NaN stays one.
inline void round_to(float value, Bfloat &to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40u
                                         : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline void round_to(float value, Half &to) {
#if defined(__F16C__)
  to.bits = static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) {
    bits = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // 65520 and above round to infinity
    bits = 0x7c00u;
  } else if (bits >= 0x38800000u) {
    bits = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
  } else {  // adding 0.5 lines the mantissa up with that of a subnormal, and rounds it
    const float sum = bits_to_float(bits) + 0.5f;
    std::memcpy(&bits, &sum, sizeof bits);
    bits -= 0x3f000000u;
  }
  to.bits = static_cast<uint16_t>(sign | bits);
#endif
}

/// Calls body with a null pointer whose type is that of the elements.
template <typename Body>
void with_dtype(int32_t dtype, Body &&body) {
  switch (dtype) {
    case HKV_F32:
      return body(static_cast<const float *>(nullptr));
    case HKV_F16:
      return body(static_cast<const Half *>(nullptr));
    case HKV_BF16:
      return body(static_cast<const Bfloat *>(nullptr));
    default:
      throw Invalid("dtype must be float32 (0), float16 (1) or bfloat16 (2)");
  }
}

}  // namespace hkv
