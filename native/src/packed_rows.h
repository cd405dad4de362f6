// Products of one row of packed weights with a few columns of inputs: decoded once for all of them.
#pragma once

#include "packed_codes.h"
#include "packed_inputs.h"
#include "packed_kinds.h"
#include "unrolled.h"

namespace hkv {

#if defined(__AVX2__)

constexpr int kRowColumns = 4;  // that share what is decoded

/// Sums of four products each.
template <typename Kind>
inline __m256i dots(__m256i codes, __m256i inputs) {
#if defined(__AVX512VNNI__)
  return _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, inputs);
#elif defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), codes, inputs);
#else
  if constexpr (Kind::kSigned) {
    inputs = _mm256_sign_epi8(inputs, codes);
    codes = _mm256_abs_epi8(codes);
  }
  return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, inputs), _mm256_set1_epi16(1));
#endif
}

/// The scales of 32 codes, of which each lane has four.
template <typename Kind>
inline __m256 lanes_of_scales(const float *scales, int part) {
  if constexpr (Kind::kScaleValues == kRoundedBlock) return _mm256_broadcast_ss(scales + part);
  double two;
  std::memcpy(&two, scales + 2 * part, sizeof two);
  return _mm256_permutevar_ps(_mm256_castpd_ps(_mm256_set1_pd(two)),
                              _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

inline float sum_lanes(__m256 lanes) {
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
  return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
}

template <typename Kind, int Columns>
class RowSums {
 public:
  /// Adds the products of the first `count` parts of 32 values of a chunk: all, or whole blocks.
  HKV_INLINE void add_chunk(const uint8_t *blocks, int count, const RoundedInputs &inputs,
                            int64_t chunk, int64_t first) {
    __m256 scales[kVectors], offsets[kVectors];
    row_scales<Kind>(blocks, count, scales, offsets);
    alignas(32) float products[Columns][8 * kVectors];
    const int8_t *codes[Columns];
    for (int column = 0; column < Columns; ++column) {
      codes[column] = inputs.codes(chunk, first + column);
      const __m256 of_inputs = _mm256_load_ps(inputs.scales(chunk, first + column));
      for (int i = 0; i < kVectors; ++i)
        _mm256_store_ps(products[column] + 8 * i, scales[i] * spread(of_inputs, i));
      if constexpr (kWithOffset<Kind>)
        for (int i = 0; i < kVectors; ++i)
          sums_[column][0] +=
              offsets[i] * _mm256_load_ps(inputs.sums(chunk, first + column) + 8 * i);
    }
    const auto add_part = [&](auto part, const uint8_t *block, int at) HKV_INLINE {
      const __m256i weights = row_codes<Kind, part>(block);
      for (int column = 0; column < Columns; ++column)
        sums_[column][at % kChains] +=
            _mm256_cvtepi32_ps(dots<Kind>(weights, load_32(codes[column] + at * kRoundedBlock))) *
            lanes_of_scales<Kind>(products[column], at);
    };
    if (count == kChunkBlocks) {
      unrolled<kChunkBlocks>([&](auto part) HKV_INLINE {
        add_part(part, blocks + part * kRoundedBlock / Kind::kValues * Kind::kBytes, part);
      });
    } else {
      for (int part = 0; part < count; ++part)
        add_part(std::integral_constant<int, 0>(), blocks + part * Kind::kBytes, part);
    }
  }

  void add_to(float *totals) const {
    for (int column = 0; column < Columns; ++column) {
      __m256 all = sums_[column][0];
      for (int i = 1; i < kChains; ++i) all += sums_[column][i];
      totals[column] += sum_lanes(all);
    }
  }

 private:
  static constexpr int kVectors = RowCodes<Kind>::kVectors;
  static constexpr int kChains = Columns == 1 ? 2 : 1;

  /// The inputs' scales beside vector `i` of the weights'.
  static __m256 spread(__m256 scales, int i) {
    if constexpr (kVectors == 1) return scales;
    const __m256i first = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_ps(scales, _mm256_add_epi32(first, _mm256_set1_epi32(4 * i)));
  }

  __m256 sums_[Columns][kChains] = {};
};

template <typename Kind, int Columns>
void add_columns(const uint8_t *row, const RoundedInputs &inputs, int64_t first, float *totals) {
  constexpr int kChunkBytes = kChunkValues / Kind::kValues * Kind::kBytes;
  constexpr int64_t kAhead = 8 * 1024;  // bytes between what is asked for and what is read
  RowSums<Kind, Columns> sums;
  const int64_t whole = inputs.num_inputs / kChunkValues;
  for (int64_t chunk = 0; chunk < whole; ++chunk) {
    const uint8_t *blocks = row + chunk * kChunkBytes;
    for (int line = 0; line < kChunkBytes; line += 64)
      __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(blocks) +
                                                        kAhead + line));
    sums.add_chunk(blocks, kChunkBlocks, inputs, chunk, first);
  }
  if constexpr (Kind::kValues < kChunkValues)
    if (whole < inputs.chunks)
      sums.add_chunk(row + whole * kChunkBytes,
                     static_cast<int>(inputs.num_inputs % kChunkValues / Kind::kValues), inputs,
                     whole, first);
  sums.add_to(totals);
}

/// Adds a row's products to totals [inputs.columns].
template <typename Kind>
void add_row(const uint8_t *row, const RoundedInputs &inputs, float *totals) {
  int64_t first = 0;
  for (; first + kRowColumns <= inputs.columns; first += kRowColumns)
    add_columns<Kind, kRowColumns>(row, inputs, first, totals + first);
  switch (inputs.columns - first) {
    case 1: return add_columns<Kind, 1>(row, inputs, first, totals + first);
    case 2: return add_columns<Kind, 2>(row, inputs, first, totals + first);
    case 3: return add_columns<Kind, 3>(row, inputs, first, totals + first);
  }
}

#else

/// Adds a row's products to totals [inputs.columns].
template <typename Kind>
void add_row(const uint8_t *row, const RoundedInputs &inputs, float *totals) {
  constexpr int kBlocks = kChunkValues / Kind::kValues;  // of a chunk
  constexpr int kScales = Kind::kValues / Kind::kScaleValues;
  const int64_t blocks = inputs.num_inputs / Kind::kValues;
  int8_t codes[kChunkValues];
  float scales[kBlocks * kScales], offsets[kBlocks * kScales];
  for (int64_t chunk = 0; chunk < inputs.chunks; ++chunk) {
    const int64_t first = chunk * kBlocks;
    const int count = static_cast<int>(std::min<int64_t>(kBlocks, blocks - first));
    for (int block = 0; block < count; ++block)
      Kind::decode(row + (first + block) * Kind::kBytes, codes + block * Kind::kValues,
                   scales + block * kScales, offsets + block * kScales);
    for (int64_t column = 0; column < inputs.columns; ++column) {
      const int8_t *input = inputs.codes(chunk, column);
      const float *input_scales = inputs.scales(chunk, column);
      const float *sums = inputs.sums(chunk, column);
      for (int group = 0; group < count * kScales; ++group) {
        const int at = group * Kind::kScaleValues;
        int32_t product = 0;
        for (int i = at; i < at + Kind::kScaleValues; ++i) product += codes[i] * input[i];
        totals[column] +=
            static_cast<float>(product) * (scales[group] * input_scales[at / kRoundedBlock]);
        if (Kind::kHasOffset) totals[column] += offsets[group] * sums[group];
      }
    }
  }
}

#endif

}  // namespace hkv
