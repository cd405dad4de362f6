// Scans of the blocks of one tier: keys whose scores are above the thresholds of queries.
#pragma once

#include <algorithm>
#include <cstdint>

#include "select.h"
#include "sketch_query.h"
#include "slices.h"

namespace hkv {

namespace detail {

/// Adds the lines of a block to the sums of a part of its keys; the same lines `ahead` bytes further
/// are asked for.
template <int Queries>
HKV_INLINE inline void add_lines(DotSums<Queries> &sums, const uint8_t *line,
                                 const SketchLines lines, const int32_t *words, int64_t ahead) {
  for (int i = 0; i < lines.of_8; ++i, line += kLineBytes, words += kWordsOf8 * Queries) {
    __builtin_prefetch(line + ahead);
    sums.add_bytes(line, words);
  }
  for (int i = 0; i < lines.of_4;) {
    for (const int end = std::min(lines.of_4, i + kFlushNibbles); i < end; ++i) {
      __builtin_prefetch(line + ahead);
      sums.add_nibbles(line, words);
      line += kLineBytes;
      words += 2 * Queries;
    }
    sums.flush();
  }
  for (int i = 0; i < lines.of_2;) {
    for (const int end = std::min(lines.of_2, i + kFlushPairs); i < end; ++i) {
      __builtin_prefetch(line + ahead);
      sums.add_pairs(line, words);
      line += kLineBytes;
      words += 4 * Queries;
    }
    sums.flush();
  }
}

constexpr int kDotParts = HKV_BLOCK_KEYS / kDotKeys;
constexpr int kPartBytes = kQuadChannels * kDotKeys;  // of each line

}  // namespace detail

/// One slice of queries against blocks of one tier.
class TierScan {
 public:
  /// base: the number of the tier's first key among the candidates.
  TierScan(const hkv_sketch_tier &tier, const SketchQueries &queries, int64_t slice, int64_t base)
      : tier_(tier),
        lines_(*tier.map),
        queries_(queries),
        slice_(slice),
        base_(base),
        bytes_(lines_.block_bytes()) {}

  /// Pushes keys of blocks first .. last - 1 into selections [queries of the slice].
  void push(int64_t first, int64_t last, Selection *selections) const {
    with_width([&](auto width) { push_blocks<decltype(width)::value>(first, last, selections); });
  }

  /// out[query][16]: scores of one whole block; blocks `ahead` further are asked for.
  void score(int64_t block, int64_t ahead, float *out) const {
    with_width([&](auto width) { score_block<decltype(width)::value>(block, ahead, out); });
  }

 private:
  template <typename Body>
  void with_width(const Body &body) const {
    const int width = queries_.num_queries(slice_);
    if (width == 1) return body(std::integral_constant<int, 1>());
    if (width == 2) return body(std::integral_constant<int, 2>());
    if (width == 3) return body(std::integral_constant<int, 3>());
    if constexpr (kSketchSlice > 4) {
      if (width == 5) return body(std::integral_constant<int, 5>());
      if (width == 6) return body(std::integral_constant<int, 6>());
      if (width == 7) return body(std::integral_constant<int, 7>());
      if (width == 8) return body(std::integral_constant<int, 8>());
    }
    body(std::integral_constant<int, 4>());
  }

  const SketchScale &scale(int query) const {
    return queries_.scale(slice_ * kSketchSlice + query);
  }

  /// A function of its own: inside others GCC 12 leaves the sums in memory.
  template <int Queries>
  __attribute__((noinline)) void push_blocks(int64_t first, int64_t last,
                                             Selection *selections) const {
    int32_t limits[Queries], start[Queries];
    const auto limit = [&](int query) {
      limits[query] = scale(query).least_above(selections[query].threshold());
      start[query] = scale(query).shift - limits[query];
    };
    for (int query = 0; query < Queries; ++query) limit(query);
    const SketchLines lines = lines_;
    const int64_t bytes = bytes_;
    const int32_t *words = queries_.words(slice_);
    const uint8_t *at = tier_.blocks + first * bytes;
    for (int64_t block = first; block < last; ++block, at += bytes)
      for (int part = 0; part < detail::kDotParts; ++part) {
        DotSums<Queries> sums;
        sums.start(start);
        detail::add_lines<Queries>(sums, at + part * detail::kPartBytes, lines, words,
                                   part == 0 ? kPrefetchBytes : 0);
        if (__builtin_expect(!sums.any(), 1)) continue;
        const int64_t place = block * HKV_BLOCK_KEYS + part * kDotKeys;
        alignas(64) int32_t values[Queries * kDotKeys];
        sums.store(values);
        for (int query = 0; query < Queries; ++query)
          if (push_lanes(query, values + query * kDotKeys, limits[query], place,
                         selections[query]))
            limit(query);
      }
  }

  /// Returns whether the threshold has risen.
  bool push_lanes(int query, const int32_t *values, int32_t limit, int64_t place,
                  Selection &selection) const {
    uint32_t passing = not_negative(values);
    const float threshold = selection.threshold();
    const int64_t left = tier_.count - place;
    if (left < kDotKeys) passing &= left > 0 ? (1u << left) - 1 : 0;
    for (; passing != 0; passing &= passing - 1) {
      const int lane = __builtin_ctz(passing);
      selection.push(scale(query).score(values[lane] + limit),
                     static_cast<uint32_t>(base_ + place + lane));
    }
    return selection.threshold() != threshold;
  }

  template <int Queries>
  __attribute__((noinline)) void score_block(int64_t block, int64_t ahead, float *out) const {
    const uint8_t *at = tier_.blocks + block * bytes_;
    int32_t start[Queries];
    for (int query = 0; query < Queries; ++query) start[query] = scale(query).shift;
    for (int part = 0; part < detail::kDotParts; ++part) {
      DotSums<Queries> sums;
      sums.start(start);
      detail::add_lines<Queries>(sums, at + part * detail::kPartBytes, lines_,
                                 queries_.words(slice_), part == 0 ? ahead * bytes_ : 0);
      alignas(64) int32_t values[Queries * kDotKeys];
      sums.store(values);
      for (int query = 0; query < Queries; ++query)
        for (int key = 0; key < kDotKeys; ++key)
          out[query * HKV_BLOCK_KEYS + part * kDotKeys + key] =
              scale(query).score(values[query * kDotKeys + key]);
    }
  }

  const hkv_sketch_tier &tier_;
  const SketchLines lines_;
  const SketchQueries &queries_;
  const int64_t slice_, base_, bytes_;
};

}  // namespace hkv
