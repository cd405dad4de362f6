// How a search of graphs is divided over threads, and what its pieces have found.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hybrid_kv_graph.h"
#include "select.h"
#include "slices.h"

namespace hkv {

constexpr int64_t kGroup = kSlice;       // queries that are searched together
constexpr int64_t kSmallestScan = 8192;  // keys that are worth another thread
constexpr int64_t kPiecesPerThread = 4;  // so that threads end together

template <typename Element>
void grow(std::vector<Element> &values, int64_t size) {
  if (static_cast<int64_t>(values.size()) < size) values.resize(size);
}

/// A walk through a head's graph, or a scan of some of the keys beyond it, for some queries.
struct Piece {
  int32_t head;
  int64_t first_query, num_queries;
  int64_t first, last;  // of the tail; none where it is a walk
  int64_t keep;         // candidates per query
  int64_t place;        // of the first query's candidates
  int64_t row;          // of the first query's count
  int beam;             // of a walk

  bool is_walk() const { return last == 0; }
  bool serves(int64_t query) const {
    return query >= first_query && query < first_query + num_queries;
  }
};

/// The pieces of one call, longest first, and their candidates.
///
/// A walk is not divided among its keys.
class Pieces {
 public:
  void divide(int32_t heads, const hkv_graph_head *head, const hkv_graph_query &params,
              int64_t threads) {
    pieces_.clear();
    int64_t keys = 0;
    for (int32_t at = 0; at < heads; ++at) keys += head[at].tail.count;
    const int64_t share = keys / (threads * kPiecesPerThread);
    const int64_t most = threads > 1 ? std::max(kSmallestScan, share) : std::max<int64_t>(1, keys);
    for (int32_t at = 0; at < heads; ++at)
      if (head[at].num_nodes > 0) {
        const int64_t walks = params.walks ? params.walks[at] : 1;
        const int64_t group = std::min(kGroup, (params.queries + walks - 1) / walks);
        add(at, 0, 0, head[at].num_nodes, params, group, params.beams[at]);
      }
    for (int32_t at = 0; at < heads; ++at) {
      const int64_t end = head[at].tail.count, parts = (end + most - 1) / most;
      const int64_t blocks = (end + HKV_BLOCK_KEYS - 1) / HKV_BLOCK_KEYS;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = blocks * part / parts * HKV_BLOCK_KEYS;
        const int64_t last = std::min(end, blocks * (part + 1) / parts * HKV_BLOCK_KEYS);
        add(at, first, last, last - first, params, kGroup, 0);
      }
    }
    const Piece last = pieces_.empty() ? Piece{} : pieces_.back();
    grow(candidates_, last.place + last.num_queries * last.keep);
    grow(counts_, last.row + last.num_queries);
  }

  int64_t size() const { return static_cast<int64_t>(pieces_.size()); }
  const Piece &operator[](int64_t item) const { return pieces_[item]; }

  /// Of query `at` of a piece: [keep], and how many there are.
  Entry *candidates(const Piece &piece, int64_t at) {
    return candidates_.data() + piece.place + at * piece.keep;
  }
  int64_t &count(const Piece &piece, int64_t at) { return counts_[piece.row + at]; }

  /// Brings the candidates of one query together; returns how many.
  int64_t gather(int32_t head, int64_t query, std::vector<Entry> &to) {
    int64_t total = 0;
    for (const Piece &piece : pieces_) {
      if (piece.head != head || !piece.serves(query)) continue;
      const int64_t at = query - piece.first_query, found = count(piece, at);
      grow(to, total + found);
      std::copy_n(candidates(piece, at), found, to.begin() + total);
      total += found;
    }
    return total;
  }

 private:
  void add(int32_t head, int64_t first, int64_t last, int64_t keys, const hkv_graph_query &params,
           int64_t group, int beam) {
    for (int64_t query = 0; query < params.queries; query += group) {
      const Piece before = pieces_.empty() ? Piece{} : pieces_.back();
      pieces_.push_back({head, query, std::min(group, params.queries - query), first, last,
                         std::min<int64_t>(params.pool_size, keys),
                         before.place + before.num_queries * before.keep,
                         before.row + before.num_queries, beam});
    }
  }

  std::vector<Piece> pieces_;
  std::vector<Entry> candidates_;
  std::vector<int64_t> counts_;
};

}  // namespace hkv
