// Products of a few rows of packed weights with a few columns of inputs: a row is decoded once for all
// columns, and the lanes of four rows' sums are added together.
#pragma once

#include "packed_codes.h"
#include "packed_inputs.h"
#include "packed_kinds.h"
#include "unrolled.h"

namespace hkv {

constexpr int kRowsTogether = 4;

/// So many rows, one after the other; they end with the matrix, of which no byte behind is read.
struct RowGroup {
  const uint8_t *first;
  int64_t stride;
  int count;  // 1 to kRowsTogether
  const uint8_t *end;

  const uint8_t *row(int i) const { return first + i * stride; }
};

#if defined(__AVX2__)

constexpr int kRowColumns = 4;  // that share what is decoded

/// Sums of four products each; of eight, where there are two vectors of codes and inputs.
template <typename Kind>
HKV_INLINE inline __m256i dots(__m256i codes, __m256i inputs) {
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
template <typename Kind>
HKV_INLINE inline __m256i dots(__m256i low, __m256i high, __m256i first, __m256i second) {
#if defined(__AVX512VNNI__)
  return _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), low, first), high, second);
#elif defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), low, first), high,
                                 second);
#else
  if constexpr (Kind::kSigned)
    return _mm256_add_epi32(dots<Kind>(low, first), dots<Kind>(high, second));
  const __m256i pairs =
      _mm256_add_epi16(_mm256_maddubs_epi16(low, first), _mm256_maddubs_epi16(high, second));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

/// Sums of neighbouring lanes, within 128 bits those of `a` before those of `b`. Lanes are sums of
/// `Products` products: where they fit into 16 bits, a product with ones is the fastest way.
template <typename Kind, int Products>
HKV_INLINE inline __m256i join(__m256i a, __m256i b) {
  constexpr int kLargest = Kind::kSigned ? 255 : (1 << Kind::kBits) - 1;
  if constexpr (Products * kLargest * 127 <= 32767)
    return _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1));
  else
    return _mm256_hadd_epi32(a, b);
}

/// The sums of the lanes of four vectors.
HKV_INLINE inline __m128 sum_lanes(const __m256 (&rows)[kRowsTogether]) {
  __m128 halves[kRowsTogether];
  for (int i = 0; i < kRowsTogether; ++i)
    halves[i] = _mm_add_ps(_mm256_castps256_ps128(rows[i]), _mm256_extractf128_ps(rows[i], 1));
  _MM_TRANSPOSE4_PS(halves[0], halves[1], halves[2], halves[3]);
  return _mm_add_ps(_mm_add_ps(halves[0], halves[2]), _mm_add_ps(halves[1], halves[3]));
}

template <typename Kind, int Columns>
class RowSums {
 public:
  /// Adds the products of the first `count` blocks of a chunk, of short ones; of all others a chunk is
  /// one. All bytes of a whole chunk are read, and inputs behind the blocks are 0.
  HKV_INLINE void add_chunk(const uint8_t *blocks, int count, const RoundedInputs &inputs,
                            int64_t chunk, int64_t first) {
    __m256 scales[kVectors];
    add_offsets(blocks, count, inputs, chunk, first, scales);
    const int8_t *codes[Columns];
    for (int column = 0; column < Columns; ++column) codes[column] = inputs.codes(chunk, first + column);
    __m256i sums[2][Columns];
    unrolled<kPairs<Kind> ? 1 : 2>([&](auto half) HKV_INLINE {
      __m256i twos[2][Columns];
      unrolled<2>([&](auto two) HKV_INLINE { add_two<half * 2 + two>(blocks, codes, twos[two]); });
      for (int column = 0; column < Columns; ++column)
        sums[half][column] = join<Kind, kPairs<Kind> ? 16 : 8>(twos[0][column], twos[1][column]);
    });
    for (int column = 0; column < Columns; ++column) {
      const __m256 of_inputs = _mm256_load_ps(inputs.scales(chunk, first + column));
      if constexpr (kVectors == 2) {  // sums[0]: of groups 0, 2, 4, 6 and 1, 3, 5, 7
        const __m256 low = _mm256_permute2f128_ps(of_inputs, of_inputs, 0x00);
        const __m256 high = _mm256_permute2f128_ps(of_inputs, of_inputs, 0x11);
        const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        add(column, sums[0][column], _mm256_permutevar8x32_ps(scales[0], order) * low);
        add(column, sums[1][column], _mm256_permutevar8x32_ps(scales[1], order) * high);
      } else if constexpr (kPairs<Kind>) {
        add(column, sums[0][column], scales[0] * of_inputs);
      } else {
        const __m256i a = sums[0][column], b = sums[1][column];
        add(column,
            _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                             _mm256_permute2x128_si256(a, b, 0x31)),
            scales[0] * of_inputs);
      }
    }
  }

  /// The sums of a column's products.
  __m256 of_column(int column) const { return sums_[column]; }

 private:
  static constexpr int kVectors = RowCodes<Kind>::kVectors;

  HKV_INLINE void add(int column, __m256i integers, __m256 scales) {
    sums_[column] += _mm256_cvtepi32_ps(integers) * scales;
  }

  HKV_INLINE void add_offsets(const uint8_t *blocks, int count, const RoundedInputs &inputs,
                              int64_t chunk, int64_t first, __m256 *scales) {
    __m256 offsets[kVectors];
    row_scales<Kind>(blocks, count, scales, offsets);
    if constexpr (kWithOffset<Kind>)
      for (int column = 0; column < Columns; ++column)
        for (int i = 0; i < kVectors; ++i)
          sums_[column] += offsets[i] * _mm256_load_ps(inputs.sums(chunk, first + column) + 8 * i);
  }

  /// Joins the sums of two vectors: parts 2 Two and the next, or of blocks in pairs.
  template <int Two>
  HKV_INLINE static void add_two(const uint8_t *blocks, const int8_t *const *codes,
                                 __m256i (&sums)[Columns]) {
    constexpr int kAt = Two * 2 * kRoundedBlock;
    if constexpr (kPairs<Kind>) {
      __m256i weights[2][2];
      for (int i = 0; i < 2; ++i) {
        const uint8_t *block = blocks + (Two * 2 + i) * Kind::kBytes;
        row_pair<Kind>(block, block + 4 * Kind::kBytes, weights[i][0], weights[i][1]);
      }
      for (int column = 0; column < Columns; ++column) {
        const int8_t *from = codes[column] + 2 * kAt;
        sums[column] = join<Kind, 8>(
            dots<Kind>(weights[0][0], weights[0][1], load_32(from), load_32(from + 32)),
            dots<Kind>(weights[1][0], weights[1][1], load_32(from + 64), load_32(from + 96)));
      }
    } else {
      constexpr int kBlock = kAt / Kind::kValues, kNext = (kAt + kRoundedBlock) / Kind::kValues;
      const __m256i low = row_codes<Kind, Two * 2>(blocks + kBlock * Kind::kBytes);
      const __m256i high = row_codes<Kind, Two * 2 + 1>(blocks + kNext * Kind::kBytes);
      for (int column = 0; column < Columns; ++column)
        sums[column] = join<Kind, 4>(dots<Kind>(low, load_32(codes[column] + kAt)),
                                     dots<Kind>(high, load_32(codes[column] + kAt + 32)));
    }
  }

  __m256 sums_[Columns] = {};
};

/// A row that ends before `end`.
template <typename Kind, int Columns>
HKV_INLINE inline void sum_row(const uint8_t *row, const uint8_t *end, const RoundedInputs &inputs,
                               int64_t first, RowSums<Kind, Columns> &sums) {
  constexpr int64_t kAhead = 8 * 1024;  // bytes between what is asked for and what is read
  const int64_t whole = inputs.num_inputs / kChunkValues;
  const uint8_t *blocks = row;
  for (int64_t chunk = 0; chunk < whole; ++chunk, blocks += kChunkBytes<Kind>) {
    for (int line = 0; line < kChunkBytes<Kind>; line += 64)
      __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(blocks) +
                                                        kAhead + line));
    sums.add_chunk(blocks, kChunkBlocks, inputs, chunk, first);
  }
  if constexpr (Kind::kValues < kChunkValues) {
    if (whole == inputs.chunks) return;
    const int count = static_cast<int>(inputs.num_inputs % kChunkValues / Kind::kValues);
    uint8_t copy[kChunkBytes<Kind>];
    if (end - blocks < kChunkBytes<Kind>) blocks = padded_chunk<Kind>(blocks, count, copy);
    sums.add_chunk(blocks, count, inputs, whole, first);
  }
}

template <typename Kind, int Columns>
void sum_columns(const RowGroup &group, const RoundedInputs &inputs, int64_t first, float *totals) {
  __m256 of_rows[Columns][kRowsTogether] = {};
  for (int i = 0; i < group.count; ++i) {
    RowSums<Kind, Columns> sums;
    sum_row(group.row(i), group.end, inputs, first, sums);
    for (int column = 0; column < Columns; ++column) of_rows[column][i] = sums.of_column(column);
  }
  for (int column = 0; column < Columns; ++column)
    _mm_storeu_ps(totals + column * kRowsTogether, sum_lanes(of_rows[column]));
}

/// Writes the products of a group of rows to totals [inputs.columns, kRowsTogether].
template <typename Kind>
void sum_rows(const RowGroup &group, const RoundedInputs &inputs, float *totals) {
  int64_t first = 0;
  for (; first + kRowColumns <= inputs.columns; first += kRowColumns)
    sum_columns<Kind, kRowColumns>(group, inputs, first, totals + first * kRowsTogether);
  totals += first * kRowsTogether;
  switch (inputs.columns - first) {
    case 1: return sum_columns<Kind, 1>(group, inputs, first, totals);
    case 2: return sum_columns<Kind, 2>(group, inputs, first, totals);
    case 3: return sum_columns<Kind, 3>(group, inputs, first, totals);
  }
}

#else

template <typename Kind>
constexpr bool kPairs = false;  // of blocks, which a vector's halves would hold

/// Adds a row's products to every kRowsTogether-th of totals.
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
        totals[column * kRowsTogether] +=
            static_cast<float>(product) * (scales[group] * input_scales[at / kRoundedBlock]);
        if (Kind::kHasOffset) totals[column * kRowsTogether] += offsets[group] * sums[group];
      }
    }
  }
}

/// Writes the products of a group of rows to totals [inputs.columns, kRowsTogether].
template <typename Kind>
void sum_rows(const RowGroup &group, const RoundedInputs &inputs, float *totals) {
  std::fill(totals, totals + inputs.columns * kRowsTogether, 0.0f);
  for (int i = 0; i < group.count; ++i) add_row<Kind>(group.row(i), inputs, totals + i);
}

#endif

}  // namespace hkv
