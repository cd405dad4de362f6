// How scans divide their work, whatever the keys' precision.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hkv {

constexpr int kSlice = 16;                    // queries of one pass over a chunk of keys
constexpr int64_t kChunk = 256;               // keys whose scores are made and then selected
constexpr int64_t kShortChunk = 64;           // where one slice of queries is all
constexpr int64_t kPrefetchBytes = 16 * 1024;  // ahead of the reads

/// Into how many parts each of `items` is divided, where there are too few of them for the threads to
/// finish together; at most `most`.
inline int64_t parts_of_items(int64_t items, int64_t threads, int64_t most) {
  const auto idle = [&](int64_t parts) {  // share of the threads' time in the last round
    const int64_t rounds = (items * parts + threads - 1) / threads;
    return 1.0 - static_cast<double>(items * parts) / static_cast<double>(rounds * threads);
  };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= most && idle(best) > 0.1; ++parts)
    if (idle(parts) < idle(best)) best = parts;
  return best;
}

}  // namespace hkv
