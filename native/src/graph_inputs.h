// What all workers of a build read: lists in node numbers, and which queries retrieved a node.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "graph_prune.h"
#include "hybrid_kv_graph.h"
#include "pool.h"

namespace hkv {

constexpr int kTopWeight = 256;      // weight of one query that has both keys at its top
constexpr double kRankDecay = 0.05;  // how fast weights fall with the rank
constexpr int kMaxCap = 255;         // kTopWeight * kMaxCap fits 16 bits

/// Rows of different lengths in one array.
template <typename Element>
struct Ragged {
  std::vector<int64_t> starts;
  std::vector<Element> values;

  int64_t size(int64_t row) const { return starts[row + 1] - starts[row]; }
  const Element *begin(int64_t row) const { return values.data() + starts[row]; }
};

/// Lists every position of `targets` under the target it names; targets outside are left out.
///
/// Each thread takes a range of targets and reads all positions, so that no two write to the same
/// place and positions stay in order.
inline Ragged<uint32_t> invert(Pool *pool, const std::vector<int32_t> &targets, int32_t num_targets) {
  Ragged<uint32_t> found;
  found.starts.assign(num_targets + 1, 0);
  const int64_t pieces = pool == nullptr ? 1 : pool->threads();
  const auto positions = static_cast<int64_t>(targets.size());
  const auto each = [&](int64_t piece, const auto &body) {
    const auto first = static_cast<int32_t>(num_targets * piece / pieces);
    const auto last = static_cast<int32_t>(num_targets * (piece + 1) / pieces);
    for (int64_t at = 0; at < positions; ++at)
      if (targets[at] >= first && targets[at] < last) body(targets[at], at);
  };
  parallel_for(pool, pieces, [&](int64_t piece, int) {
    each(piece, [&](int32_t target, int64_t) { ++found.starts[target + 1]; });
  });
  std::partial_sum(found.starts.begin(), found.starts.end(), found.starts.begin());
  found.values.resize(found.starts.back());
  std::vector<int64_t> next(found.starts.begin(), found.starts.end() - 1);
  parallel_for(pool, pieces, [&](int64_t piece, int) {
    each(piece, [&](int32_t target, int64_t at) {
      found.values[next[target]++] = static_cast<uint32_t>(at);
    });
  });
  return found;
}

/// What all workers read.
struct Inputs {
  const hkv_projection &projection;
  int32_t num_nodes;
  const int16_t *points;
  std::vector<int32_t> norms;     // of the points
  std::vector<int32_t> lists;     // nodes; num_nodes stands for none
  std::vector<int32_t> extra;     // the same for [num_nodes, extra_length]
  std::vector<uint16_t> weights;  // by rank
  Ragged<uint32_t> visits;        // positions in `lists` that name the node

  Point point(int32_t node) const { return points + int64_t{node} * HKV_POINT_DIMS; }
  int32_t distance_between(int32_t a, int32_t b) const {
    return distance(point(a), norms[a], point(b), norms[b]);
  }
};

inline std::vector<uint16_t> rank_weights(int length) {
  std::vector<uint16_t> weights(length + 1);
  for (int rank = 0; rank <= length; ++rank)
    weights[rank] =
        static_cast<uint16_t>(std::max(1.0, std::floor(kTopWeight / (1.0 + kRankDecay * rank))));
  return weights;
}

inline Inputs prepare(Pool *pool, const hkv_projection &projection, const int32_t *list_of,
               int32_t num_nodes, const int16_t *points) {
  Inputs in{projection, num_nodes, points, {}, {}, {}, rank_weights(projection.list_length), {}};
  const auto node_of = [&](int32_t key) { return key < 0 ? num_nodes : list_of[key]; };
  in.norms.resize(num_nodes);
  for (int32_t node = 0; node < num_nodes; ++node)
    in.norms[node] = dot_points(in.point(node), in.point(node));
  in.lists.resize(projection.num_queries * projection.list_length);
  for (size_t at = 0; at < in.lists.size(); ++at) in.lists[at] = node_of(projection.lists[at]);
  const int extra = projection.extra_length;
  in.extra.resize(int64_t{num_nodes} * extra);
  for (int64_t key = 0; extra > 0 && key < projection.num_keys; ++key)
    for (int i = 0; i < extra && list_of[key] >= 0; ++i)
      in.extra[int64_t{list_of[key]} * extra + i] = node_of(projection.extra[key * extra + i]);
  in.visits = invert(pool, in.lists, num_nodes);
  return in;
}

}  // namespace hkv
