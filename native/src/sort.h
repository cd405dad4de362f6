// Sorting a few hundred results, best first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "select.h"

namespace hkv {

/// Keys that were found for one query, in arrays of somebody else.
struct Found {
  float *scores;
  uint32_t *ids;
  int64_t count;
};

/// By descending score; of equal scores that which came first stays first.
///
/// A radix sort of the distances to the best score: most scores share their leading bits, and
/// unlike a sort by comparisons it does not wait for branches that nobody can predict.
class SortBestFirst {
 public:
  void run(Found found) {
    // One by one: where memory runs out between them, the next call grows the other.
    if (static_cast<int64_t>(from_.size()) < found.count) from_.resize(found.count);
    if (static_cast<int64_t>(to_.size()) < found.count) to_.resize(found.count);
    int32_t best = std::numeric_limits<int32_t>::min();
    for (int64_t i = 0; i < found.count; ++i)
      best = std::max(best, ordered(found.scores[i] + 0.0f));  // -0 and 0 are equal scores
    uint32_t farthest = 0;
    for (int64_t i = 0; i < found.count; ++i) {
      const uint32_t distance = static_cast<uint32_t>(best) -
                                static_cast<uint32_t>(ordered(found.scores[i] + 0.0f));
      farthest = std::max(farthest, distance);
      from_[i] = {distance, found.ids[i]};
    }
    for (int shift = 0; shift < 32 && farthest >> shift != 0; shift += kBits)
      pass(found.count, shift);
    for (int64_t i = 0; i < found.count; ++i) {
      found.scores[i] = in_order(static_cast<int32_t>(static_cast<uint32_t>(best) -
                                                      from_[i].distance));
      found.ids[i] = from_[i].id;
    }
  }

 private:
  static constexpr int kBits = 8;

  struct Item {
    uint32_t distance, id;
  };

  void pass(int64_t count, int shift) {
    uint32_t starts[(1 << kBits) + 1] = {};
    const auto digit = [shift](const Item &item) {
      return (item.distance >> shift) & ((1u << kBits) - 1);
    };
    for (int64_t i = 0; i < count; ++i) ++starts[digit(from_[i]) + 1];
    for (int i = 0; i < 1 << kBits; ++i) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < count; ++i) to_[starts[digit(from_[i])]++] = from_[i];
    from_.swap(to_);
  }

  std::vector<Item> from_, to_;
};

}  // namespace hkv
