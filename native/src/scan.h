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

  /// What was found for a query, by ascending id.
  float *scores(int64_t query) const { return selections_[query].scores(); }
  uint32_t *ids(int64_t query) const { return selections_[query].ids(); }
  int64_t found(int64_t query) const { return selections_[query].count(); }

 private:
  static constexpr int64_t kSample = 1024;  // keys that a threshold is guessed from
  static constexpr int64_t kSampleFrom = 4 * kSample;
  static constexpr int64_t kMaxima = kSample / 4;
  static constexpr int64_t kSamplesAhead = 4;  // vectors of the sample that are asked for early
  static constexpr float kEverything = -std::numeric_limits<float>::infinity();

  static int64_t end_of(int64_t slice, int64_t count) {
    return std::min(count, (slice + 1) * kSlice);
  }

  void reserve(int64_t count, int64_t keep) {
    const int64_t size = count * Selection::storage(keep);
    if (static_cast<int64_t>(scores_.size()) < size) scores_.resize(size);
    if (static_cast<int64_t>(ids_.size()) < size) ids_.resize(size);
    if (static_cast<int64_t>(selections_.size()) < count) selections_.resize(count);
    if (chunk_.empty()) chunk_.resize(kSlice * kChunk);
    for (int64_t query = 0; query < count; ++query) restart(query, keep);
  }

  void restart(int64_t query, int64_t keep) {
    const int64_t at = query * Selection::storage(keep);
    selections_[query].reset(scores_.data() + at, ids_.data() + at, keep, kEverything);
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
    const auto start = [&](int64_t i) { return first + vectors * i / wanted * kScoreVector; };
    for (int64_t slice = 0; slice * kSlice < count; ++slice) {
      for (int64_t i = 0; i < wanted; ++i)
        scores.score(slice, start(i), kScoreVector, sample_.data() + i * kScoreVector, kSample,
                     start(i + kSamplesAhead) - start(i));
      for (int64_t query = slice * kSlice; query < end_of(slice, count); ++query) {
        float *own = sample_.data() + query % kSlice * kSample;
        const Cut guess = cut_at(own, take_maxima(own), rank);
        selections_[query].start_at(guess.ties > 0 ? std::nextafter(guess.above, kEverything)
                                                   : guess.above);
      }
    }
    return true;
  }

  /// Reduces a sample to the maxima of its quarters, whose ranks are no higher than its own: good
  /// keys seldom meet in one of them. Returns how many maxima there are.
  static int64_t take_maxima(float *sample) {
    for (int64_t i = 0; i < kMaxima; ++i) {
      const float a = std::max(sample[i], sample[i + kMaxima]);
      const float b = std::max(sample[i + 2 * kMaxima], sample[i + 3 * kMaxima]);
      sample[i] = std::max(a, b);
    }
    return kMaxima;
  }

  template <typename Scores>
  void scan(const Scores &scores, int64_t count, int64_t first, int64_t last, int64_t first_slice,
            int64_t last_slice) {
    // Where each key is used once, short chunks keep the reads from pausing.
    const int64_t chunk = last_slice - first_slice > 1 ? kChunk : kShortChunk;
    for (int64_t at = first; at < last; at += chunk) {
      const int64_t keys = std::min(chunk, last - at);
      const int64_t rounded = (keys + kScoreVector - 1) / kScoreVector * kScoreVector;
      for (int64_t slice = first_slice; slice < last_slice; ++slice) {
        const bool first_read = slice == first_slice;  // later slices find the keys cached
        scores.score(slice, at, keys, chunk_.data(), kChunk, first_read ? scores.keys_ahead() : 0);
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
        restart(query, keep);
      else
        selection.start_at(std::numeric_limits<float>::infinity());
    }
    return any;
  }

  std::vector<float> scores_;  // of all selections
  std::vector<uint32_t> ids_;
  std::vector<Selection> selections_;
  std::vector<float> chunk_, sample_;  // [kSlice, kChunk], [kSlice, kSample]
};

}  // namespace hkv
