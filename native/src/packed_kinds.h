// What blocks of packed weights hold: the layouts of GGUF, decoded in plain C++.
//
// A weight is scale * code + offset; a scale and an offset belong to `kScaleValues` weights. Codes fit
// into signed bytes for every kind.
#pragma once

#include <cstdint>
#include <cstring>

#include "convert.h"
#include "hybrid_kv_packed.h"

namespace hkv {

inline float half_at(const uint8_t *at) {
  Half value;
  std::memcpy(&value, at, sizeof value);
  return to_float(value);
}

/// Q4_0, Q4_1, Q5_0, Q5_1: scale, then the offset if it is no constant, the codes' fifth bits, and
/// their lower four bits: of values 0 to 15 in the lower half of each byte.
template <int Kind, int Bits, bool HasMin>
struct Simple {
  static constexpr int kKind = Kind, kValues = 32, kScaleValues = 32;
  static constexpr int kHigh = HasMin ? 4 : 2, kLow = kHigh + (Bits == 5 ? 4 : 0);
  static constexpr int kBytes = kLow + 16;
  static constexpr int kBits = Bits;
  static constexpr bool kHasMin = HasMin, kHasOffset = true, kSigned = false;
  static constexpr float kMid = 1 << (Bits - 1);

  static void decode(const uint8_t *block, int8_t *codes, float *scales, float *offsets) {
    scales[0] = half_at(block);
    offsets[0] = HasMin ? half_at(block + 2) : -kMid * scales[0];
    uint32_t high = 0;
    if (Bits == 5) std::memcpy(&high, block + kHigh, sizeof high);
    for (int i = 0; i < 16; ++i) {
      codes[i] = static_cast<int8_t>((block[kLow + i] & 15) | (high >> i & 1) << 4);
      codes[i + 16] = static_cast<int8_t>(block[kLow + i] >> 4 | (high >> (i + 16) & 1) << 4);
    }
  }
};
using Q4_0 = Simple<HKV_Q4_0, 4, false>;
using Q4_1 = Simple<HKV_Q4_1, 4, true>;
using Q5_0 = Simple<HKV_Q5_0, 5, false>;
using Q5_1 = Simple<HKV_Q5_1, 5, true>;

/// A scale and signed bytes.
struct Q8_0 {
  static constexpr int kKind = HKV_Q8_0, kValues = 32, kScaleValues = 32, kBytes = 34, kBits = 8;
  static constexpr bool kHasMin = false, kHasOffset = false, kSigned = true;
  static constexpr int kLowest = -128;  // code

  static void decode(const uint8_t *block, int8_t *codes, float *scales, float *) {
    scales[0] = half_at(block);
    std::memcpy(codes, block + 2, 32);
  }
};

/// 2^(exponent - 128): half of what the exponent stands for, since MXFP4's levels are doubled.
inline float half_power(uint8_t exponent) {
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr int8_t kNonlinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
/// Twice the floats of four bits, with a sign, two bits of exponent and one of mantissa.
constexpr int8_t kDoubledFloats[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                       0, -1, -2, -3, -4, -6, -8, -12};

constexpr int lowest_of(const int8_t (&levels)[16]) {
  int lowest = 0;
  for (const int8_t level : levels) lowest = level < lowest ? level : lowest;
  return lowest;
}

/// As Q4_0, with 16 levels that are denser around zero. The scale is a 16-bit float, or of one byte a
/// power of two.
template <int Kind, int ScaleBytes, const int8_t (&Of)[16]>
struct Levels {
  static constexpr int kKind = Kind, kValues = 32, kScaleValues = 32, kBits = 8;
  static constexpr int kLow = ScaleBytes, kBytes = kLow + 16;
  static constexpr bool kHasMin = false, kHasOffset = false, kSigned = true;
  static constexpr const int8_t *kLevels = Of;
  static constexpr int kLowest = lowest_of(Of);

  static void decode(const uint8_t *block, int8_t *codes, float *scales, float *) {
    scales[0] = ScaleBytes == 1 ? half_power(block[0]) : half_at(block);
    for (int i = 0; i < 16; ++i) {
      codes[i] = kLevels[block[kLow + i] & 15];
      codes[i + 16] = kLevels[block[kLow + i] >> 4];
    }
  }
};
using IQ4_NL = Levels<HKV_IQ4_NL, 2, kNonlinear>;
using MXFP4 = Levels<HKV_MXFP4, 1, kDoubledFloats>;

/// The 6-bit scales and minima of the eight parts of a block of Q4_K or Q5_K, from their 12 bytes:
/// four and four of which the upper bits belong to parts 4 to 7, then these parts' lower halves.
inline void unpack_parts(const uint8_t *packed, uint8_t *scales, uint8_t *minima) {
  uint32_t words[3];
  std::memcpy(words, packed, sizeof words);
  const uint32_t sixes = 0x3f3f3f3f, halves = 0x0f0f0f0f, upper = 0x30303030;
  const uint32_t parts[4] = {words[0] & sixes, (words[2] & halves) | (words[0] >> 2 & upper),
                             words[1] & sixes, (words[2] >> 4 & halves) | (words[1] >> 2 & upper)};
  std::memcpy(scales, parts, 8);
  std::memcpy(minima, parts + 2, 8);
}

/// Q4_K and Q5_K: a scale of scales, one of minima, both in 6 bits for eight parts of 32 values, the
/// codes' fifth bits by parts, and their lower four bits: two parts in the halves of 32 bytes.
template <int Kind, int Bits>
struct Parts {
  static constexpr int kKind = Kind, kValues = 256, kScaleValues = 32;
  static constexpr int kHigh = 16, kLow = kHigh + (Bits == 5 ? 32 : 0), kBytes = kLow + 128;
  static constexpr int kBits = Bits;
  static constexpr bool kHasOffset = true, kSigned = false;

  static void decode(const uint8_t *block, int8_t *codes, float *scales, float *offsets) {
    const float scale = half_at(block), least = half_at(block + 2);
    uint8_t of_scales[8], of_minima[8];
    unpack_parts(block + 4, of_scales, of_minima);
    for (int part = 0; part < 8; ++part) {
      scales[part] = scale * of_scales[part];
      offsets[part] = -least * of_minima[part];
      const uint8_t *low = block + kLow + part / 2 * 32, *high = block + kHigh;
      for (int i = 0; i < 32; ++i)
        codes[part * 32 + i] = static_cast<int8_t>(
            (low[i] >> part % 2 * 4 & 15) | (Bits == 5 ? (high[i] >> part & 1) << 4 : 0));
    }
  }
};
using Q4_K = Parts<HKV_Q4_K, 4>;
using Q5_K = Parts<HKV_Q5_K, 5>;

/// Lower four bits, upper two, scales of 16 values in 8 bits, and a scale of them.
struct Q6_K {
  static constexpr int kKind = HKV_Q6_K, kValues = 256, kScaleValues = 16, kBytes = 210, kBits = 6;
  static constexpr int kHigh = 128, kScales = 192, kScale = 208;
  static constexpr bool kHasOffset = true, kSigned = false;
  static constexpr float kMid = 32;

  static void decode(const uint8_t *block, int8_t *codes, float *scales, float *offsets) {
    const float scale = half_at(block + kScale);
    for (int i = 0; i < 16; ++i) {
      scales[i] = scale * static_cast<int8_t>(block[kScales + i]);
      offsets[i] = -kMid * scales[i];
    }
    for (int part = 0; part < 8; ++part) {  // of 32 values
      const uint8_t *low = block + part / 4 * 64 + part % 2 * 32;
      const uint8_t *high = block + kHigh + part / 4 * 32;
      for (int i = 0; i < 32; ++i)
        codes[part * 32 + i] = static_cast<int8_t>((low[i] >> part % 4 / 2 * 4 & 15) |
                                                   (high[i] >> part % 4 * 2 & 3) << 4);
    }
  }
};

/// Calls body with a value of the kind's type.
template <typename Body>
void with_kind(int32_t kind, Body &&body) {
  switch (kind) {
    case HKV_Q4_0: return body(Q4_0());
    case HKV_Q4_1: return body(Q4_1());
    case HKV_Q5_0: return body(Q5_0());
    case HKV_Q5_1: return body(Q5_1());
    case HKV_Q8_0: return body(Q8_0());
    case HKV_Q4_K: return body(Q4_K());
    case HKV_Q5_K: return body(Q5_K());
    case HKV_Q6_K: return body(Q6_K());
    case HKV_IQ4_NL: return body(IQ4_NL());
    case HKV_MXFP4: return body(MXFP4());
    default:
      throw Invalid(
          "kind must be Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 (8), Q4_K (12), Q5_K (13), "
          "Q6_K (14), IQ4_NL (20) or MXFP4 (39)");
  }
}

}  // namespace hkv
