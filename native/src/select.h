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

/// Keeps the best `keep` of what is added, in storage of the caller.
///
/// Survivors of a threshold are appended, and when the storage is full all but the best `keep` are
/// dropped and the threshold rises to the worst of them. Ids must come in ascending order, so that
/// a later score equal to the threshold has lost already.
class Selection {
 public:
  static int64_t storage(int64_t keep) { return 4 * keep + 512; }

  /// entries: storage(keep) of them; scores up to `threshold` are not looked for.
  void reset(Entry *entries, int64_t keep, float threshold) {
    entries_ = entries;
    keep_ = keep;
    capacity_ = storage(keep);
    count_ = 0;
    threshold_ = threshold;
  }

  /// scores: `count` of them, a multiple of 16, of the keys from `first` on; NaN is none.
  void add(const float *scores, int64_t count, uint32_t first) {
    for (int64_t at = 0; at < count; at += kScoreVector) {
      const uint32_t better = better_than(scores + at, threshold_);
      if (__builtin_expect(better != 0, 0)) append(scores + at, better, first + at);
    }
  }

  /// The best `keep`, or all if there are fewer, unordered.
  int64_t finish() {
    keep_best(entries_, count_, keep_);
    count_ = std::min(count_, keep_);
    return count_;
  }

  /// Scores up to `threshold` are not looked for from now on.
  void start_at(float threshold) { threshold_ = threshold; }

  const Entry *entries() const { return entries_; }
  int64_t count() const { return count_; }

 private:
  static uint32_t better_than(const float *scores, float threshold) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(scores), _mm512_set1_ps(threshold), _CMP_GT_OQ);
#elif defined(__AVX2__)
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

  void append(const float *scores, uint32_t better, uint32_t first) {
    if (count_ + kScoreVector > capacity_) raise_threshold();
    for (; better != 0; better &= better - 1) {
      const int lane = __builtin_ctz(better);
      entries_[count_++] = pack(scores[lane], first + lane);
    }
  }

  void raise_threshold() {
    keep_best(entries_, count_, keep_);
    count_ = keep_;
    threshold_ = std::max(threshold_, score_of(entries_[keep_ - 1]));
  }

  Entry *entries_ = nullptr;
  int64_t keep_ = 0, capacity_ = 0, count_ = 0;
  float threshold_ = 0.0f;
};

}  // namespace hkv
