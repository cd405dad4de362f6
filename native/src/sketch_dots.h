// Products of the codes of a sketch with up to kSketchSlice queries, by instruction set.
//
// `DotSums<Queries>` holds the sums of a few keys for all queries of a slice, in registers; what is
// added are lines of a block. All instruction sets give the same integers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "convert.h"
#include "quantise.h"
#include "unrolled.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace hkv {

// What each instruction set defines:
//   kSketchSlice     queries that share what is loaded
//   kDotKeys         keys of a DotSums; a block is worked on in parts of so many
//   blocks_at_once   blocks that share the words of so many queries, for as long as registers last
//   kWordsOf8        32-bit words that a query has for a quad of 8-bit codes; one for others
//   kShiftedBytes    8-bit codes are multiplied less 128, which the caller makes good
//   kFlushNibbles, kFlushPairs   lines of 4 and of 2 bits after which `flush` is due
//   put_word_of_8    writes those words
//   DotSums          start, add_bytes, add_nibbles, add_pairs, flush, any, store

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

#if defined(__AVX512VNNI__)

constexpr int kSketchSlice = 8;
constexpr int blocks_at_once(int queries) { return queries <= 4 ? 2 : 1; }

struct DotVector {
  static constexpr int kVectors = 1;  // of a line
  using Type = __m512i;
  static Type load(const uint8_t *at) { return _mm512_load_si512(static_cast<const void *>(at)); }
  static Type all(int32_t word) { return _mm512_set1_epi32(word); }
  template <int Bits>
  static Type part(Type line, int index) {
    const Type low = index == 0 ? line : _mm512_srli_epi16(line, static_cast<unsigned>(Bits * index));
    return _mm512_and_si512(low, _mm512_set1_epi8((1 << Bits) - 1));
  }
  static void multiply_add(Type &sums, Type codes, Type factor) {
    detail::multiply_add(sums, codes, factor);
  }
  static Type both(Type a, Type b) { return _mm512_and_si512(a, b); }
  static uint32_t negative(Type sums) { return _mm512_movepi32_mask(sums); }
  static void store(int32_t *to, Type sums) { _mm512_storeu_si512(to, sums); }
};

#else

constexpr int kSketchSlice = 4;
constexpr int blocks_at_once(int) { return 1; }

struct DotVector {
  static constexpr int kVectors = 2;
  using Type = __m256i;
  static Type load(const uint8_t *at) {
    return _mm256_load_si256(reinterpret_cast<const __m256i *>(at));
  }
  static Type all(int32_t word) { return _mm256_set1_epi32(word); }
  template <int Bits>
  static Type part(Type line, int index) {
    const Type low = index == 0 ? line : _mm256_srli_epi16(line, Bits * index);
    return _mm256_and_si256(low, _mm256_set1_epi8((1 << Bits) - 1));
  }
  static void multiply_add(Type &sums, Type codes, Type factor) {
    sums = _mm256_dpbusd_avx_epi32(sums, codes, factor);
  }
  static Type both(Type a, Type b) { return _mm256_and_si256(a, b); }
  static uint32_t negative(Type sums) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(sums)));
  }
  static void store(int32_t *to, Type sums) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), sums);
  }
};

#endif

constexpr int kDotKeys = HKV_BLOCK_KEYS;
constexpr int kWordsOf8 = 1;
constexpr bool kShiftedBytes = false;
constexpr int kFlushNibbles = 1 << 20, kFlushPairs = 1 << 20;  // sums have 32 bits

inline void put_word_of_8(const int8_t *codes, int32_t *word) { std::memcpy(word, codes, 4); }

template <int Queries>
class DotSums {
 public:
  HKV_INLINE inline void start(const int32_t *from) {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      unrolled<V::kVectors>([&](auto i) HKV_INLINE {
        sums_[query][i] = V::all(from[query]);
      });
    });
  }
  HKV_INLINE inline void add_bytes(const uint8_t *line, const int32_t *words) {
    unrolled<V::kVectors>([&](auto i) HKV_INLINE {
      add(i, V::load(line + i * kBytes), words);
    });
  }
  HKV_INLINE inline void add_nibbles(const uint8_t *line, const int32_t *words) {
    add_parts<4>(line, words);
  }
  HKV_INLINE inline void add_pairs(const uint8_t *line, const int32_t *words) {
    add_parts<2>(line, words);
  }
  HKV_INLINE inline void flush() {}
  HKV_INLINE inline bool any() const {
    typename V::Type all = sums_[0][0];
    unrolled<Queries>([&](auto query) HKV_INLINE {
      unrolled<V::kVectors>([&](auto i) HKV_INLINE {
        all = V::both(all, sums_[query][i]);
      });
    });
    return V::negative(all) != (1u << kDotKeys / V::kVectors) - 1;
  }
  /// to: [Queries][HKV_BLOCK_KEYS], from the first key of the part on.
  HKV_INLINE inline void store(int32_t *to) const {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      unrolled<V::kVectors>([&](auto i) HKV_INLINE {
        V::store(to + query * HKV_BLOCK_KEYS + i * kDotKeys / V::kVectors, sums_[query][i]);
      });
    });
  }

 private:
  using V = DotVector;
  static constexpr int kBytes = kLineBytes / V::kVectors;

  HKV_INLINE inline void add(int i, typename V::Type codes, const int32_t *words) {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      V::multiply_add(sums_[query][i], codes, V::all(words[query]));
    });
  }
  template <int Bits>
  HKV_INLINE inline void add_parts(const uint8_t *line, const int32_t *words) {
    unrolled<V::kVectors>([&](auto i) HKV_INLINE {
      const typename V::Type codes = V::load(line + i * kBytes);
      unrolled<8 / Bits>([&](auto part) HKV_INLINE {
        add(i, V::template part<Bits>(codes, part), words + part * Queries);
      });
    });
  }

  typename V::Type sums_[Queries][V::kVectors];
};

#elif defined(__AVX2__)

constexpr int kSketchSlice = 4;
constexpr int blocks_at_once(int) { return 1; }
constexpr int kDotKeys = 8;
constexpr int kWordsOf8 = 2;  // even and odd codes, widened: products of bytes would saturate
constexpr bool kShiftedBytes = false;
// Sums of 16 bits: a quad of 4-bit codes adds up to 15 * 127 * 2, one of 2 bits a fifth of it.
constexpr int kFlushNibbles = 4, kFlushPairs = 10;

inline void put_word_of_8(const int8_t *codes, int32_t *words) {
  const int16_t wide[4] = {codes[0], codes[2], codes[1], codes[3]};
  std::memcpy(words, wide, sizeof wide);
}

inline uint32_t negative_lanes(__m256i sums) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(sums)));
}

template <int Queries>
class DotSums {
 public:
  HKV_INLINE inline void start(const int32_t *from) {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      sums_[query] = _mm256_set1_epi32(from[query]);
      narrow_[query] = _mm256_setzero_si256();
    });
  }
  HKV_INLINE inline void add_bytes(const uint8_t *line, const int32_t *words) {
    const detail::Codes codes = detail::load_codes(line);
    unrolled<Queries>([&](auto query) HKV_INLINE {
      const detail::QueryCodes factor = {_mm256_set1_epi32(words[2 * query]),
                                         _mm256_set1_epi32(words[2 * query + 1])};
      sums_[query] = detail::add_products(sums_[query], codes, factor);
    });
  }
  HKV_INLINE inline void add_nibbles(const uint8_t *line, const int32_t *words) {
    const __m256i codes = load(line), mask = _mm256_set1_epi8(15);
    add_narrow(_mm256_and_si256(codes, mask), words);
    add_narrow(_mm256_and_si256(_mm256_srli_epi16(codes, 4), mask), words + Queries);
  }
  HKV_INLINE inline void add_pairs(const uint8_t *line, const int32_t *words) {
    const __m256i codes = load(line), mask = _mm256_set1_epi8(3);
    add_narrow(_mm256_and_si256(codes, mask), words);
    add_narrow(_mm256_and_si256(_mm256_srli_epi16(codes, 2), mask), words + Queries);
    add_narrow(_mm256_and_si256(_mm256_srli_epi16(codes, 4), mask), words + 2 * Queries);
    add_narrow(_mm256_and_si256(_mm256_srli_epi16(codes, 6), mask), words + 3 * Queries);
  }
  HKV_INLINE inline void flush() {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      const __m256i pairs = _mm256_madd_epi16(narrow_[query], _mm256_set1_epi16(1));
      sums_[query] = _mm256_add_epi32(sums_[query], pairs);
      narrow_[query] = _mm256_setzero_si256();
    });
  }
  HKV_INLINE inline bool any() const {
    __m256i all = sums_[0];
    unrolled<Queries>([&](auto query) HKV_INLINE {
      all = _mm256_and_si256(all, sums_[query]);
    });
    return negative_lanes(all) != 0xffu;
  }
  HKV_INLINE inline void store(int32_t *to) const {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      _mm256_store_si256(reinterpret_cast<__m256i *>(to + query * HKV_BLOCK_KEYS), sums_[query]);
    });
  }

 private:
  static __m256i load(const uint8_t *at) {
    return _mm256_load_si256(reinterpret_cast<const __m256i *>(at));
  }
  HKV_INLINE inline void add_narrow(__m256i codes, const int32_t *words) {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      const __m256i products = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(words[query]));
      narrow_[query] = _mm256_add_epi16(narrow_[query], products);
    });
  }

  __m256i sums_[Queries], narrow_[Queries];
};

#elif defined(__aarch64__)

constexpr int kSketchSlice = 4;
constexpr int blocks_at_once(int) { return 1; }
constexpr int kDotKeys = 4;
constexpr int kWordsOf8 = 1;
constexpr bool kShiftedBytes = true;  // so that both factors are signed bytes

inline void put_word_of_8(const int8_t *codes, int32_t *word) { std::memcpy(word, codes, 4); }

#if defined(__ARM_FEATURE_DOTPROD)

constexpr int kFlushNibbles = 1 << 20, kFlushPairs = 1 << 20;

/// The sums of four keys for one query.
struct NeonSums {
  HKV_INLINE inline void start(int32_t from) { sums = vdupq_n_s32(from); }
  HKV_INLINE inline void add(int8x16_t codes, int32_t word) {
    sums = vdotq_s32(sums, codes, vreinterpretq_s8_s32(vdupq_n_s32(word)));
  }
  HKV_INLINE inline void add_large(int8x16_t codes, int32_t word) { add(codes, word); }
  HKV_INLINE inline void flush() {}

  int32x4_t sums;
};

#else

constexpr int kFlushNibbles = 8, kFlushPairs = 20;  // 16 quads of 15 * 127, 80 of 3 * 127

struct NeonSums {
  HKV_INLINE inline void start(int32_t from) {
    sums = vdupq_n_s32(from);
    low = high = vdupq_n_s16(0);
  }
  HKV_INLINE inline void add(int8x16_t codes, int32_t word) {
    const int8x8_t factor = vreinterpret_s8_s32(vdup_n_s32(word));
    low = vmlal_s8(low, vget_low_s8(codes), factor);
    high = vmlal_s8(high, vget_high_s8(codes), factor);
  }
  HKV_INLINE inline void add_large(int8x16_t codes, int32_t word) {
    add(codes, word);
    flush();
  }
  HKV_INLINE inline void flush() {
    const int32x4_t first = vpaddlq_s16(low), second = vpaddlq_s16(high);
    sums = vaddq_s32(sums, vpaddq_s32(first, second));
    low = high = vdupq_n_s16(0);
  }

  int32x4_t sums;
  int16x8_t low, high;  // sums of 16 bits, two keys in each
};

#endif

template <int Queries>
class DotSums {
 public:
  HKV_INLINE inline void start(const int32_t *from) {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      sums_[query].start(from[query]);
    });
  }
  HKV_INLINE inline void add_bytes(const uint8_t *line, const int32_t *words) {
    const int8x16_t codes = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(line), vdupq_n_u8(0x80)));
    unrolled<Queries>([&](auto query) HKV_INLINE {
      sums_[query].add_large(codes, words[query]);
    });
  }
  HKV_INLINE inline void add_nibbles(const uint8_t *line, const int32_t *words) {
    const uint8x16_t codes = vld1q_u8(line);
    add(vandq_u8(codes, vdupq_n_u8(15)), words);
    add(vshrq_n_u8(codes, 4), words + Queries);
  }
  HKV_INLINE inline void add_pairs(const uint8_t *line, const int32_t *words) {
    const uint8x16_t codes = vld1q_u8(line), mask = vdupq_n_u8(3);
    add(vandq_u8(codes, mask), words);
    add(vandq_u8(vshrq_n_u8(codes, 2), mask), words + Queries);
    add(vandq_u8(vshrq_n_u8(codes, 4), mask), words + 2 * Queries);
    add(vshrq_n_u8(codes, 6), words + 3 * Queries);
  }
  HKV_INLINE inline void flush() {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      sums_[query].flush();
    });
  }
  HKV_INLINE inline bool any() const {
    int32x4_t all = sums_[0].sums;
    unrolled<Queries>([&](auto query) HKV_INLINE {
      all = vandq_s32(all, sums_[query].sums);
    });
    return vmaxvq_s32(all) >= 0;
  }
  HKV_INLINE inline void store(int32_t *to) const {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      vst1q_s32(to + query * HKV_BLOCK_KEYS, sums_[query].sums);
    });
  }

 private:
  HKV_INLINE inline void add(uint8x16_t codes, const int32_t *words) {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      sums_[query].add(vreinterpretq_s8_u8(codes), words[query]);
    });
  }

  NeonSums sums_[Queries];
};

#else

constexpr int kSketchSlice = 4;
constexpr int blocks_at_once(int) { return 1; }
constexpr int kDotKeys = HKV_BLOCK_KEYS;
constexpr int kWordsOf8 = 1;
constexpr bool kShiftedBytes = false;
constexpr int kFlushNibbles = 1 << 20, kFlushPairs = 1 << 20;

inline void put_word_of_8(const int8_t *codes, int32_t *word) { std::memcpy(word, codes, 4); }

/// Plain 16-bit products, which compilers turn into vector code.
template <int Queries>
class DotSums {
 public:
  HKV_INLINE inline void start(const int32_t *from) {
    unrolled<Queries>([&](auto query) HKV_INLINE {
      for (int32_t &sum : sums_[query]) sum = from[query];
    });
  }
  HKV_INLINE inline void add_bytes(const uint8_t *line, const int32_t *words) {
    add<8>(line, 0, words);
  }
  HKV_INLINE inline void add_nibbles(const uint8_t *line, const int32_t *words) {
    for (int part = 0; part < 2; ++part) add<4>(line, part, words + part * Queries);
  }
  HKV_INLINE inline void add_pairs(const uint8_t *line, const int32_t *words) {
    for (int part = 0; part < 4; ++part) add<2>(line, part, words + part * Queries);
  }
  HKV_INLINE inline void flush() {}
  HKV_INLINE inline bool any() const {
    int32_t most = sums_[0][0];
    unrolled<Queries>([&](auto query) HKV_INLINE {
      for (const int32_t sum : sums_[query]) most = std::max(most, sum);
    });
    return most >= 0;
  }
  HKV_INLINE inline void store(int32_t *to) const { std::memcpy(to, sums_, sizeof sums_); }

 private:
  template <int Bits>
  HKV_INLINE inline void add(const uint8_t *line, int part, const int32_t *words) {
    int16_t codes[4][kDotKeys];
    for (int key = 0; key < kDotKeys; ++key)
      for (int i = 0; i < 4; ++i)
        codes[i][key] = static_cast<int16_t>(line[4 * key + i] >> (Bits * part) & ((1 << Bits) - 1));
    unrolled<Queries>([&](auto query) HKV_INLINE {
      int8_t factor[4];
      std::memcpy(factor, words + query, sizeof factor);
      for (int key = 0; key < kDotKeys; ++key)
        sums_[query][key] += codes[0][key] * factor[0] + codes[1][key] * factor[1] +
                             codes[2][key] * factor[2] + codes[3][key] * factor[3];
    });
  }

  int32_t sums_[Queries][kDotKeys];
};

#endif

}  // namespace hkv
