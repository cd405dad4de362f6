// The best keys of one query so far, in order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "select.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hkv {

constexpr int kCountingSort = 256;  // up to here comparing all pairs is faster than branches

constexpr int kRankedAtOnce = 4;  // entries whose ranks are counted in one pass over all

/// Entries that the scratch of a sort must hold.
constexpr int sorting_room(int count) {
  return (count + kRankedAtOnce - 1) / kRankedAtOnce * kRankedAtOnce;
}

#if defined(__AVX2__) && !defined(__AVX512F__)

/// Puts every entry where the number of better ones says.
inline void sort_by_rank(Entry *entries, int count, Entry *scratch) {
  constexpr Entry kSign = Entry{1} << 63;  // there are only comparisons of signed integers
  const int padded = sorting_room(count);
  for (int i = 0; i < count; ++i) scratch[i] = entries[i] ^ kSign;
  std::fill(scratch + count, scratch + padded, kSign);  // no entry is worse
  for (int first = 0; first < count; first += kRankedAtOnce) {
    __m256i mine[kRankedAtOnce], better[kRankedAtOnce];
    for (int i = 0; i < kRankedAtOnce; ++i) {
      mine[i] = _mm256_set1_epi64x(static_cast<int64_t>(scratch[first + i]));
      better[i] = _mm256_setzero_si256();
    }
    for (int at = 0; at < padded; at += 4) {
      const __m256i others = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(scratch + at));
      for (int i = 0; i < kRankedAtOnce; ++i)
        better[i] = _mm256_sub_epi64(better[i], _mm256_cmpgt_epi64(others, mine[i]));
    }
    for (int i = 0; i < std::min(kRankedAtOnce, count - first); ++i) {
      const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(better[i]),
                                        _mm256_extracti128_si256(better[i], 1));
      entries[_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1)] = scratch[first + i] ^ kSign;
    }
  }
}

#endif

/// Sorts distinct entries, best first; `scratch` has sorting_room(count).
inline void sort_entries(Entry *entries, int count, Entry *scratch) {
#if defined(__AVX512F__)
  if (count <= kCountingSort) {
    std::copy_n(entries, count, scratch);
    const __mmask8 rest = static_cast<__mmask8>((1u << (count % 8)) - 1);
    for (int i = 0; i < count; ++i) {
      const __m512i mine = _mm512_set1_epi64(static_cast<int64_t>(scratch[i]));
      int better = 0, at = 0;
      for (; at + 8 <= count; at += 8)
        better += __builtin_popcount(
            _mm512_cmpgt_epu64_mask(_mm512_loadu_si512(scratch + at), mine));
      if (rest != 0)
        better += __builtin_popcount(_mm512_mask_cmpgt_epu64_mask(
            rest, _mm512_maskz_loadu_epi64(rest, scratch + at), mine));
      entries[better] = scratch[i];
    }
    return;
  }
#elif defined(__AVX2__)
  if (count <= kCountingSort) return sort_by_rank(entries, count, scratch);
#else
  (void)scratch;
#endif
  std::sort(entries, entries + count, std::greater<Entry>());
}

class Beam {
 public:
  /// Makes it empty; it keeps the best `capacity` entries.
  void reset(int capacity) {
    capacity_ = capacity;
    count_ = cursor_ = 0;
    if (static_cast<int>(entries_.size()) < capacity) entries_.resize(capacity);
  }

  int capacity() const { return capacity_; }
  int count() const { return count_; }
  Entry operator[](int i) const { return entries_[i]; }

  /// Scores below this one cannot enter.
  float threshold() const {
    if (count_ < capacity_) return -std::numeric_limits<float>::infinity();
    return score_of(entries_[count_ - 1]);
  }

  /// Merges entries that are sorted, best first, and none of which is here already.
  void merge(const Entry *fresh, int num_fresh) {
    int old = count_, added = num_fresh;
    // The worst beyond the capacity are dropped before anything is moved.
    while (old + added > capacity_) {
      if (added == 0 || (old > 0 && entries_[old - 1] < fresh[added - 1]))
        --old;
      else
        --added;
    }
    count_ = old + added;
    int to = count_;
    while (added > 0) {
      const bool take_old = old > 0 && entries_[old - 1] < fresh[added - 1];
      entries_[--to] = take_old ? entries_[old - 1] : fresh[added - 1];
      old -= take_old;
      added -= !take_old;
    }
    if (num_fresh > 0 && to < count_) cursor_ = std::min(cursor_, old);
  }

  /// Calls take(id) for the best entries, among the first `limit`, that it has not refused or been
  /// given before (`done(id)`), until it has returned true `wanted` times.
  template <typename Done, typename Take>
  void next(int limit, int wanted, const Done &done, const Take &take) {
    const int last = std::min(limit, count_);
    for (; cursor_ < last && wanted > 0; ++cursor_) {
      const auto id = static_cast<int32_t>(id_of(entries_[cursor_]));
      if (!done(id)) wanted -= take(id);
    }
  }

 private:
  std::vector<Entry> entries_;
  int capacity_ = 0, count_ = 0;
  int cursor_ = 0;  // all entries before it have been looked at by `next`
};

}  // namespace hkv
