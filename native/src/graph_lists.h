// Lists of neighbours, packed: two bytes a neighbour, and a bitmap for each further bit.
//
// A list has a slot for each of `degree` neighbours, rounded up to 16. First come the low 16 bits of
// all slots, then one plane per higher bit that node numbers need: bit i of plane p is bit 16 + p of
// slot i. Slots without a neighbour name the node itself, which a search has always visited.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hkv {

constexpr int kSlots = 16;  // that are packed and unpacked at once
constexpr int kLowBits = 16;

/// Where the parts of a list lie.
struct ListLayout {
  ListLayout(int degree, int64_t num_nodes) : slots((degree + kSlots - 1) / kSlots * kSlots) {
    while (((num_nodes - 1) >> (kLowBits + planes)) > 0) ++planes;
    const int64_t used = low_bytes() + int64_t{planes} * plane_bytes();
    const int64_t lines = (used + 63) / 64 * 64, words = (used + 7) / 8 * 8;
    bytes = lines * 8 <= used * 9 ? lines : words;
  }

  int64_t low_bytes() const { return int64_t{slots} * 2; }
  int64_t plane_bytes() const { return slots / 8; }

  int slots;
  int planes = 0;
  int64_t bytes;  // from one list to the next: whole cache lines where that adds at most an eighth
};

inline void pack_sixteen(const int32_t nodes[kSlots], const ListLayout &layout, int first,
                         uint8_t *list) {
  uint16_t words[kSlots];
  for (int i = 0; i < kSlots; ++i) words[i] = static_cast<uint16_t>(nodes[i]);
  std::memcpy(list + 2 * first, words, sizeof words);
  for (int plane = 0; plane < layout.planes; ++plane) {
    unsigned bits = 0;
    for (int i = 0; i < kSlots; ++i)
      bits |= (static_cast<uint32_t>(nodes[i]) >> (kLowBits + plane) & 1u) << i;
    const auto word = static_cast<uint16_t>(bits);
    std::memcpy(list + layout.low_bytes() + plane * layout.plane_bytes() + first / 8, &word,
                sizeof word);
  }
}

/// The nodes in slots first .. first + 15; first is a multiple of 16.
inline void unpack_sixteen(const uint8_t *list, const ListLayout &layout, int first,
                           int32_t nodes[kSlots]) {
  const uint8_t *planes = list + layout.low_bytes() + first / 8;
#if defined(__AVX512F__)
  __m512i found = _mm512_cvtepu16_epi32(
      _mm256_loadu_si256(reinterpret_cast<const __m256i *>(list + 2 * first)));
  for (int plane = 0; plane < layout.planes; ++plane, planes += layout.plane_bytes()) {
    uint16_t bits;
    std::memcpy(&bits, planes, sizeof bits);
    found = _mm512_mask_or_epi32(found, bits, found, _mm512_set1_epi32(1 << (kLowBits + plane)));
  }
  _mm512_storeu_si512(nodes, found);
#elif defined(__AVX2__)
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (int half = 0; half < 2; ++half) {
    __m256i found = _mm256_cvtepu16_epi32(_mm_loadu_si128(
        reinterpret_cast<const __m128i *>(list + 2 * (first + 8 * half))));
    for (int plane = 0; plane < layout.planes; ++plane) {
      const __m256i bits = _mm256_set1_epi32(planes[plane * layout.plane_bytes() + half]);
      const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(bits, each), each);
      found = _mm256_or_si256(
          found, _mm256_and_si256(set, _mm256_set1_epi32(1 << (kLowBits + plane))));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(nodes + 8 * half), found);
  }
#else
  uint16_t words[kSlots];
  std::memcpy(words, list + 2 * first, sizeof words);
  for (int i = 0; i < kSlots; ++i) nodes[i] = words[i];
  for (int plane = 0; plane < layout.planes; ++plane, planes += layout.plane_bytes()) {
    uint16_t bits;
    std::memcpy(&bits, planes, sizeof bits);
    for (int i = 0; i < kSlots; ++i) nodes[i] |= (bits >> i & 1) << (kLowBits + plane);
  }
#endif
}

}  // namespace hkv
