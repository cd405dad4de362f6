// A set of nodes as a bitmap: small enough to stay in the first cache during a search.
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
  /// Makes the set empty, for nodes below `count`.
  void reset(int64_t count) {
    const auto words = static_cast<size_t>((count + 31) / 32);
    if (words_.size() < words) words_.resize(words);
    if (words > 0) std::memset(words_.data(), 0, words * sizeof(uint32_t));
  }

  bool has(int32_t node) const { return (words_[node >> 5] >> (node & 31) & 1) != 0; }

  /// Adds the node; returns whether it is new.
  bool add(int32_t node) {
    uint32_t &word = words_[node >> 5];
    const uint32_t bit = 1u << (node & 31);
    const bool is_new = (word & bit) == 0;
    word |= bit;
    return is_new;
  }

  /// Adds 16 nodes; writes the new ones to `to`, which has room for 16, and returns how many they are.
  int add_sixteen(const int32_t nodes[16], int32_t *to) {
    int found = 0;
#if defined(__AVX512F__)
    const __m512i all = _mm512_loadu_si512(nodes);
    const __m512i words = _mm512_i32gather_epi32(_mm512_srli_epi32(all, 5), words_.data(), 4);
    const __m512i bits =
        _mm512_sllv_epi32(_mm512_set1_epi32(1), _mm512_and_si512(all, _mm512_set1_epi32(31)));
    const __mmask16 fresh = _mm512_testn_epi32_mask(words, bits);
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(fresh, all));
    // A list may name a node twice, hence the second look.
    for (int i = 0, last = __builtin_popcount(fresh); i < last; ++i) {
      const int32_t node = to[i];
      to[found] = node;
      found += add(node);
    }
#else
    for (int i = 0; i < 16; ++i) {
      to[found] = nodes[i];
      found += add(nodes[i]);
    }
#endif
    return found;
  }

 private:
  std::vector<uint32_t> words_;
};

}  // namespace hkv
