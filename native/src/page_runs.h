// Entries of a row as runs that lie one after the other, in pieces for the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "few_queries.h"

namespace hkv {

/// The tokens of some pages, or of an extent, as chunks of rows that a thread attends at once.
class PageRuns {
 public:
  /// All rows of an extent.
  void make_all(int64_t count) {
    chunks_.clear();
    ends_.clear();
    in_piece_ = 0;
    if (count == 0) return;
    add(0, count);
    ends_.push_back(chunks_.size());
  }

  /// slots: of the pages, the newest last; sorted but for that one.
  void make(std::vector<int64_t> &slots, int64_t page_size, int64_t tail_fill) {
    chunks_.clear();
    ends_.clear();
    in_piece_ = 0;
    if (slots.empty()) return;
    if (!std::is_sorted(slots.begin(), slots.end() - 1)) std::sort(slots.begin(), slots.end() - 1);
    for (size_t at = 0; at + 1 < slots.size();) {
      size_t end = at + 1;
      while (end + 1 < slots.size() && slots[end] == slots[end - 1] + 1) ++end;
      add(slots[at] * page_size, static_cast<int64_t>(end - at) * page_size);
      at = end;
    }
    add(slots.back() * page_size, tail_fill);
    ends_.push_back(chunks_.size());
  }

  int64_t pieces() const { return static_cast<int64_t>(ends_.size()); }

  /// Adds the tokens of a piece to what some queries have seen.
  template <typename Element>
  void attend(Few<Element> &few, int64_t piece, float scale, float softcap) const {
    for (size_t at = piece == 0 ? 0 : ends_[piece - 1]; at < ends_[piece]; ++at)
      few.add(chunks_[at].first, chunks_[at].count, nullptr, nullptr, nullptr, scale, softcap);
  }

 private:
  struct Chunk {
    int64_t first, count;
  };

  void add(int64_t first, int64_t count) {
    while (count > 0) {
      if (in_piece_ == kPiece) {
        ends_.push_back(chunks_.size());
        in_piece_ = 0;
      }
      const int64_t some = std::min({count, kChunk, kPiece - in_piece_});
      chunks_.push_back({first, some});
      first += some;
      count -= some;
      in_piece_ += some;
    }
  }

  std::vector<Chunk> chunks_;
  std::vector<size_t> ends_;  // of the pieces, in `chunks_`
  int64_t in_piece_ = 0;
};

}  // namespace hkv
