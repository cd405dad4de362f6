// Scores of interleaved 8-bit keys against up to 16 queries at a time.
//
// No horizontal sums: an accumulator holds the same query's products with 16 keys. A vector of keys
// is loaded once for all queries of a slice.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "quantise.h"
#include "slices.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hkv {

namespace detail {

#if defined(__AVX512VNNI__)

constexpr int kQueryWords = 1;  // of 32 bits, for 4 channels of a query

/// One block after the other: the reads of several at once would be slower than memory, which costs
/// more than the latency of few accumulators. A function of its own: inside others GCC 12 leaves the
/// accumulators in memory.
template <int Queries>
__attribute__((noinline)) void score_chunk(const uint8_t *blocks, int64_t count, int quad_count,
                        const int32_t *queries, const int32_t *bias, float *out, int64_t row,
                        int64_t ahead) {
  for (int64_t block = 0; block < count; ++block, out += HKV_BLOCK_KEYS) {
    __m512i sums[Queries];
#pragma GCC unroll 16
    for (int query = 0; query < Queries; ++query) sums[query] = _mm512_set1_epi32(bias[query]);
    const int32_t *factors = queries;
    for (int quad = 0; quad < quad_count; ++quad, factors += Queries, blocks += kLineBytes) {
      _mm_prefetch(reinterpret_cast<const char *>(blocks + ahead), _MM_HINT_T0);
      const __m512i keys = _mm512_load_si512(reinterpret_cast<const void *>(blocks));
#pragma GCC unroll 16
      for (int query = 0; query < Queries; ++query)
        multiply_add(sums[query], keys, _mm512_set1_epi32(factors[query]));
    }
    const __m512 level = _mm512_load_ps(blocks);
    blocks += kLineBytes;
#pragma GCC unroll 16
    for (int query = 0; query < Queries; ++query)
      _mm512_storeu_ps(out + query * row,
                       _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xffff, sums[query]), level));
  }
}

#elif defined(__AVX2__)

#if defined(__AVXVNNI__)

constexpr int kQueryWords = 1;

inline QueryCodes broadcast(const int32_t *words) { return {_mm256_set1_epi32(words[0])}; }

#else

constexpr int kQueryWords = 2;  // even and odd channels, widened to 16 bits

inline QueryCodes broadcast(const int32_t *words) {
  return {_mm256_set1_epi32(words[0]), _mm256_set1_epi32(words[1])};
}

#endif

/// Both halves of a block, so that a query's codes are spread once for both; more than 4 queries
/// would not fit into the registers.
template <int Queries>
inline void score_block(const uint8_t *keys, int quad_count, const int32_t *queries,
                        int64_t query_step, const int32_t *bias, float *out, int64_t row,
                        int64_t ahead) {
  constexpr int kHalf = kLineBytes / 2, kHalfKeys = HKV_BLOCK_KEYS / 2;
  Sums low[Queries], high[Queries];
  for (int query = 0; query < Queries; ++query)
    low[query] = high[query] = _mm256_set1_epi32(bias[query]);
  for (int quad = 0; quad < quad_count; ++quad, keys += kLineBytes, queries += query_step) {
    _mm_prefetch(reinterpret_cast<const char *>(keys + ahead), _MM_HINT_T0);
    const Codes low_keys = load_codes(keys), high_keys = load_codes(keys + kHalf);
    for (int query = 0; query < Queries; ++query) {
      const QueryCodes factor = broadcast(queries + kQueryWords * query);
      low[query] = add_products(low[query], low_keys, factor);
      high[query] = add_products(high[query], high_keys, factor);
    }
  }
  const float *level = reinterpret_cast<const float *>(keys);
  const __m256 low_level = _mm256_load_ps(level), high_level = _mm256_load_ps(level + kHalfKeys);
  for (int query = 0; query < Queries; ++query, out += row) {
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(low[query]), low_level));
    _mm256_storeu_ps(out + kHalfKeys, _mm256_mul_ps(_mm256_cvtepi32_ps(high[query]), high_level));
  }
}

template <int Queries>
inline void score_chunk(const uint8_t *blocks, int64_t count, int quad_count,
                        const int32_t *queries, const int32_t *bias, float *out, int64_t row,
                        int64_t ahead) {
  constexpr int kAtOnce = Queries < 4 ? Queries : 4;
  const int64_t bytes = int64_t{quad_count + 1} * kLineBytes;
  for (int64_t block = 0; block < count; ++block, blocks += bytes)
    for (int query = 0; query < Queries; query += kAtOnce)
      score_block<kAtOnce>(blocks, quad_count, queries + kQueryWords * query,
                           kQueryWords * Queries, bias + query,
                           out + query * row + block * HKV_BLOCK_KEYS, row,
                           query == 0 ? ahead : 0);
}

#else

constexpr int kQueryWords = 2;

/// Plain 16-bit products of even and odd channels, which compilers turn into vector code.
template <int Queries>
inline void score_chunk(const uint8_t *blocks, int64_t count, int quad_count,
                        const int32_t *queries, const int32_t *bias, float *out, int64_t row,
                        int64_t ahead) {
  const int64_t bytes = int64_t{quad_count + 1} * kLineBytes;
  for (int64_t block = 0; block < count; ++block) {
    const uint8_t *keys = blocks + block * bytes;
    float level[HKV_BLOCK_KEYS];
    std::memcpy(level, keys + bytes - kLineBytes, sizeof level);
    for (int query = 0; query < Queries; ++query) {
      int32_t sums[HKV_BLOCK_KEYS];
      for (int32_t &sum : sums) sum = bias[query];
      for (int quad = 0; quad < quad_count; ++quad) {
        const uint8_t *at = keys + int64_t{quad} * kLineBytes;
        __builtin_prefetch(at + (query == 0 ? ahead : 0));
        int16_t factor[4];  // even, even, odd, odd
        std::memcpy(factor, queries + 2 * (int64_t{quad} * Queries + query), sizeof factor);
        for (int key = 0; key < HKV_BLOCK_KEYS; ++key)
          sums[key] += at[4 * key] * factor[0] + at[4 * key + 2] * factor[1] +
                       at[4 * key + 1] * factor[2] + at[4 * key + 3] * factor[3];
      }
      float *scores = out + query * row + block * HKV_BLOCK_KEYS;
      for (int key = 0; key < HKV_BLOCK_KEYS; ++key)
        scores[key] = static_cast<float>(sums[key]) * level[key];
    }
  }
}

#endif

}  // namespace detail

/// Scores of the keys of one head against any number of queries, in slices of 16.
///
/// A score lacks the query's scale and offset, which do not change the order.
class BlockScores {
 public:
  /// queries: [count, dim].
  void prepare(const hkv_quantised &keys, const float *queries, int64_t count) {
    keys_ = &keys;
    count_ = count;
    const int64_t words = int64_t{quads(keys.dim)} * kSlice * detail::kQueryWords;
    const int64_t slices = (count + kSlice - 1) / kSlice;
    // Only ever grown: a search allocates nothing once it has seen its largest call.
    if (static_cast<int64_t>(words_.size()) < slices * words) words_.resize(slices * words);
    if (static_cast<int64_t>(bias_.size()) < slices * kSlice) bias_.resize(slices * kSlice);
    if (static_cast<int64_t>(scales_.size()) < count) scales_.resize(count);
    codes_.resize(quads(keys.dim) * kQuadChannels);
    std::fill_n(words_.begin(), slices * words, 0);
    std::fill_n(bias_.begin(), slices * kSlice, 0);
    for (int64_t query = 0; query < count; ++query) {
      scales_[query] = quantise_query(keys, queries + query * keys.dim, codes_.data(),
                                      static_cast<int64_t>(codes_.size()));
      bias_[query] = -kZeroCode * scales_[query].sum;
      put_codes(query, words_.data() + query / kSlice * words);
    }
  }

  int64_t num_keys() const { return keys_->count; }

  /// Queries of a slice that are worked on, padding included.
  int padded(int64_t slice) const {
    const int64_t left = count_ - slice * kSlice;
    return left > 8 ? 16 : left > 4 ? 8 : left > 2 ? 4 : left > 1 ? 2 : 1;
  }

  /// How many keys ahead of the reads a scan should ask for.
  int64_t keys_ahead() const {
    return std::max<int64_t>(1, kPrefetchBytes / block_bytes(keys_->dim)) * HKV_BLOCK_KEYS;
  }

  /// out[query][key] with `row` floats a query; first is a multiple of 16, and count is filled up
  /// to one with NaN.
  ///
  /// ahead_keys: keys from each one to that which is asked for with it, a multiple of 16; 0 for none.
  void score(int64_t slice, int64_t first, int64_t count, float *out, int64_t row,
             int64_t ahead_keys) const {
    const int64_t bytes = block_bytes(keys_->dim);
    const int64_t words = int64_t{quads(keys_->dim)} * kSlice * detail::kQueryWords;
    const uint8_t *blocks = keys_->blocks + first / HKV_BLOCK_KEYS * bytes;
    const int64_t num_blocks = (count + HKV_BLOCK_KEYS - 1) / HKV_BLOCK_KEYS;
    const int32_t *queries = words_.data() + slice * words, *bias = bias_.data() + slice * kSlice;
    const int64_t ahead = ahead_keys / HKV_BLOCK_KEYS * bytes;
    const int quad_count = quads(keys_->dim);
    switch (padded(slice)) {
      case 1:
        return detail::score_chunk<1>(blocks, num_blocks, quad_count, queries, bias, out, row,
                                      ahead);
      case 2:
        return detail::score_chunk<2>(blocks, num_blocks, quad_count, queries, bias, out, row,
                                      ahead);
      case 4:
        return detail::score_chunk<4>(blocks, num_blocks, quad_count, queries, bias, out, row,
                                      ahead);
      case 8:
        return detail::score_chunk<8>(blocks, num_blocks, quad_count, queries, bias, out, row,
                                      ahead);
      default:
        return detail::score_chunk<16>(blocks, num_blocks, quad_count, queries, bias, out, row,
                                       ahead);
    }
  }

  /// Gives scores of a query the scale and the offset that they lack.
  void finish(int64_t query, float *scores, int64_t count) const {
    const QueryScale query_scale = scales_[query];
    for (int64_t i = 0; i < count; ++i)
      scores[i] = scores[i] * query_scale.scale + query_scale.offset;
  }

 private:
  void put_codes(int64_t query, int32_t *words) const {
    const int64_t lane = query % kSlice, width = padded(query / kSlice);
    for (int quad = 0; quad < quads(keys_->dim); ++quad) {
      const int8_t *codes = codes_.data() + kQuadChannels * quad;
      int32_t *to = words + (quad * width + lane) * detail::kQueryWords;
      if (detail::kQueryWords == 1) {
        std::memcpy(to, codes, 4);
      } else {
        const int16_t wide[4] = {codes[0], codes[2], codes[1], codes[3]};
        std::memcpy(to, wide, 8);
      }
    }
  }

  const hkv_quantised *keys_ = nullptr;
  int64_t count_ = 0;
  std::vector<int32_t> words_, bias_;  // [slice][quad][padded][kQueryWords], [slice][16]
  std::vector<QueryScale> scales_;
  std::vector<int8_t> codes_;
};

}  // namespace hkv
