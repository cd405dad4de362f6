// Products of packed weights with many tokens, in tiles of bfloat16.
//
// A row of weights is decoded into the rows of tiles as it lies, and tokens are transposed once for all
// weights. So tiles of sums are [row of weights, token]. They wait in memory while a chunk of 256 inputs at
// a time is multiplied.
#pragma once

#include <algorithm>

#include "amx.h"
#include "packed_inputs.h"
#include "packed_panels.h"
#include "transpose.h"

namespace hkv {

constexpr int64_t kTileTokens = kAmxRows;
constexpr int64_t kTileWords = kAmxRows * kAmxPairs;
constexpr int64_t kStepInputs = 2 * kAmxPairs;  // of one product of tiles
constexpr int64_t kChunkSteps = kChunkValues / kStepInputs;

#if defined(__AVX512F__)

/// In bfloat16, those of `first` before those of `second`.
HKV_INLINE inline __m512i to_bfloats(Floats first, Floats second) {
#if HKV_HAS_AMX && !defined(HKV_EMULATED_AMX)
  __m512i rounded;  // an intrinsic would need all that it is inlined into compiled for it
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(first), "v"(second));
  return rounded;
#else
  alignas(64) Bfloat rounded[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) round_to(i < kLanes ? first[i] : second[i - kLanes], rounded[i]);
  return _mm512_load_si512(rounded);
#endif
}

#endif

/// Rounds 2 * kLanes values to bfloat16.
HKV_INLINE inline void round_floats(Floats first, Floats second, Bfloat *to) {
#if defined(__AVX512F__)
  _mm512_storeu_si512(to, to_bfloats(first, second));
#else
  for (int i = 0; i < 2 * kLanes; ++i) round_to(i < kLanes ? first[i] : second[i - kLanes], to[i]);
#endif
}

/// Number j of row i of a tile becomes number i of row j, and rows lie `stride` apart.
template <typename Number>
void transpose_tile(const Number *from, Number *to, int64_t stride) {
  for (int i = 0; i < kAmxRows; i += kLanes)
    for (int j = 0; j < kAmxRows; j += kLanes) {
      Words square[kLanes];
      for (int row = 0; row < kLanes; ++row) square[row] = load_words(from + (i + row) * kAmxRows + j);
      transpose(square);
      for (int row = 0; row < kLanes; ++row) store(to + (j + row) * stride + i, square[row]);
    }
}

/// Tokens in bfloat16 as columns of tiles: [chunk, tile, step, pair, token of the tile]. A chunk has
/// `kChunkSteps` steps, the last one what is left. Behind the last token all is zero.
class TileInputs {
 public:
  TileInputs(int64_t tokens, int64_t num_inputs)
      : tokens(tokens),
        num_inputs(num_inputs),
        tiles((tokens + kTileTokens - 1) / kTileTokens),
        chunks((num_inputs + kChunkValues - 1) / kChunkValues),
        pairs_(static_cast<size_t>(tiles * num_inputs / kStepInputs * kTileWords)) {}

  int64_t steps_of(int64_t chunk) const {
    return std::min(kChunkSteps, num_inputs / kStepInputs - chunk * kChunkSteps);
  }
  uint32_t *at(int64_t chunk, int64_t tile) const {
    return pairs_.data() + (chunk * kChunkSteps * tiles + tile * steps_of(chunk)) * kTileWords;
  }

  /// Rounds the tokens of a tile; inputs: [tokens, num_inputs] of all.
  template <typename Element>
  void round_tile(int64_t tile, const Element *inputs) {
    const int64_t first = tile * kTileTokens, count = std::min(kTileTokens, tokens - first);
    alignas(64) Bfloat rows[kTileTokens][kStepInputs] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      for (int64_t step = 0; step < steps_of(chunk); ++step) {
        for (int64_t row = 0; row < count; ++row) {
          const Element *from = inputs + (first + row) * num_inputs + (chunk * kChunkSteps + step) * kStepInputs;
          for (int64_t i = 0; i < kStepInputs; i += 2 * kLanes)
            round_floats(load_floats(from + i), load_floats(from + i + kLanes), rows[row] + i);
        }
        uint32_t pairs[kTileWords];
        std::memcpy(pairs, rows, sizeof pairs);
        transpose_tile(pairs, at(chunk, tile) + step * kTileWords, kTileTokens);
      }
  }

  const int64_t tokens, num_inputs, tiles, chunks;

 private:
  LineArray<uint32_t> pairs_;
};

#if HKV_HAS_AMX

/// The scales and offsets of a chunk of a row.
template <typename Kind>
class ChunkScales {
 public:
  ChunkScales(const uint8_t *blocks, int count) {
    __m256 scales[kVectors], offsets[kVectors];
    RowCodes<Kind>::scales(blocks, count, scales, offsets);
    for (int i = 0; i < kVectors; ++i) {
      _mm256_storeu_ps(scales_ + i * 8, scales[i]);
      if constexpr (Kind::kHasOffset) _mm256_storeu_ps(offsets_ + i * 8, offsets[i]);
    }
    // Else GCC broadcasts them from registers, which takes two shuffles each.
    asm("" : "+m"(scales_), "+m"(offsets_));
  }

  /// Weights of codes at a place of the chunk.
  HKV_INLINE Floats weights(int place, Floats codes) const {
    const int group = place / Kind::kScaleValues;
    if constexpr (Kind::kHasOffset) return codes * scales_[group] + offsets_[group];
    return codes * scales_[group];
  }

 private:
  static constexpr int kVectors = RowCodes<Kind>::kVectors;
  float scales_[8 * kVectors], offsets_[8 * kVectors];
};

inline Floats code_floats(const int8_t *codes) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_maskz_cvtepi8_epi32(0xffff, load_16(codes));
  return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, wide);
#else
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(codes));
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
#endif
}

/// What the first 16 codes stand for before scales, where all weights of so few codes are rounded and
/// then picked; null where each code's weight is rounded for itself, which is as fast for Q5_K.
template <typename Kind>
constexpr const int8_t *kPickedLevels = nullptr;

#if defined(__AVX512F__)

constexpr int8_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
template <int Kind, int Bits, bool HasMin>
constexpr const int8_t *kPickedLevels<Simple<Kind, Bits, HasMin>> = kNumbers;
template <int Kind>
constexpr const int8_t *kPickedLevels<Parts<Kind, 4>> = kNumbers;
template <int Kind, int ScaleBytes, const int8_t (&Of)[16]>
constexpr const int8_t *kPickedLevels<Levels<Kind, ScaleBytes, Of>> = Of;

typedef uint16_t Shorts __attribute__((vector_size(64)));

inline Shorts wide_bytes(__m256i bytes) { return (Shorts)_mm512_maskz_cvtepu8_epi16(~__mmask32{0}, bytes); }

/// The codes of part `Part` of a chunk, in the lower five bits; of codes of four bits the fifth is any.
template <typename Kind, int Part>
HKV_INLINE inline Shorts code_words(const uint8_t *blocks) {
  if constexpr (Kind::kValues == kChunkValues) {
    return wide_bytes(load_32(blocks + Kind::kLow + Part / 2 * 32)) >> Part % 2 * 4;
  } else {
    constexpr Shorts kUpperHalf = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                   4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
    const uint8_t *block = blocks + Part * Kind::kBytes;
    const Shorts low = wide_bytes(_mm256_broadcastsi128_si256(load_16(block + Kind::kLow))) >> kUpperHalf;
    if constexpr (Kind::kBits != 5) {
      return low;
    } else {
      uint32_t fifth;
      std::memcpy(&fifth, block + Kind::kHigh, sizeof fifth);
      const __m512i four = (__m512i)(low & 15);
      return (Shorts)_mm512_mask_add_epi16(four, fifth, four, _mm512_set1_epi16(16));
    }
  }
}

template <typename Kind>
void pick_chunk(const uint8_t *blocks, const ChunkScales<Kind> &scales, Bfloat *to) {
  const Floats levels = code_floats(kPickedLevels<Kind>);
  unrolled<kChunkBlocks>([&](auto part) HKV_INLINE {
    const Floats first = scales.weights(part * kRoundedBlock, levels);
    const Floats second = Kind::kBits == 5 ? scales.weights(part * kRoundedBlock, levels + 16.0f) : first;
    const __m512i words = (__m512i)code_words<Kind, part>(blocks);
    _mm512_storeu_si512(to + part * 2 * kTileWords,
                        _mm512_permutexvar_epi16(words, to_bfloats(first, second)));
  });
}

#endif

/// The codes of a chunk of a row, in order.
template <typename Kind>
HKV_INLINE inline void chunk_codes(const uint8_t *blocks, int8_t *codes) {
  const auto put = [&](int part, __m256i of_part) HKV_INLINE {
    _mm256_store_si256(reinterpret_cast<__m256i *>(codes + part * kRoundedBlock), of_part);
  };
  if constexpr (kPairs<Kind>) {
    for (int part = 0; part < kChunkBlocks; part += 2) {
      const uint8_t *block = blocks + part * Kind::kBytes;
      __m256i low, high;
      RowCodes<Kind>::pair(block, block + Kind::kBytes, low, high);
      put(part, _mm256_permute2x128_si256(low, high, 0x20));
      put(part + 1, _mm256_permute2x128_si256(low, high, 0x31));
    }
  } else {
    constexpr int kParts = Kind::kValues / kRoundedBlock;  // of a block
    unrolled<kChunkBlocks>([&](auto part) HKV_INLINE {
      const uint8_t *block = blocks + part / kParts * Kind::kBytes;
      put(part, RowCodes<Kind>::template codes<part % kParts>(block));
    });
  }
}

/// Decodes a chunk of a row of which `count` parts of 32 values are there, each into a row of the tile of
/// its step.
template <typename Kind>
void decode_chunk(const uint8_t *blocks, int count, Bfloat *to) {
  uint8_t copy[kChunkBytes<Kind>];
  if (count < kChunkBlocks) blocks = padded_chunk<Kind>(blocks, count, copy);
  const ChunkScales<Kind> scales(blocks, count);
  if constexpr (kPickedLevels<Kind> != nullptr) {
    pick_chunk(blocks, scales, to);
  } else {
    alignas(32) int8_t codes[kChunkValues];
    chunk_codes<Kind>(blocks, codes);
    asm("" : "+m"(codes));  // else they are taken apart in registers
    for (int part = 0; part < kChunkBlocks; ++part)
      for (int i = 0; i < kRoundedBlock; i += 2 * kLanes) {
        const int first = part * kRoundedBlock + i, second = first + kLanes;
        round_floats(scales.weights(first, code_floats(codes + first)),
                     scales.weights(second, code_floats(codes + second)), to + part * 2 * kTileWords + i);
      }
  }
}

constexpr int64_t kHeightTiles = 2;  // of a panel
constexpr int64_t kHeight = kHeightTiles * kAmxRows;
constexpr int64_t kPanelWords = kHeightTiles * kTileWords;  // of sums, with one tile of tokens

/// A chunk of a panel's weights. It stays in the level-1 cache while tokens pass.
struct DecodedChunk {
  alignas(64) Bfloat weights[kHeightTiles][kChunkSteps][kAmxRows][kStepInputs];

  /// Of `num_rows` rows, and of the last one once more behind them.
  template <typename Kind>
  void decode(const uint8_t *blocks, int64_t stride, int64_t num_rows, int64_t steps) {
    for (int64_t row = 0; row < kHeight; ++row)
      decode_chunk<Kind>(blocks + std::min(row, num_rows - 1) * stride, static_cast<int>(steps),
                         weights[row / kAmxRows][0][row % kAmxRows]);
  }
};

/// Adds the products of a chunk with one or two tiles of tokens to sums [token tile, row tile].
template <int Tokens>
void add_tiles(const DecodedChunk &chunk, const uint32_t *const tokens[2], int64_t steps, bool is_first,
               GradualPrefetch &prefetch, float *sums) {
  using T = AmxTiles;
  constexpr bool kTwo = Tokens == 2;
  if (is_first) {
    unrolled<Tokens * kHeightTiles>([](auto tile) HKV_INLINE { T::zero<tile>(); });
  } else {
    unrolled<Tokens * kHeightTiles>(
        [&](auto tile) HKV_INLINE { T::load<tile>(sums + tile * kTileWords, kAmxBytes); });
  }
  for (int64_t step = 0; step < steps; ++step) {
    prefetch.step();
    T::load<4>(chunk.weights[0][step], kAmxBytes);
    T::load<5>(chunk.weights[1][step], kAmxBytes);
    T::load<6>(tokens[0] + step * kTileWords, kAmxBytes);
    T::add_products<0, 4, 6>();
    T::add_products<1, 5, 6>();
    if (!kTwo) continue;
    T::load<7>(tokens[1] + step * kTileWords, kAmxBytes);
    T::add_products<2, 4, 7>();
    T::add_products<3, 5, 7>();
  }
  unrolled<Tokens * kHeightTiles>(
      [&](auto tile) HKV_INLINE { T::store<tile>(sums + tile * kTileWords, kAmxBytes); });
}

/// Adds the products of a chunk with token tiles [first, last) to sums [token tile, row tile].
inline void add_chunk(const DecodedChunk &decoded, const TileInputs &inputs, int64_t chunk, int64_t first,
                      int64_t last, GradualPrefetch &prefetch, float *sums) {
  for (int64_t tile = first; tile < last; tile += 2, sums += 2 * kPanelWords) {
    const bool has_two = tile + 1 < last;
    const uint32_t *const tokens[2] = {inputs.at(chunk, tile), inputs.at(chunk, tile + has_two)};
    (has_two ? add_tiles<2> : add_tiles<1>)(decoded, tokens, inputs.steps_of(chunk), chunk == 0, prefetch,
                                            sums);
  }
}

#endif

}  // namespace hkv
