// A small head with its graph.
#pragma once

#include <algorithm>
#include <array>
#include <map>

#include "arrays.h"
#include "hybrid_kv_graph.h"

/// What a graph is learned from: each query's best keys, by brute force.
inline std::vector<int32_t> best_keys(const Rows &rows, const std::vector<float> &queries,
                                      int32_t length) {
  std::vector<int32_t> lists;
  const int64_t num_queries = static_cast<int64_t>(queries.size()) / rows.dim();
  for (int64_t query = 0; query < num_queries; ++query) {
    std::vector<std::pair<double, int32_t>> scored;
    for (int32_t key = 0; key < rows.count(); ++key)
      scored.emplace_back(-rows.dot(key, queries.data() + query * rows.dim()), key);
    std::sort(scored.begin(), scored.end());
    for (int32_t i = 0; i < length; ++i)
      lists.push_back(i < rows.count() ? scored[static_cast<size_t>(i)].second : -1);
  }
  return lists;
}

inline hkv_projection projection_of(const std::vector<int32_t> &lists, int32_t length,
                                    int64_t num_keys, int32_t degree) {
  hkv_projection projection{};
  projection.lists = lists.data();
  projection.num_keys = num_keys;
  projection.num_queries = length == 0 ? 0 : static_cast<int64_t>(lists.size()) / length;
  projection.list_length = length;
  projection.degree = degree;
  projection.cap = 8;
  projection.candidates = 64;
  projection.num_entries = 3;
  projection.alpha = 1.2f;
  return projection;
}

inline std::vector<int16_t> random_points(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<int16_t> points(static_cast<size_t>(count * HKV_POINT_DIMS));
  for (int16_t &value : points)
    value = static_cast<int16_t>(random.below(2 * HKV_POINT_LIMIT + 1) - HKV_POINT_LIMIT);
  return points;
}

/// The arrays of one graph. Its nodes are numbered by lists, which need not be in the order of keys
/// while a graph is built, and are where it is searched.
struct Graph {
  std::vector<int32_t> list_of, neighbours, entries, keys_of;
  std::vector<uint8_t> lists;
  int64_t num_lists = 0;
  int32_t degree = 1;
};

inline int pack(Graph &graph) {
  graph.keys_of.assign(static_cast<size_t>(graph.num_lists), -1);
  for (size_t key = 0; key < graph.list_of.size(); ++key)
    if (graph.list_of[key] >= 0)
      graph.keys_of[static_cast<size_t>(graph.list_of[key])] = static_cast<int32_t>(key);
  graph.lists.assign(
      static_cast<size_t>(graph.num_lists * hkv_graph_list_bytes(graph.degree, graph.num_lists)),
      0);
  return hkv_graph_pack(nullptr, graph.degree, graph.num_lists, graph.neighbours.data(),
                        graph.lists.data());
}

inline int build(hkv_pool *pool, const hkv_projection &projection, Graph &graph) {
  graph.degree = projection.degree;
  graph.num_lists = 0;
  graph.list_of.assign(static_cast<size_t>(projection.num_keys), -1);
  graph.entries.assign(static_cast<size_t>(projection.num_entries), -1);
  const int status = hkv_graph_cover(&projection, graph.list_of.data(), &graph.num_lists);
  if (status != HKV_OK) return status;
  graph.neighbours.assign(static_cast<size_t>(graph.num_lists * projection.degree), -1);
  const std::vector<int16_t> points = random_points(graph.num_lists, 5);
  const int projected =
      hkv_graph_project(pool, &projection, graph.list_of.data(), graph.num_lists, 0, points.data(),
                        graph.neighbours.data(), graph.entries.data());
  return projected == HKV_OK ? pack(graph) : projected;
}

/// A head over the first `linked` keys of `rows`, with the codes that a search of it reads.
class GraphCase {
 public:
  GraphCase(const Rows &rows, const Graph &graph)
      : nodes_(rows, std::vector<int64_t>(graph.keys_of.begin(), graph.keys_of.end())),
        tail_(rows, beyond(rows, graph)),
        node_codes_(nodes_.rows, true, false),
        tail_codes_(tail_.rows, false, true) {
    head_.keys = rows.keys();
    head_.rows = node_codes_.head();
    head_.tail = tail_codes_.head();
    head_.lists = graph.lists.data();
    head_.keys_of = graph.keys_of.data();
    head_.entries = graph.entries.data();
    head_.linked = static_cast<int64_t>(graph.list_of.size());
    head_.num_nodes = graph.num_lists;
    head_.degree = graph.degree;
    head_.num_entries = static_cast<int32_t>(graph.entries.size());
  }
  const hkv_graph_head &head() const { return head_; }

 private:
  struct Taken {
    Taken(const Rows &from, const std::vector<int64_t> &ids) : rows(values(from, ids), from.dim()) {}
    static std::vector<float> values(const Rows &from, const std::vector<int64_t> &ids) {
      std::vector<float> taken;
      for (const int64_t id : ids)
        for (int32_t d = 0; d < from.dim(); ++d) taken.push_back(from.at(id, d));
      return taken;
    }
    Rows rows;
  };

  static std::vector<int64_t> beyond(const Rows &rows, const Graph &graph) {
    std::vector<int64_t> ids;
    for (int64_t key = static_cast<int64_t>(graph.list_of.size()); key < rows.count(); ++key)
      ids.push_back(key);
    return ids;
  }

  Taken nodes_, tail_;
  Quantised node_codes_, tail_codes_;
  hkv_graph_head head_{};
};

/// One beam for each of up to 16 heads; it lives as long as the calling thread.
inline const int32_t *beams_of(int32_t beam) {
  thread_local std::map<int32_t, std::array<int32_t, 16>> known;
  std::array<int32_t, 16> &beams = known[beam];
  beams.fill(beam);
  return beams.data();
}

struct GraphResult {
  std::vector<int64_t> ids;
  std::vector<float> scores;
  std::vector<int64_t> rows, dots;
};

inline int search(hkv_pool *pool, const std::vector<hkv_graph_head> &heads,
                  const hkv_graph_query &query, const std::vector<float> &queries,
                  const std::vector<int64_t> &warm, GraphResult &found) {
  const size_t places =
      heads.size() * static_cast<size_t>(query.queries) * static_cast<size_t>(query.top_k);
  found = {std::vector<int64_t>(places, -7), std::vector<float>(places),
           std::vector<int64_t>(heads.size()), std::vector<int64_t>(heads.size())};
  return hkv_graph_search(pool, static_cast<int32_t>(heads.size()), heads.data(), &query,
                          queries.data(), warm.empty() ? nullptr : warm.data(), found.ids.data(),
                          found.scores.data(), found.rows.data(), found.dots.data());
}
