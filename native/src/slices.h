// How scans divide their work, whatever the keys' precision.
#pragma once

#include <cstdint>

namespace hkv {

constexpr int kSlice = 16;                    // queries of one pass over a chunk of keys
constexpr int64_t kChunk = 256;               // keys whose scores are made and then selected
constexpr int64_t kShortChunk = 64;           // where one slice of queries is all
constexpr int64_t kPrefetchBytes = 16 * 1024;  // ahead of the reads

}  // namespace hkv
