// Scans of the blocks of one tier: keys whose scores are above the thresholds of queries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "select.h"
#include "sketch_query.h"
#include "slices.h"

namespace hkv {

namespace detail {

/// Adds the lines of blocks, `gap` bytes from one to the next, to the sums of a part of their keys; the
/// same lines `ahead` bytes further are asked for.
template <int Queries, int Blocks>
HKV_INLINE inline void add_lines(DotSums<Queries> (&sums)[Blocks], const uint8_t *line, int64_t gap,
                                 const SketchLines lines, const int32_t *words, int64_t ahead) {
  const auto each = [&](auto &&add) HKV_INLINE {
    hkv::unrolled<Blocks>([&](auto block) HKV_INLINE {
      __builtin_prefetch(line + block * gap + ahead);
      add(sums[block], line + block * gap);
    });
    line += kLineBytes;
  };
  const auto flush = [&]() HKV_INLINE {
    hkv::unrolled<Blocks>([&](auto block) HKV_INLINE { sums[block].flush(); });
  };
  for (int i = 0; i < lines.of_8; ++i, words += kWordsOf8 * Queries)
    each([&](auto &to, const uint8_t *at) HKV_INLINE { to.add_bytes(at, words); });
  for (int i = 0; i < lines.of_4; flush())
    for (const int end = std::min(lines.of_4, i + kFlushNibbles); i < end; ++i, words += 2 * Queries)
      each([&](auto &to, const uint8_t *at) HKV_INLINE { to.add_nibbles(at, words); });
  for (int i = 0; i < lines.of_2; flush())
    for (const int end = std::min(lines.of_2, i + kFlushPairs); i < end; ++i, words += 4 * Queries)
      each([&](auto &to, const uint8_t *at) HKV_INLINE { to.add_pairs(at, words); });
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
    with_width([&](auto width) {
      constexpr int kQueries = decltype(width)::value;
      if (tier_.pages == nullptr) return push_blocks<kQueries, false>(first, last, selections);
      push_blocks<kQueries, true>(first, last, selections);
    });
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

  /// Blocks with a key above its limit, until somebody looks at them.
  ///
  /// Which ones these are cannot be predicted, and a branch that is taken wrongly costs as much as a
  /// block: the sums of every block are stored, and where there is no such key the next ones take
  /// their place.
  template <int Queries>
  struct Passed {
    static constexpr int kRoom = 32;

    alignas(64) int32_t sums[kRoom + 1][Queries * HKV_BLOCK_KEYS];
    int64_t blocks[kRoom + 1];
  };

  /// A function of its own: inside others GCC 12 leaves the sums in memory. Without pages it asks for
  /// what comes later at a distance that is written into its instructions.
  template <int Queries, bool HasPages>
  __attribute__((noinline)) void push_blocks(int64_t first, int64_t last,
                                             Selection *selections) const {
    constexpr int kBlocks = blocks_at_once(Queries);
    int32_t limits[Queries], start[Queries];
    find_limits<Queries>(selections, limits, start);
    Passed<Queries> passed;
    int count = 0;
    const SketchLines lines = lines_;
    const int64_t bytes = bytes_;
    const int32_t *words = queries_.words(slice_);
    const uint8_t *at = nullptr;
    BlockRun run{nullptr, first, 0};
    for (int64_t block = first; block < last;
         block = std::min(block + kBlocks, run.end), at += kBlocks * bytes) {
      if (block == run.end) {
        run = run_of(tier_, block, last, bytes, kPrefetchBytes);
        at = run.at;
      }
      const int64_t gap = block + kBlocks <= run.end ? bytes : 0;  // else the last one, twice
      bool any[kBlocks] = {};
      for (int part = 0; part < detail::kDotParts; ++part) {
        DotSums<Queries> sums[kBlocks];
        unrolled<kBlocks>([&](auto i) HKV_INLINE { sums[i].start(start); });
        detail::add_lines<Queries, kBlocks>(sums, at + part * detail::kPartBytes, gap, lines, words,
                                            part != 0 ? 0 : HasPages ? run.later : kPrefetchBytes);
        unrolled<kBlocks>([&](auto i) HKV_INLINE {
          sums[i].store(passed.sums[count] + part * kDotKeys);
          passed.blocks[count] = block + i;
          any[i] |= sums[i].any() && (decltype(i)::value == 0 || gap != 0);
          if constexpr (kBlocks > 1) count += any[i];
        });
      }
      if constexpr (kBlocks == 1) count += any[0];
      if (__builtin_expect(count > Passed<Queries>::kRoom - kBlocks, 0)) {
        if (take<Queries>(passed, count, last, limits, selections))
          find_limits<Queries>(selections, limits, start);
        count = 0;
      }
    }
    take<Queries>(passed, count, last, limits, selections);
  }

  template <int Queries>
  void find_limits(const Selection *selections, int32_t *limits, int32_t *start) const {
    for (int query = 0; query < Queries; ++query) {
      limits[query] = scale(query).least_above(selections[query].threshold());
      start[query] = scale(query).shift - limits[query];
    }
  }

  /// Adds what passed to the selections, before block `last`; returns whether a threshold has risen.
  template <int Queries>
  __attribute__((noinline)) bool take(const Passed<Queries> &passed, int count, int64_t last,
                                      const int32_t *limits, Selection *selections) const {
    const int64_t end = std::min(tier_.count, last * HKV_BLOCK_KEYS);
    bool risen = false;
    for (int query = 0; query < Queries; ++query) {
      const float threshold = selections[query].threshold();
      const SketchScale own = scale(query);
      for (int i = 0; i < count; ++i) {
        const int32_t *sums = passed.sums[i] + query * HKV_BLOCK_KEYS;
        const int64_t place = passed.blocks[i] * HKV_BLOCK_KEYS;
        float scores[HKV_BLOCK_KEYS];
        for (int key = 0; key < HKV_BLOCK_KEYS; ++key)
          scores[key] = own.score(sums[key] + limits[query]);
        for (int64_t key = std::max<int64_t>(0, end - place); key < HKV_BLOCK_KEYS; ++key)
          scores[key] = -std::numeric_limits<float>::infinity();
        selections[query].add(scores, HKV_BLOCK_KEYS, static_cast<uint32_t>(base_ + place));
      }
      risen |= selections[query].threshold() != threshold;
    }
    return risen;
  }

  template <int Queries>
  __attribute__((noinline)) void score_block(int64_t block, int64_t ahead, float *out) const {
    const uint8_t *at = run_of(tier_, block, block + 1, bytes_, 0).at;
    const int64_t last = (tier_.count - 1) / HKV_BLOCK_KEYS, later = std::min(last, block + ahead);
    const int64_t bytes_ahead = run_of(tier_, later, later + 1, bytes_, 0).at - at;
    int32_t start[Queries];
    for (int query = 0; query < Queries; ++query) start[query] = scale(query).shift;
    alignas(64) int32_t values[Queries * HKV_BLOCK_KEYS];
    for (int part = 0; part < detail::kDotParts; ++part) {
      DotSums<Queries> sums[1];
      sums[0].start(start);
      detail::add_lines<Queries, 1>(sums, at + part * detail::kPartBytes, 0, lines_,
                                    queries_.words(slice_), part == 0 ? bytes_ahead : 0);
      sums[0].store(values + part * kDotKeys);
    }
    for (int query = 0; query < Queries; ++query)
      for (int key = 0; key < HKV_BLOCK_KEYS; ++key)
        out[query * HKV_BLOCK_KEYS + key] =
            scale(query).score(values[query * HKV_BLOCK_KEYS + key]);
  }

  const hkv_sketch_tier &tier_;
  const SketchLines lines_;
  const SketchQueries &queries_;
  const int64_t slice_, base_, bytes_;
};

}  // namespace hkv
