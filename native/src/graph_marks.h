// A set of keys as a bitmap: small enough to stay in the first cache during a search.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace hkv {

class Marks {
 public:
  /// Makes the set empty, for keys below `count`.
  void reset(int64_t count) {
    const auto words = static_cast<size_t>((count + 31) / 32);
    if (words_.size() < words) words_.resize(words);
    if (words > 0) std::memset(words_.data(), 0, words * sizeof(uint32_t));
  }

  bool has(int32_t key) const { return (words_[key >> 5] >> (key & 31) & 1) != 0; }

  /// Adds the key; returns whether it is new.
  bool add(int32_t key) {
    uint32_t &word = words_[key >> 5];
    const uint32_t bit = 1u << (key & 31);
    const bool is_new = (word & bit) == 0;
    word |= bit;
    return is_new;
  }

  /// Adds the keys of a list that ends with `count` or -1; writes the new ones to `to`, which has
  /// room for 16 more than that, and returns how many they are.
  int add_list(const int32_t *list, int count, int32_t *to) {
    int found = 0;
    int at = 0;
#if defined(__AVX512F__)
    for (; at + 16 <= count; at += 16) {
      const __m512i keys = _mm512_loadu_si512(list + at);
      const __mmask16 valid = _mm512_cmpge_epi32_mask(keys, _mm512_setzero_si512());
      const __m512i words = _mm512_mask_i32gather_epi32(
          _mm512_setzero_si512(), valid, _mm512_srli_epi32(keys, 5), words_.data(), 4);
      const __m512i bits = _mm512_sllv_epi32(
          _mm512_set1_epi32(1), _mm512_and_si512(keys, _mm512_set1_epi32(31)));
      const __mmask16 fresh = _mm512_mask_testn_epi32_mask(valid, words, bits);
      _mm512_storeu_si512(to + found, _mm512_maskz_compress_epi32(fresh, keys));
      // A list may name a key twice, hence the second look.
      int32_t *const first = to + found;
      for (int i = 0, last = __builtin_popcount(fresh); i < last; ++i) {
        const int32_t key = first[i];
        to[found] = key;
        found += add(key);
      }
      if (valid != 0xffff) return found;
    }
#endif
    for (; at < count && list[at] >= 0; ++at) {
      to[found] = list[at];
      found += add(list[at]);
    }
    return found;
  }

 private:
  std::vector<uint32_t> words_;
};

}  // namespace hkv
