// One pass over some keys of one head: scores in chunks, of which the best are kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "select.h"
#include "slices.h"

namespace hkv {

/// What a thread needs for a scan; grows to the largest it has seen.
class Scan {
 public:
  /// Selects the best `keep` of keys first .. last - 1 for each of `count` queries.
  ///
  /// first: a multiple of 16. Scores: BlockScores or RowScores, prepared for the queries.
  template <typename Scores>
  void run(const Scores &scores, int64_t count, int64_t first, int64_t last, int64_t keep) {
    reserve(count, keep);
    const int64_t slices = (count + kSlice - 1) / kSlice;
    const bool guessed = guess_thresholds(scores, count, first, last, keep);
    scan(scores, count, first, last, 0, slices);
    for (int64_t query = 0; query < count; ++query) selections_[query].finish();
    if (!guessed) return;
    for (int64_t slice = 0; slice < slices; ++slice)
      if (reset_short(slice, count, std::min(keep, last - first), keep)) {
        scan(scores, count, first, last, slice, slice + 1);
        for (int64_t query = slice * kSlice; query < end_of(slice, count); ++query)
          selections_[query].finish();
      }
  }

  const Entry *entries(int64_t query) const { return selections_[query].entries(); }
  int64_t found(int64_t query) const { return selections_[query].count(); }

 private:
  static constexpr int64_t kSample = 1024;  // keys that a threshold is guessed from
  static constexpr int64_t kSampleFrom = 4 * kSample;
  static constexpr int64_t kMaxima = kSample / 4;
  static constexpr float kEverything = -std::numeric_limits<float>::infinity();

  static int64_t end_of(int64_t slice, int64_t count) {
    return std::min(count, (slice + 1) * kSlice);
  }

  void reserve(int64_t count, int64_t keep) {
    const int64_t storage = Selection::storage(keep);
    if (static_cast<int64_t>(entries_.size()) < count * storage) entries_.resize(count * storage);
    if (static_cast<int64_t>(selections_.size()) < count) selections_.resize(count);
    if (chunk_.empty()) chunk_.resize(kSlice * kChunk);
    for (int64_t query = 0; query < count; ++query)
      selections_[query].reset(entries_.data() + query * storage, keep, kEverything);
  }

  /// A selection that starts without a threshold keeps nearly everything at first. A sample spread
  /// over the keys gives one that some more than `keep` keys will pass; where fewer do, which is
  /// rare, the query is scanned again.
  template <typename Scores>
  bool guess_thresholds(const Scores &scores, int64_t count, int64_t first, int64_t last,
                        int64_t keep) {
    const int64_t vectors = (last - first) / kScoreVector, wanted = kSample / kScoreVector;
    if (last - first < kSampleFrom) return false;
    const double expected = static_cast<double>(kSample * keep) / static_cast<double>(last - first);
    const int64_t rank = static_cast<int64_t>(expected + 3.0 * std::sqrt(expected) + 2.0);
    if (rank > kMaxima / 2) return false;
    if (sample_.empty()) sample_.resize(kSlice * kSample);
    for (int64_t slice = 0; slice * kSlice < count; ++slice) {
      for (int64_t vector = 0; vector < wanted; ++vector)
        scores.score(slice, first + vectors * vector / wanted * kScoreVector, kScoreVector,
                     sample_.data() + vector * kScoreVector, kSample);
      for (int64_t query = slice * kSlice; query < end_of(slice, count); ++query) {
        const float guess = low_rank(sample_.data() + query % kSlice * kSample, rank);
        selections_[query].start_at(std::nextafter(guess, kEverything));
      }
    }
    return true;
  }

  /// At most the `rank`-th best of a sample, which is overwritten: the maxima of four quarters are
  /// ranked, a quarter of the work, and good ranks seldom meet in one of them.
  static float low_rank(float *sample, int64_t rank) {
    for (int64_t i = 0; i < kMaxima; ++i) {
      const float a = std::max(sample[i], sample[i + kMaxima]);
      const float b = std::max(sample[i + 2 * kMaxima], sample[i + 3 * kMaxima]);
      sample[i] = std::max(a, b);
    }
    std::nth_element(sample, sample + rank - 1, sample + kMaxima, std::greater<float>());
    return sample[rank - 1];
  }

  template <typename Scores>
  void scan(const Scores &scores, int64_t count, int64_t first, int64_t last, int64_t first_slice,
            int64_t last_slice) {
    for (int64_t at = first; at < last; at += kChunk) {
      const int64_t keys = std::min(kChunk, last - at);
      const int64_t rounded = (keys + kScoreVector - 1) / kScoreVector * kScoreVector;
      for (int64_t slice = first_slice; slice < last_slice; ++slice) {
        scores.score(slice, at, keys, chunk_.data(), kChunk);
        for (int64_t query = slice * kSlice; query < end_of(slice, count); ++query)
          selections_[query].add(chunk_.data() + query % kSlice * kChunk, rounded,
                                 static_cast<uint32_t>(at));
      }
    }
  }

  /// Prepares the queries of a slice that found less than they should for another scan without a
  /// guess; the others keep what they have.
  bool reset_short(int64_t slice, int64_t count, int64_t wanted, int64_t keep) {
    bool any = false;
    for (int64_t query = slice * kSlice; query < end_of(slice, count); ++query) {
      Selection &selection = selections_[query];
      const bool is_short = selection.count() < wanted;
      any |= is_short;
      if (is_short)
        selection.reset(entries_.data() + query * Selection::storage(keep), keep, kEverything);
      else
        selection.start_at(std::numeric_limits<float>::infinity());
    }
    return any;
  }

  std::vector<Entry> entries_;
  std::vector<Selection> selections_;
  std::vector<float> chunk_, sample_;  // [kSlice, kChunk], [kSlice, kSample]
};

}  // namespace hkv
