// Codes, scales and offsets of packed weights in vectors of AVX2: of one row, and of eight rows side
// by side.
//
// Products of unsigned with signed bytes are what there is. Where they are added in 32 bits (VNNI),
// signed codes are multiplied less the lowest one, which the offset makes good: the less that is, the
// less of a float's precision goes into it. AVX2 alone adds pairs of them in 16 bits, which saturate,
// so that signed codes lend their signs to the inputs.
#pragma once

#if defined(__AVX2__)

#include <immintrin.h>

#include "packed_inputs.h"
#include "packed_kinds.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HKV_PACKED_VNNI 1
#else
#define HKV_PACKED_VNNI 0
#endif

namespace hkv {

/// Whether rows take two blocks at a time, which saves moving the upper halves of bytes.
template <typename Kind>
constexpr bool kPairs = false;
template <int Kind, int Bits, bool HasMin>
constexpr bool kPairs<Simple<Kind, Bits, HasMin>> = true;
template <int Kind, int ScaleBytes, const int8_t (&Of)[16]>
constexpr bool kPairs<Levels<Kind, ScaleBytes, Of>> = true;

template <typename Kind>
constexpr bool kBiased = HKV_PACKED_VNNI && Kind::kSigned;
template <typename Kind>
constexpr bool kWithOffset = Kind::kHasOffset || kBiased<Kind>;

inline __m256i load_32(const void *at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }
inline __m128i load_16(const void *at) { return _mm_loadu_si128(static_cast<const __m128i *>(at)); }
inline __m256i bytes_of(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline __m256i low_nibbles(__m256i bytes) { return _mm256_and_si256(bytes, bytes_of(15)); }
inline __m256i high_nibbles(__m256i bytes) {
  return low_nibbles(_mm256_srli_epi16(bytes, 4));
}
/// The lower and the upper halves of twice 16 bytes.
HKV_INLINE inline void split_pair(const uint8_t *first, const uint8_t *second, __m256i &low,
                                  __m256i &high) {
  const __m256i bytes =
      _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(first)), load_16(second), 1);
  low = low_nibbles(bytes);
  high = high_nibbles(bytes);
}
/// Bit `Bit` of each byte, as 16 or 0.
template <int Bit>
inline __m256i fifth_bits(__m256i bytes) {
  const __m256i moved = Bit <= 4 ? _mm256_slli_epi16(bytes, Bit <= 4 ? 4 - Bit : 0)
                                 : _mm256_srli_epi16(bytes, Bit > 4 ? Bit - 4 : 0);
  return _mm256_and_si256(moved, bytes_of(16));
}
/// Bits `Shift` and the next of each byte, as 0, 16, 32 or 48.
template <int Shift>
inline __m256i upper_bits(__m256i bytes) {
  const __m256i moved = Shift <= 4 ? _mm256_slli_epi16(bytes, Shift <= 4 ? 4 - Shift : 0)
                                   : _mm256_srli_epi16(bytes, Shift > 4 ? Shift - 4 : 0);
  return _mm256_and_si256(moved, bytes_of(48));
}
inline __m256i levels_of(const int8_t *levels, __m256i nibbles) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_16(levels)), nibbles);
}

// ---- One row.

template <typename Kind>
struct RowCodes;

/// The two halves at the beginning of each of eight blocks.
template <typename Kind>
inline void first_halves(const uint8_t *blocks, __m256 &first, __m256 &second) {
  const auto both = [&](int block) HKV_INLINE {
    const auto word = [&](int at) HKV_INLINE {
      int32_t halves;
      std::memcpy(&halves, blocks + at * Kind::kBytes, sizeof halves);
      return _mm_cvtsi32_si128(halves);
    };
    return _mm_unpacklo_epi16(word(block), word(block + 1));
  };
  const __m128i low = _mm_unpacklo_epi32(both(0), both(2));
  const __m128i high = _mm_unpacklo_epi32(both(4), both(6));
  first = _mm256_cvtph_ps(_mm_unpacklo_epi64(low, high));
  second = _mm256_cvtph_ps(_mm_unpackhi_epi64(low, high));
}

/// The scales of eight blocks that begin with a power of two, as `half_power`.
template <typename Kind>
inline __m256 first_powers(const uint8_t *blocks) {
  const auto at = [&](int block) { return static_cast<int>(blocks[block * Kind::kBytes]); };
  const __m256i exponents =
      _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(exponents, one), 23);
  const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponents);
  return _mm256_castsi256_ps(
      _mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(exponents, one)));
}

template <typename Kind>
constexpr int kChunkBytes = kChunkValues / Kind::kValues * Kind::kBytes;

/// A copy of a chunk's first `count` blocks with zeros behind, in [kChunkBytes<Kind>].
template <typename Kind>
const uint8_t *padded_chunk(const uint8_t *blocks, int count, uint8_t *copy) {
  std::memset(copy, 0, kChunkBytes<Kind>);
  std::memcpy(copy, blocks, static_cast<size_t>(count * Kind::kBytes));
  return copy;
}

/// What all kinds with blocks of 32 values have in common.
template <typename Kind>
struct ShortRow {
  static constexpr int kVectors = 1;  // of scales, for a chunk
  /// Of a chunk's first `count` blocks; 0 behind them, whatever lies there. Those are read, too.
  HKV_INLINE static void scales(const uint8_t *blocks, int count, __m256 *scales, __m256 *offsets) {
    __m256 second = _mm256_setzero_ps();
    if constexpr (Kind::kBytes == 17)
      scales[0] = first_powers<Kind>(blocks);
    else
      first_halves<Kind>(blocks, scales[0], second);
    if (count < 8) {
      const __m256 kept = _mm256_castsi256_ps(_mm256_cmpgt_epi32(
          _mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
      scales[0] = _mm256_and_ps(scales[0], kept);
      second = _mm256_and_ps(second, kept);
    }
    if constexpr (Kind::kHasMin)
      offsets[0] = second;
    else if constexpr (Kind::kHasOffset)
      offsets[0] = scales[0] * _mm256_set1_ps(-Kind::kMid);
  }
};

template <int Kind, int Bits, bool HasMin>
struct RowCodes<Simple<Kind, Bits, HasMin>> : ShortRow<Simple<Kind, Bits, HasMin>> {
  using Of = Simple<Kind, Bits, HasMin>;

  /// The fifth bits of two blocks' values 0 to 15, or 16 to 31, as 16 or 0.
  static __m256i fifths(__m256i words, int first_byte) {
    const __m256i spread = _mm256_shuffle_epi8(
        words, _mm256_add_epi8(_mm256_broadcastsi128_si256(_mm_set_epi64x(0x0101010101010101, 0)),
                               bytes_of(first_byte)));
    const __m256i mask = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, mask), mask);
    return _mm256_and_si256(is_set, bytes_of(16));
  }
  /// Values 0 to 15 of two blocks, and their values 16 to 31.
  HKV_INLINE static void pair(const uint8_t *first, const uint8_t *second, __m256i &low,
                              __m256i &high) {
    split_pair(first + Of::kLow, second + Of::kLow, low, high);
    if constexpr (Bits == 5) {
      const auto word = [](const uint8_t *block) {
        int32_t bits;
        std::memcpy(&bits, block + Of::kHigh, sizeof bits);
        return _mm_set1_epi32(bits);
      };
      const __m256i words =
          _mm256_inserti128_si256(_mm256_castsi128_si256(word(first)), word(second), 1);
      low = _mm256_or_si256(low, fifths(words, 0));
      high = _mm256_or_si256(high, fifths(words, 2));
    }
  }
};

template <>
struct RowCodes<Q8_0> : ShortRow<Q8_0> {
  template <int>
  static __m256i codes(const uint8_t *block) {
    return load_32(block + 2);
  }
};

template <int Kind, int ScaleBytes, const int8_t (&Of)[16]>
struct RowCodes<Levels<Kind, ScaleBytes, Of>> : ShortRow<Levels<Kind, ScaleBytes, Of>> {
  HKV_INLINE static void pair(const uint8_t *first, const uint8_t *second, __m256i &low,
                              __m256i &high) {
    split_pair(first + ScaleBytes, second + ScaleBytes, low, high);
    low = levels_of(Of, low);
    high = levels_of(Of, high);
  }
};

template <int Kind, int Bits>
struct RowCodes<Parts<Kind, Bits>> {
  using Of = Parts<Kind, Bits>;
  static constexpr int kVectors = 1;
  HKV_INLINE static void scales(const uint8_t *block, int, __m256 *scales, __m256 *offsets) {
    // As `unpack_parts`, in the lanes of a vector.
    const __m128i packed = load_16(block + 4);
    const __m128i sixes = _mm_shuffle_epi32(packed, 0x50);  // words 0, 0, 1, 1
    const __m128i halves =
        _mm_srlv_epi32(_mm_shuffle_epi32(packed, 0xaa), _mm_setr_epi32(0, 0, 0, 4));
    const __m128i parts = _mm_or_si128(
        _mm_and_si128(sixes, _mm_setr_epi32(0x3f3f3f3f, 0, 0x3f3f3f3f, 0)),
        _mm_or_si128(_mm_and_si128(halves, _mm_setr_epi32(0, 0x0f0f0f0f, 0, 0x0f0f0f0f)),
                     _mm_and_si128(_mm_srli_epi32(sixes, 2),
                                   _mm_setr_epi32(0, 0x30303030, 0, 0x30303030))));
    int32_t halves_of_block;
    std::memcpy(&halves_of_block, block, sizeof halves_of_block);
    const __m128 both = _mm_cvtph_ps(_mm_cvtsi32_si128(halves_of_block));
    scales[0] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(parts)) * _mm256_broadcastss_ps(both);
    offsets[0] = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(parts, 8))) *
                 _mm256_broadcastss_ps(-_mm_movehdup_ps(both));
  }
  template <int Part>
  static __m256i codes(const uint8_t *block) {
    const __m256i bytes = load_32(block + Of::kLow + Part / 2 * 32);
    const __m256i low = Part % 2 == 0 ? low_nibbles(bytes) : high_nibbles(bytes);
    if constexpr (Bits == 4) return low;
    return _mm256_or_si256(low, fifth_bits<Part>(load_32(block + Of::kHigh)));
  }
};

template <>
struct RowCodes<Q6_K> {
  static constexpr int kVectors = 2;
  HKV_INLINE static void scales(const uint8_t *block, int, __m256 *scales, __m256 *offsets) {
    const __m128i bytes = load_16(block + Q6_K::kScales);
    const __m256 scale = _mm256_set1_ps(half_at(block + Q6_K::kScale));
    scales[0] = scale * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    scales[1] = scale * _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
    for (int i = 0; i < 2; ++i) offsets[i] = scales[i] * _mm256_set1_ps(-Q6_K::kMid);
  }
  template <int Part>
  static __m256i codes(const uint8_t *block) {
    const __m256i bytes = load_32(block + Part / 4 * 64 + Part % 2 * 32);
    const __m256i low = Part % 4 < 2 ? low_nibbles(bytes) : high_nibbles(bytes);
    const __m256i high = load_32(block + Q6_K::kHigh + Part / 4 * 32);
    return _mm256_or_si256(low, upper_bits<Part % 4 * 2>(high));
  }
};

/// As `RowCodes::scales`, with what biased codes need.
template <typename Kind>
HKV_INLINE inline void row_scales(const uint8_t *blocks, int count, __m256 *scales, __m256 *offsets) {
  RowCodes<Kind>::scales(blocks, count, scales, offsets);
  if constexpr (kBiased<Kind>) offsets[0] = scales[0] * _mm256_set1_ps(Kind::kLowest);
}

template <typename Kind>
HKV_INLINE inline __m256i biased(__m256i codes) {
  if constexpr (kBiased<Kind>) codes = _mm256_sub_epi8(codes, bytes_of(Kind::kLowest));
  return codes;
}

template <typename Kind>
HKV_INLINE inline void row_pair(const uint8_t *first, const uint8_t *second, __m256i &low,
                                __m256i &high) {
  RowCodes<Kind>::pair(first, second, low, high);
  low = biased<Kind>(low);
  high = biased<Kind>(high);
}

/// The codes of a part of a block, in order.
template <typename Kind, int Part>
HKV_INLINE inline __m256i row_codes(const uint8_t *block) {
  if constexpr (kPairs<Kind>) {
    __m256i low, high;
    row_pair<Kind>(block, block, low, high);
    return _mm256_permute2x128_si256(low, high, 0x20);
  } else {
    return biased<Kind>(RowCodes<Kind>::template codes<Part>(block));
  }
}

// ---- Eight rows. In a vector lie four codes of each.

/// 16 bytes of eight rows, in four vectors.
inline void load_quads(const uint8_t *const rows[8], int64_t place, __m256i quads[4]) {
  __m256i both[4];  // a row and the fourth behind it
  for (int i = 0; i < 4; ++i)
    both[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_16(rows[i] + place)),
                                      load_16(rows[i + 4] + place), 1);
  const __m256i low01 = _mm256_unpacklo_epi32(both[0], both[1]);
  const __m256i high01 = _mm256_unpackhi_epi32(both[0], both[1]);
  const __m256i low23 = _mm256_unpacklo_epi32(both[2], both[3]);
  const __m256i high23 = _mm256_unpackhi_epi32(both[2], both[3]);
  quads[0] = _mm256_unpacklo_epi64(low01, low23);
  quads[1] = _mm256_unpackhi_epi64(low01, low23);
  quads[2] = _mm256_unpacklo_epi64(high01, high23);
  quads[3] = _mm256_unpackhi_epi64(high01, high23);
}

/// 4 bytes of eight rows.
inline __m256i load_words(const uint8_t *const rows[8], int64_t place) {
  const auto at = [&](int row) {
    int32_t word;
    std::memcpy(&word, rows[row] + place, sizeof word);
    return word;
  };
  return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}

/// Calls put(quad, codes) for the quads of one block; quad: a value's place over four.
template <typename Kind>
struct PanelCodes;

template <int Kind, int Bits, bool HasMin>
struct PanelCodes<Simple<Kind, Bits, HasMin>> {
  using Of = Simple<Kind, Bits, HasMin>;

  /// Bits 4 quad to 4 quad + 3 of each word, as 16 or 0 in its bytes.
  static __m256i fifth(__m256i words, int quad) {
    const __m256i first = _mm256_broadcastsi128_si256(
        _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    const __m256i spread = _mm256_shuffle_epi8(words, _mm256_add_epi8(first, bytes_of(quad / 2)));
    const __m256i mask = _mm256_set1_epi32(quad % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, mask), mask);
    return _mm256_and_si256(is_set, bytes_of(16));
  }

  template <typename Put>
  HKV_INLINE static void codes(const uint8_t *const rows[8], int64_t at, const Put &put) {
    __m256i quads[4];
    load_quads(rows, at + Of::kLow, quads);
    if constexpr (Bits == 4) {
      for (int i = 0; i < 4; ++i) put(i, low_nibbles(quads[i]));
      for (int i = 0; i < 4; ++i) put(i + 4, high_nibbles(quads[i]));
    } else {
      const __m256i words = load_words(rows, at + Of::kHigh);
      for (int i = 0; i < 4; ++i) put(i, _mm256_or_si256(low_nibbles(quads[i]), fifth(words, i)));
      for (int i = 0; i < 4; ++i)
        put(i + 4, _mm256_or_si256(high_nibbles(quads[i]), fifth(words, i + 4)));
    }
  }
};

template <>
struct PanelCodes<Q8_0> {
  template <typename Put>
  HKV_INLINE static void codes(const uint8_t *const rows[8], int64_t at, const Put &put) {
    for (int half = 0; half < 2; ++half) {
      __m256i quads[4];
      load_quads(rows, at + 2 + half * 16, quads);
      for (int i = 0; i < 4; ++i) put(half * 4 + i, quads[i]);
    }
  }
};

template <int Kind, int ScaleBytes, const int8_t (&Of)[16]>
struct PanelCodes<Levels<Kind, ScaleBytes, Of>> {
  template <typename Put>
  HKV_INLINE static void codes(const uint8_t *const rows[8], int64_t at, const Put &put) {
    __m256i quads[4];
    load_quads(rows, at + ScaleBytes, quads);
    for (int i = 0; i < 4; ++i) put(i, levels_of(Of, low_nibbles(quads[i])));
    for (int i = 0; i < 4; ++i) put(i + 4, levels_of(Of, high_nibbles(quads[i])));
  }
};

template <int Kind, int Bits>
struct PanelCodes<Parts<Kind, Bits>> {
  using Of = Parts<Kind, Bits>;
  template <typename Put>
  HKV_INLINE static void codes(const uint8_t *const rows[8], int64_t at, const Put &put) {
    for (int half = 0; half < 2; ++half) {
      __m256i high[4], low[4];
      if constexpr (Bits == 5) load_quads(rows, at + Of::kHigh + half * 16, high);
      for (int pair = 0; pair < 4; ++pair) {
        load_quads(rows, at + Of::kLow + pair * 32 + half * 16, low);
        for (int i = 0; i < 4; ++i) {
          __m256i first = low_nibbles(low[i]), second = high_nibbles(low[i]);
          if constexpr (Bits == 5) {
            first = _mm256_or_si256(first, _mm256_slli_epi16(_mm256_and_si256(high[i], bytes_of(1)), 4));
            second = _mm256_or_si256(second, _mm256_slli_epi16(_mm256_and_si256(high[i], bytes_of(2)), 3));
            high[i] = _mm256_srli_epi16(high[i], 2);
          }
          put(pair * 16 + half * 4 + i, first);
          put(pair * 16 + 8 + half * 4 + i, second);
        }
      }
    }
  }
};

template <>
struct PanelCodes<Q6_K> {
  template <typename Put>
  HKV_INLINE static void codes(const uint8_t *const rows[8], int64_t at, const Put &put) {
    for (int quarter = 0; quarter < 4; ++quarter) {  // 16 bytes of upper bits: of 64 values
      const int first = quarter / 2 * 32 + quarter % 2 * 4;  // quad
      __m256i high[4], low[4];
      load_quads(rows, at + Q6_K::kHigh + quarter * 16, high);
      for (int odd = 0; odd < 2; ++odd) {
        load_quads(rows, at + quarter / 2 * 64 + odd * 32 + quarter % 2 * 16, low);
        for (int i = 0; i < 4; ++i) {
          put(first + odd * 8 + i, _mm256_or_si256(low_nibbles(low[i]), upper_bits<0>(high[i])));
          put(first + 16 + odd * 8 + i,
              _mm256_or_si256(high_nibbles(low[i]), upper_bits<4>(high[i])));
          high[i] = _mm256_srli_epi16(high[i], 2);
        }
      }
    }
  }
};

}  // namespace hkv

#endif
