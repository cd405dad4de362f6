// Products of panels of packed weights with many columns of inputs.
//
// A chunk of 256 inputs at a time, the weights of some rows are decoded into a buffer where a vector
// holds four codes of each row; then tiles of rows and columns are added, each with its sums in
// registers, and no sum over lanes is needed.
#pragma once

#if defined(__AVX2__)

#include "packed_codes.h"
#include "packed_inputs.h"
#include "unrolled.h"

namespace hkv {

// What a vector of integers, and of floats, does here.
#if defined(__AVX512VNNI__)

struct PanelVector {
  static constexpr int kRows = 16;
  using Ints = __m512i;
  static Ints zero() { return _mm512_setzero_si512(); }
  static Ints load(const uint8_t *at) { return _mm512_loadu_si512(at); }
  /// As assembly, because GCC would load what is broadcast by an instruction of its own.
  HKV_INLINE static void multiply_add(Ints &sums, Ints codes, const int8_t *four) {
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(sums)
        : "v"(codes), "m"(*reinterpret_cast<const int32_t(*)>(four)));
  }
  static Floats floats(Ints ints) { return (Floats)_mm512_maskz_cvtepi32_ps(0xffff, ints); }
};

#else

struct PanelVector {
  static constexpr int kRows = 8;
  using Ints = __m256i;
  static Ints zero() { return _mm256_setzero_si256(); }
  static Ints load(const uint8_t *at) { return load_32(at); }
  static Ints broadcast(const int8_t *four) {
    int32_t word;
    std::memcpy(&word, four, sizeof word);
    return _mm256_set1_epi32(word);
  }
#if defined(__AVXVNNI__)
  HKV_INLINE static void multiply_add(Ints &sums, Ints codes, const int8_t *four) {
    sums = _mm256_dpbusd_avx_epi32(sums, codes, broadcast(four));
  }
#endif
  static Floats floats(Ints ints) { return (Floats)_mm256_cvtepi32_ps(ints); }
};

#endif

constexpr int kTileVectors = 2;  // of rows
constexpr int kTileColumns = 4;
constexpr int kTileRows = kTileVectors * PanelVector::kRows;
constexpr int64_t kMaxPanelRows = 64;  // their sums share the level-2 cache with the inputs
constexpr int kQuads = kChunkValues / 4;
constexpr int kQuadBytes = 4 * PanelVector::kRows;

/// What a tile needs to know of a kind, so that kinds share their tiles.
template <int Bits, int ScaleValues, bool HasOffset, bool Signed>
struct TileKind {
  static constexpr int kBits = Bits, kScaleValues = ScaleValues;
  static constexpr bool kOffset = HasOffset, kSigned = Signed;
  static constexpr int kGroups = kChunkValues / ScaleValues;
  /// Products that 16 bits can hold, in pairs: 2 * 127 times the largest code each.
  static constexpr int kAdds = Bits == 4 ? 8 : Bits == 5 ? 4 : Bits == 6 ? 2 : 1;
};
template <typename Kind>
using TileKindOf = TileKind<Kind::kBits, Kind::kScaleValues, kWithOffset<Kind>, Kind::kSigned>;

/// The weights of a tile's rows for one chunk.
struct PanelChunk {
  static constexpr int kMaxGroups = 16;
  alignas(64) uint8_t codes[kTileVectors][kQuads][kQuadBytes];
  alignas(64) float scales[kMaxGroups][kTileRows], offsets[kMaxGroups][kTileRows];
};

inline void transpose(__m256 rows[8]) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

/// Decodes the first `count` parts of 32 values of a chunk of eight rows, from row `first` of the tile on.
template <typename Kind>
void decode_eight(const uint8_t *const rows[8], int64_t place, int count, int first,
                  PanelChunk &chunk) {
  constexpr int kBlockQuads = Kind::kValues / 4, kVectors = RowCodes<Kind>::kVectors;
  uint8_t *codes = &chunk.codes[first / PanelVector::kRows][0][first % PanelVector::kRows * 4];
  for (int block = 0; block < count * kRoundedBlock / Kind::kValues; ++block) {
    uint8_t *to = codes + block * kBlockQuads * kQuadBytes;
    PanelCodes<Kind>::codes(rows, place + block * Kind::kBytes, [&](int quad, __m256i four)
                                                                    HKV_INLINE {
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + quad * kQuadBytes), biased<Kind>(four));
    });
  }
  __m256 scales[kVectors][8], offsets[kVectors][8];
  for (int row = 0; row < 8; ++row) {
    __m256 of_row[kVectors], below[kVectors];
    const uint8_t *blocks = rows[row] + place;
    uint8_t copy[kChunkBytes<Kind>];
    if (count < kChunkBlocks) blocks = padded_chunk<Kind>(blocks, count, copy);
    row_scales<Kind>(blocks, count, of_row, below);
    for (int i = 0; i < kVectors; ++i) {
      scales[i][row] = of_row[i];
      if constexpr (kWithOffset<Kind>) offsets[i][row] = below[i];
    }
  }
  for (int i = 0; i < kVectors; ++i) {
    transpose(scales[i]);
    if constexpr (kWithOffset<Kind>) transpose(offsets[i]);
    for (int group = 0; group < 8; ++group) {
      _mm256_storeu_ps(&chunk.scales[i * 8 + group][first], scales[i][group]);
      if constexpr (kWithOffset<Kind>)
        _mm256_storeu_ps(&chunk.offsets[i * 8 + group][first], offsets[i][group]);
    }
  }
}

/// The integers of a group of codes that have one scale: sums[column][vector].
template <typename Kind, int Columns>
HKV_INLINE inline void add_group(const PanelChunk &chunk, int group, const int8_t *const *inputs,
                                 PanelVector::Ints (&sums)[Columns][kTileVectors]) {
  using V = PanelVector;
  constexpr int kGroupQuads = Kind::kScaleValues / 4;
  const int first = group * kGroupQuads;
#if HKV_PACKED_VNNI
  unrolled<Columns>([&](auto column) HKV_INLINE {
    unrolled<kTileVectors>([&](auto vector) HKV_INLINE { sums[column][vector] = V::zero(); });
  });
  unrolled<kGroupQuads>([&](auto i) HKV_INLINE {
    const V::Ints codes[kTileVectors] = {V::load(chunk.codes[0][first + i]),
                                         V::load(chunk.codes[1][first + i])};
    unrolled<Columns>([&](auto column) HKV_INLINE {
      unrolled<kTileVectors>([&](auto vector) HKV_INLINE {
        V::multiply_add(sums[column][vector], codes[vector], inputs[column] + 4 * (first + i));
      });
    });
  });
#else
  unrolled<kGroupQuads / Kind::kAdds>([&](auto run) HKV_INLINE {
    V::Ints pairs[Columns][kTileVectors];
    unrolled<Kind::kAdds>([&](auto i) HKV_INLINE {
      const int quad = first + run * Kind::kAdds + i;
      V::Ints codes[kTileVectors] = {V::load(chunk.codes[0][quad]), V::load(chunk.codes[1][quad])};
      const V::Ints signs[kTileVectors] = {codes[0], codes[1]};
      if constexpr (Kind::kSigned)
        for (V::Ints &vector : codes) vector = _mm256_abs_epi8(vector);
      unrolled<Columns>([&](auto column) HKV_INLINE {
        const V::Ints input = V::broadcast(inputs[column] + 4 * quad);
        unrolled<kTileVectors>([&](auto vector) HKV_INLINE {
          const V::Ints factor = Kind::kSigned ? _mm256_sign_epi8(input, signs[vector]) : input;
          const V::Ints product = _mm256_maddubs_epi16(codes[vector], factor);
          pairs[column][vector] =
              i == 0 ? product : _mm256_add_epi16(pairs[column][vector], product);
          // Else GCC adds in another order, for which it stores all products first.
          asm("" : "+x"(pairs[column][vector]));
        });
      });
    });
    unrolled<Columns>([&](auto column) HKV_INLINE {
      unrolled<kTileVectors>([&](auto vector) HKV_INLINE {
        const V::Ints fours = _mm256_madd_epi16(pairs[column][vector], _mm256_set1_epi16(1));
        sums[column][vector] = run == 0 ? fours : _mm256_add_epi32(sums[column][vector], fours);
      });
    });
  });
#endif
}

/// Asks for bytes of rows that are read later, some of them in each of some steps: all in one go would
/// hold up the reads of what is multiplied meanwhile.
class GradualPrefetch {
 public:
  /// May ask for what lies behind the weights, which does no harm.
  GradualPrefetch(const uint8_t *from, int64_t offset, int64_t bytes, int64_t steps, int64_t rows = 1,
                  int64_t stride = 0)
      : row_(reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(offset)),
        stride_(static_cast<uintptr_t>(stride)),
        bytes_(static_cast<uintptr_t>(bytes)),
        lines_((bytes + 63) / 64 * rows),
        steps_(steps) {}

  HKV_INLINE void step() {
    for (due_ += lines_; due_ >= steps_; due_ -= steps_) {
      __builtin_prefetch(reinterpret_cast<const void *>(row_ + asked_), 0, 2);
      asked_ += 64;
      if (asked_ < bytes_) continue;
      row_ += stride_;
      asked_ = 0;
    }
  }

 private:
  uintptr_t row_, stride_, bytes_, asked_ = 0;
  int64_t lines_, steps_, due_ = 0;
};

/// Adds the products of a tile's rows with `Columns` columns, from `first` on, to totals [column, row].
template <typename Kind, int Columns>
void add_tile(const PanelChunk &chunk, int groups, const RoundedInputs &inputs, int64_t at,
              int64_t first, GradualPrefetch &prefetch, float *totals, int64_t stride) {
  using V = PanelVector;
  const int8_t *codes[Columns];
  const float *scales[Columns], *sums[Columns];
  Floats all[Columns][kTileVectors];
  for (int column = 0; column < Columns; ++column) {
    codes[column] = inputs.codes(at, first + column);
    scales[column] = inputs.scales(at, first + column);
    sums[column] = inputs.sums(at, first + column);
    for (int vector = 0; vector < kTileVectors; ++vector)
      all[column][vector] = load_floats(totals + column * stride + vector * V::kRows);
  }
  for (int group = 0; group < groups; ++group) {
    prefetch.step();
    V::Ints integers[Columns][kTileVectors];
    add_group<Kind, Columns>(chunk, group, codes, integers);
    const int part = group * Kind::kScaleValues / kRoundedBlock;
    unrolled<Columns>([&](auto column) HKV_INLINE {
      unrolled<kTileVectors>([&](auto vector) HKV_INLINE {
        all[column][vector] += V::floats(integers[column][vector]) *
                               load_floats(&chunk.scales[group][vector * V::kRows]) *
                               scales[column][part];
        if constexpr (Kind::kOffset)
          all[column][vector] +=
              load_floats(&chunk.offsets[group][vector * V::kRows]) * sums[column][group];
      });
    });
  }
  for (int column = 0; column < Columns; ++column)
    for (int vector = 0; vector < kTileVectors; ++vector)
      store_floats(totals + column * stride + vector * V::kRows, all[column][vector]);
}

/// Columns [first, last) of a tile's rows.
template <typename Kind>
void add_columns_of_tile(const PanelChunk &chunk, int groups, const RoundedInputs &inputs,
                         int64_t at, int64_t first, int64_t last, GradualPrefetch &prefetch,
                         float *totals, int64_t stride) {
  for (; first < last; first += kTileColumns, totals += kTileColumns * stride) {
    const auto add = [&](auto tile) HKV_INLINE {
      tile(chunk, groups, inputs, at, first, prefetch, totals, stride);
    };
    switch (last - first) {
      case 1: add(add_tile<Kind, 1>); break;
      case 2: add(add_tile<Kind, 2>); break;
      case 3: add(add_tile<Kind, 3>); break;
      default: add(add_tile<Kind, kTileColumns>);
    }
  }
}

/// Adds the products of rows that lie `stride` bytes apart with columns [first, last) to totals
/// [column, padded_rows]; padded_rows: `num_rows`, rounded up to whole tiles.
template <typename Kind>
void add_panel(const uint8_t *weight, int64_t stride, int64_t num_rows, const RoundedInputs &inputs,
               int64_t first, int64_t last, float *totals, int64_t padded_rows) {
  constexpr int64_t kChunkBytes = kChunkValues / Kind::kValues * Kind::kBytes;
  const uint8_t *rows[kMaxPanelRows];  // behind the last row it once more
  for (int64_t row = 0; row < padded_rows; ++row)
    rows[row] = weight + std::min(row, num_rows - 1) * stride;
  PanelChunk decoded;
  for (int64_t chunk = 0; chunk < inputs.chunks; ++chunk) {
    const int64_t values = std::min<int64_t>(kChunkValues, inputs.num_inputs - chunk * kChunkValues);
    const int count = static_cast<int>(values / kRoundedBlock);
    const int groups = static_cast<int>(values / Kind::kScaleValues);
    for (int64_t tile = 0; tile < padded_rows; tile += kTileRows) {
      for (int eight = 0; eight < kTileRows; eight += 8)
        decode_eight<Kind>(rows + tile + eight, chunk * kChunkBytes, count, eight, decoded);
      // While a tile is multiplied, as many bytes behind the panel are asked for.
      GradualPrefetch prefetch(weight + num_rows * stride,
                               (chunk * padded_rows + tile) * kChunkBytes, kTileRows * kChunkBytes,
                               groups * ((last - first + kTileColumns - 1) / kTileColumns));
      add_columns_of_tile<TileKindOf<Kind>>(decoded, groups, inputs, chunk, first, last, prefetch,
                                            totals + tile, padded_rows);
    }
  }
}

}  // namespace hkv

#endif
