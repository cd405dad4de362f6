// What a search of graphs does beside walking: the scan of keys beyond a graph, and exact scores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "block_scores.h"
#include "convert.h"
#include "graph_beam.h"
#include "graph_pieces.h"
#include "row_scores.h"
#include "scan.h"

namespace hkv {

/// The flat scan of some of a head's keys beyond its graph.
class TailScan {
 public:
  /// Fills the piece's candidates for queries [count, dim].
  void run(const hkv_graph_head &head, const Piece &piece, const float *queries, Pieces &pieces) {
    blocks_.prepare(head.tail, queries, piece.num_queries);
    scan_.run(blocks_, piece.num_queries, piece.first, piece.last, piece.keep);
    for (int64_t query = 0; query < piece.num_queries; ++query) {
      const int64_t count = pieces.count(piece, query) = scan_.found(query);
      float *scores = scan_.scores(query);
      const uint32_t *ids = scan_.ids(query), first = static_cast<uint32_t>(head.linked);
      blocks_.finish(query, scores, count);
      Entry *to = pieces.candidates(piece, query);
      for (int64_t i = 0; i < count; ++i) to[i] = pack(scores[i], first + ids[i]);
    }
  }

 private:
  BlockScores blocks_;
  Scan scan_;
};

/// Exact scores of what the pieces found for one query.
class Ranking {
 public:
  /// Fills ids and scores [top_k]; returns how many keys were scored.
  int64_t run(const hkv_graph_head &head, const hkv_graph_query &params, Pieces &pieces,
              int32_t head_idx, int64_t query_idx, const float *query, int64_t *ids,
              float *scores) {
    const int64_t found = pieces.gather(head_idx, query_idx, entries_);
    keep_best(entries_.data(), found, params.pool_size);
    const int count = static_cast<int>(std::min<int64_t>(found, params.pool_size));
    score(head, count, query);
    sort_entries(entries_.data(), count, scratch_.data());
    const float floor = count > 0 ? score_of(entries_[0]) - params.beta : 0.0f;
    for (int i = 0; i < params.top_k; ++i) {
      const bool is_near = i < count && score_of(entries_[i]) >= floor;
      ids[i] = is_near ? static_cast<int64_t>(id_of(entries_[i])) : -1;
      scores[i] = is_near ? score_of(entries_[i]) : -std::numeric_limits<float>::infinity();
    }
    return count;
  }

 private:
  void score(const hkv_graph_head &head, int count, const float *query) {
    const hkv_keys &keys = head.keys;
    const RowVectors vectors(keys.dim);
    // One by one: where memory runs out between them, the next call grows the others.
    grow(query_, vectors.padded());
    grow(ids_, count);
    grow(scores_, count);
    grow(scratch_, sorting_room(count));
    vectors.pad(query, query_.data());
    for (int i = 0; i < count; ++i) ids_[i] = id_of(entries_[i]);
    with_dtype(keys.dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      score_listed<Element>(keys, query_.data(), ids_.data(), count, scores_.data());
    });
    for (int i = 0; i < count; ++i) entries_[i] = pack(scores_[i], ids_[i]);
  }

  std::vector<float> query_, scores_;
  std::vector<uint32_t> ids_;
  std::vector<Entry> entries_, scratch_;
};

}  // namespace hkv
