// The best entries of a stream of scores, without a heap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hkv {

/// Score and id in one integer: the greater is the better, of equal scores the lower id.
using Entry = uint64_t;

inline Entry pack(float score, uint32_t id) {
  const float unsigned_zero = score + 0.0f;  // -0 and 0 are equal scores
  uint32_t bits;
  std::memcpy(&bits, &unsigned_zero, sizeof bits);
  bits ^= (bits >> 31) != 0 ? 0xffffffffu : 0x80000000u;
  return (static_cast<Entry>(bits) << 32) | (0xffffffffu - id);
}

inline float score_of(Entry entry) {
  uint32_t bits = static_cast<uint32_t>(entry >> 32);
  bits ^= (bits >> 31) != 0 ? 0x80000000u : 0xffffffffu;
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

inline uint32_t id_of(Entry entry) { return 0xffffffffu - static_cast<uint32_t>(entry); }

constexpr int kScoreVector = 16;  // scores are looked at in vectors of so many

/// Moves the best `keep` entries to the front, unordered.
inline void keep_best(Entry *entries, int64_t count, int64_t keep) {
  if (keep < count)
    std::nth_element(entries, entries + keep - 1, entries + count, std::greater<Entry>());
}

/// Which scores of an array are its best: all above `above`, and the first `ties` equal to it.
struct Cut {
  float above;
  int64_t ties;
};

/// An integer per score in the order of scores, and back.
inline int32_t ordered(float score) {
  int32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float in_order(int32_t rank) {
  const int32_t bits = rank ^ ((rank >> 31) & 0x7fffffff);
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

inline int64_t count_above(const float *scores, int64_t count, float limit) {
  int32_t above = 0;  // narrow and without a branch: compilers make vector code of it
  for (int64_t i = 0; i < count; ++i) above += scores[i] > limit;
  return above;
}

/// The cut that leaves the best `keep` of `count` scores, 1 <= keep <= count.
///
/// A search by halving that counts again and again: for the few hundred scores that scans keep this
/// is an order of magnitude faster than a partition, whose branches nobody can predict.
inline Cut cut_at(const float *scores, int64_t count, int64_t keep) {
  int32_t least = ordered(scores[0]), most = least;
  for (int64_t i = 1; i < count; ++i) {  // as integers, of which compilers make vector code
    least = std::min(least, ordered(scores[i]));
    most = std::max(most, ordered(scores[i]));
  }
  int64_t low = least, high = most, above = 0;  // above: scores over `high`
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t better = count_above(scores, count, in_order(static_cast<int32_t>(middle)));
    if (better == keep) return {in_order(static_cast<int32_t>(middle)), 0};
    if (better < keep) {
      high = middle;
      above = better;
    } else {
      low = middle + 1;
    }
  }
  return {in_order(static_cast<int32_t>(high)), keep - above};
}

#if defined(__AVX512F__)

/// Stores the lanes of a mask one after the other, and rubbish up to 16 lanes; returns how many.
inline int64_t store_chosen(__mmask16 chosen, __m512 values, __m512i keys, float *scores,
                            uint32_t *ids) {
  _mm512_storeu_ps(scores, _mm512_maskz_compress_ps(chosen, values));
  _mm512_storeu_si512(ids, _mm512_maskz_compress_epi32(chosen, keys));
  return __builtin_popcount(chosen);
}

#endif

/// Moves what a cut leaves to the front, in the order in which it was; returns how many.
///
/// scores, ids: arrays that are `count` rounded up to 16 long.
inline int64_t apply_cut(Cut cut, float *scores, uint32_t *ids, int64_t count) {
  int64_t kept = 0;
#if defined(__AVX512F__)
  if (cut.ties == 0) {
    const __m512 limit = _mm512_set1_ps(cut.above);
    for (int64_t at = 0; at < count; at += kScoreVector) {
      const int64_t left = std::min<int64_t>(kScoreVector, count - at);
      const __m512 values = _mm512_loadu_ps(scores + at);
      const __mmask16 better = _mm512_mask_cmp_ps_mask(
          static_cast<__mmask16>((1u << left) - 1), values, limit, _CMP_GT_OQ);
      const __m512i keys = _mm512_loadu_si512(ids + at);
      kept += store_chosen(better, values, keys, scores + kept, ids + kept);
    }
    return kept;
  }
#endif
  for (int64_t i = 0; i < count; ++i) {
    const float score = scores[i];
    const bool tie = score == cut.above;
    const bool take = score > cut.above || (tie && cut.ties > 0);
    cut.ties -= tie;
    scores[kept] = score;
    ids[kept] = ids[i];
    kept += take;
  }
  return kept;
}

/// Keeps the best `keep` of what is added, in storage of the caller.
///
/// Survivors of a threshold are appended, and when the storage is full all but the best `keep` are
/// dropped and the threshold rises. Ids must come in ascending order, so that of equal scores the
/// lower ids stay.
class Selection {
 public:
  static int64_t storage(int64_t keep) { return (4 * keep + 512 + 15) / 16 * 16; }

  /// scores, ids: storage(keep) of each; scores up to `threshold` are not looked for.
  void reset(float *scores, uint32_t *ids, int64_t keep, float threshold) {
    scores_ = scores;
    ids_ = ids;
    keep_ = keep;
    capacity_ = storage(keep);
    count_ = 0;
    threshold_ = threshold;
  }

  /// scores: `count` of them, a multiple of 16, of the keys from `first` on; NaN is none.
  void add(const float *scores, int64_t count, uint32_t first) {
    for (int64_t at = 0; at < count;) {
      if (__builtin_expect(count_ + kScoreVector > capacity_, 0)) drop();
      const int64_t room = (capacity_ - count_) / kScoreVector * kScoreVector;
      const int64_t end = std::min(count, at + room);
      append_better(scores, at, end, first);
      at = end;
    }
  }

  /// One more score, of a greater id; unless it is no better than the threshold has become.
  void push(float score, uint32_t id) {
    if (__builtin_expect(count_ == capacity_, 0)) drop();
    if (!(score > threshold_)) return;
    scores_[count_] = score;
    ids_[count_++] = id;
  }

  /// The best `keep`, or all if there are fewer, by ascending id.
  int64_t finish() {
    if (count_ > keep_) drop();
    return count_;
  }

  /// Scores up to `threshold` are not looked for from now on.
  void start_at(float threshold) { threshold_ = threshold; }

  float threshold() const { return threshold_; }
  float *scores() const { return scores_; }
  uint32_t *ids() const { return ids_; }
  int64_t count() const { return count_; }

 private:
#if defined(__AVX512F__)
  /// Without a branch: which vectors hold survivors cannot be predicted, and a scan waits for memory
  /// rather than for these few instructions.
  void append_better(const float *scores, int64_t at, int64_t end, uint32_t first) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 limit = _mm512_set1_ps(threshold_);
    int64_t found = count_;
    for (; at < end; at += kScoreVector) {
      const __m512 values = _mm512_loadu_ps(scores + at);
      const __mmask16 better = _mm512_cmp_ps_mask(values, limit, _CMP_GT_OQ);
      const int32_t key = static_cast<int32_t>(first + static_cast<uint32_t>(at));
      const __m512i keys = _mm512_add_epi32(lanes, _mm512_set1_epi32(key));
      found += store_chosen(better, values, keys, scores_ + found, ids_ + found);
    }
    count_ = found;
  }
#else
  void append_better(const float *scores, int64_t at, int64_t end, uint32_t first) {
    for (; at < end; at += kScoreVector) {
      uint32_t better = better_than(scores + at, threshold_);
      for (; __builtin_expect(better != 0, 0); better &= better - 1) {
        const int lane = __builtin_ctz(better);
        scores_[count_] = scores[at + lane];
        ids_[count_++] = first + static_cast<uint32_t>(at + lane);
      }
    }
  }

  static uint32_t better_than(const float *scores, float threshold) {
#if defined(__AVX2__)
    const __m256 limit = _mm256_set1_ps(threshold);
    const __m256 low = _mm256_cmp_ps(_mm256_loadu_ps(scores), limit, _CMP_GT_OQ);
    const __m256 high = _mm256_cmp_ps(_mm256_loadu_ps(scores + 8), limit, _CMP_GT_OQ);
    return static_cast<uint32_t>(_mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8);
#else
    int any = 0;
    for (int i = 0; i < kScoreVector; ++i) any |= scores[i] > threshold;
    if (any == 0) return 0;
    uint32_t better = 0;
    for (int i = 0; i < kScoreVector; ++i) better |= uint32_t{scores[i] > threshold} << i;
    return better;
#endif
  }
#endif

  void drop() {
    const Cut cut = cut_at(scores_, count_, keep_);
    count_ = apply_cut(cut, scores_, ids_, count_);
    threshold_ = std::max(threshold_, cut.above);
  }

  float *scores_ = nullptr;
  uint32_t *ids_ = nullptr;
  int64_t keep_ = 0, capacity_ = 0, count_ = 0;
  float threshold_ = 0.0f;
};

}  // namespace hkv
