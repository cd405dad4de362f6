// Co-visit projection. Inside, keys are numbered by their lists ("nodes"), so that everything that
// is read at random is small. All arithmetic that decides is in integers, or is a single rounded
// operation: the result does not depend on threads or on the instruction set.
#include "graph_build.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "error.h"
#include "graph_covisit.h"
#include "graph_inputs.h"
#include "graph_prune.h"

namespace hkv {
namespace {

constexpr int kReversePerDegree = 4;    // reverse edges considered, in lists
constexpr int64_t kItemNodes = 256;     // of one piece of parallel work
constexpr int kPrefetchAhead = 8;

struct Candidate {
  int32_t node;
  int32_t distance;
};

/// One worker's part of the build: everything about one node at a time.
class NodeBuilder {
 public:
  explicit NodeBuilder(const Inputs &inputs)
      : in_(inputs),
        degree_(inputs.projection.degree),
        visits_(inputs),
        seen_(inputs.num_nodes, -1) {}

  /// Writes the node's own choice of neighbours; returns how many.
  int forward(int32_t node, int32_t *neighbours) {
    return prune(node, visits_.heaviest(node), neighbours);
  }

  /// Merges the node's own neighbours with the nodes that chose it; returns how many there are.
  /// reverse: positions in lists of `degree` of the nodes from `first_node` on.
  int link(int32_t node, const int32_t *own, int num_own, const Ragged<uint32_t> &reverse,
           int32_t first_node, int32_t *neighbours) {
    gather_reverse(node, own, num_own, reverse, first_node);
    if (num_own + static_cast<int>(pool_.size()) <= degree_) {
      std::copy_n(own, num_own, neighbours);
      for (size_t i = 0; i < pool_.size(); ++i) neighbours[num_own + i] = pool_[i].node;
      return num_own + static_cast<int>(pool_.size());
    }
    return link_full(node, own, num_own, neighbours);
  }

 private:
  int prune(int32_t node, const std::vector<int32_t> &candidates, int32_t *neighbours) {
    accepted_.clear();
    rejected_.clear();
    const auto count = static_cast<int>(candidates.size());
    for (int i = 0; i < count && accepted_.count() < degree_; ++i) {
      if (i + kPrefetchAhead < count)
        __builtin_prefetch(in_.point(candidates[i + kPrefetchAhead]));
      const int32_t other = candidates[i];
      if (!try_accept(other, in_.distance_between(node, other), neighbours))
        rejected_.push_back(other);
    }
    return fill_up(neighbours);
  }

  /// Puts the first rejected ones into the places that are left; returns how many there are.
  int fill_up(int32_t *neighbours) const {
    int filled = accepted_.count();
    for (size_t i = 0; i < rejected_.size() && filled < degree_; ++i)
      neighbours[filled++] = rejected_[i];
    return filled;
  }

  bool try_accept(int32_t other, int32_t from_node, int32_t *neighbours) {
    const Point point = in_.point(other);
    const int32_t norm = in_.norms[other];
    if (accepted_.stand_for(point, norm, in_.projection.alpha, static_cast<float>(from_node)))
      return false;
    neighbours[accepted_.count()] = other;
    accepted_.add(point, norm);
    return true;
  }

  /// pool_ becomes the nodes that chose this one and that it did not choose, evenly thinned.
  void gather_reverse(int32_t node, const int32_t *own, int num_own,
                      const Ragged<uint32_t> &reverse, int32_t first_node) {
    for (int i = 0; i < num_own; ++i) seen_[own[i]] = node;
    seen_[node] = node;
    pool_.clear();
    const uint32_t *edges = reverse.begin(node);
    const int64_t count = reverse.size(node);
    const int64_t wanted = std::min<int64_t>(count, int64_t{kReversePerDegree} * degree_);
    for (int64_t i = 0; i < wanted; ++i) {
      const int32_t other =
          first_node + static_cast<int32_t>(edges[count * i / wanted] / degree_);
      if (seen_[other] != node) pool_.push_back({other, 0});
    }
  }

  /// Keeps the first three quarters of the own choice; the nearest others compete for the rest.
  int link_full(int32_t node, const int32_t *own, int num_own, int32_t *neighbours) {
    const int kept = std::min(num_own, degree_ * 3 / 4);
    accepted_.clear();
    for (int i = 0; i < kept; ++i) {
      neighbours[i] = own[i];
      accepted_.add(in_.point(own[i]), in_.norms[own[i]]);
    }
    for (int i = kept; i < num_own; ++i) pool_.push_back({own[i], 0});
    for (Candidate &other : pool_) other.distance = in_.distance_between(node, other.node);
    std::sort(pool_.begin(), pool_.end(), [](const Candidate &a, const Candidate &b) {
      return a.distance != b.distance ? a.distance < b.distance : a.node < b.node;
    });
    rejected_.clear();
    for (const Candidate &other : pool_) {
      if (accepted_.count() == degree_) break;
      if (!try_accept(other.node, other.distance, neighbours)) rejected_.push_back(other.node);
    }
    return fill_up(neighbours);
  }

  const Inputs &in_;
  const int degree_;
  CoVisits visits_;
  std::vector<int32_t> seen_;  // the last node that saw this one
  std::vector<int32_t> rejected_;
  std::vector<Candidate> pool_;
  Accepted accepted_;
};

/// Calls body(builder, node) for all nodes from `first` on; a worker keeps its builder.
template <typename Body>
void for_nodes(Pool *pool, const Inputs &in, int32_t first, const Body &body) {
  std::vector<std::unique_ptr<NodeBuilder>> builders(pool == nullptr ? 1 : pool->threads());
  const int64_t items = (in.num_nodes - first + kItemNodes - 1) / kItemNodes;
  parallel_for(pool, items, [&](int64_t item, int worker) {
    std::unique_ptr<NodeBuilder> &builder = builders[worker];
    if (!builder) builder = std::make_unique<NodeBuilder>(in);
    const int64_t last = std::min<int64_t>(in.num_nodes, first + (item + 1) * kItemNodes);
    for (int64_t node = first + item * kItemNodes; node < last; ++node)
      body(*builder, static_cast<int32_t>(node));
  });
}

void choose_entries(const Inputs &in, int32_t *entries) {
  std::vector<int32_t> nodes(in.num_nodes);
  std::iota(nodes.begin(), nodes.end(), 0);
  const int wanted = in.projection.num_entries;
  const int found = std::min(wanted, in.num_nodes);
  std::partial_sort(nodes.begin(), nodes.begin() + found, nodes.end(), [&](int32_t a, int32_t b) {
    return in.visits.size(a) != in.visits.size(b) ? in.visits.size(a) > in.visits.size(b) : a < b;
  });
  std::fill_n(entries, wanted, -1);
  std::copy_n(nodes.begin(), found, entries);
}

void check_ids(const int32_t *ids, int64_t count, int64_t num_keys) {
  for (int64_t i = 0; i < count; ++i)
    require(ids[i] >= -1 && ids[i] < num_keys, "a list names a key that does not exist");
}

/// Every key that a list names has a list of its own.
void check_lists(const hkv_projection &projection, const int32_t *list_of, int64_t num_lists) {
  const auto check = [&](const int32_t *ids, int64_t count) {
    check_ids(ids, count, projection.num_keys);
    for (int64_t i = 0; i < count; ++i)
      require(ids[i] < 0 || list_of[ids[i]] >= 0, "a list names a key that has no list");
  };
  for (int64_t key = 0; key < projection.num_keys; ++key)
    require(list_of[key] >= -1 && list_of[key] < num_lists, "list_of names no list");
  check(projection.lists, projection.num_queries * projection.list_length);
  check(projection.extra, projection.num_keys * projection.extra_length);
}

/// Beyond the limit, distances would leave 32 bits.
void check_points(const int16_t *points, int64_t count) {
  bool fits = true;
  for (int64_t i = 0; i < count; ++i)
    fits &= points[i] >= -HKV_POINT_LIMIT && points[i] <= HKV_POINT_LIMIT;
  require(fits, "points must be -4095..4095");
}

}  // namespace

void check_projection(const hkv_projection &projection) {
  require(projection.num_keys >= 0 && projection.num_keys < INT32_MAX,
          "num_keys must be 0..2^31 - 2");
  require(projection.num_queries >= 0 && projection.list_length >= 0 &&
              projection.extra_length >= 0,
          "the sizes of lists and extra must be at least 0");
  require(projection.list_length <= UINT16_MAX, "lists must be no longer than 65535");
  require(projection.list_length == 0 ||
              projection.num_queries <= UINT32_MAX / projection.list_length,
          "lists must hold fewer than 2^32 ids");
  require(projection.lists != nullptr || projection.num_queries * projection.list_length == 0,
          "lists must not be NULL");
  require(projection.extra != nullptr || projection.num_keys * projection.extra_length == 0,
          "extra must not be NULL");
  require(projection.degree >= 1 && projection.degree <= HKV_MAX_DEGREE,
          "max_degree must be 1..256");
  require(projection.cap >= 2 && projection.cap < kMaxCap, "cap must be 2..254");
  require(projection.candidates >= 1 && projection.candidates < (1 << 24),
          "candidates must be 1..2^24 - 1");
  require(projection.num_entries >= 1, "num_entries must be at least 1");
  require(projection.alpha > 0.0f, "alpha must be above 0");
}

int64_t cover(const hkv_projection &projection, int32_t *list_of, int64_t num_lists) {
  constexpr int32_t kWanted = -2;
  check_projection(projection);
  const int64_t num_keys = projection.num_keys;
  require(num_lists >= 0 && num_lists <= num_keys, "num_lists must be 0..num_keys");
  for (int64_t key = 0; key < num_keys; ++key)
    require(list_of[key] >= -1 && list_of[key] < num_lists, "list_of names no list");
  const auto mark = [&](const int32_t *ids, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      if (ids[i] >= 0 && list_of[ids[i]] < 0) list_of[ids[i]] = kWanted;
  };
  const int64_t extra = projection.extra_length;
  check_ids(projection.lists, projection.num_queries * projection.list_length, num_keys);
  check_ids(projection.extra, num_keys * extra, num_keys);
  mark(projection.lists, projection.num_queries * projection.list_length);
  for (int64_t key = 0; extra > 0 && key < num_keys; ++key) {
    const int32_t *ids = projection.extra + key * extra;
    mark(ids, extra);
    const auto key32 = static_cast<int32_t>(key);
    if (std::any_of(ids, ids + extra, [](int32_t id) { return id >= 0; })) mark(&key32, 1);
  }
  for (int64_t key = 0; key < num_keys; ++key)
    if (list_of[key] == kWanted) list_of[key] = static_cast<int32_t>(num_lists++);
  return num_lists;
}

void project(Pool *pool, const hkv_projection &projection, const int32_t *list_of,
             int64_t num_lists, int64_t first_list, const int16_t *points, int32_t *neighbours,
             int32_t *entries) {
  check_projection(projection);
  const auto num_nodes = static_cast<int32_t>(num_lists);
  const auto first_node = static_cast<int32_t>(first_list);
  const int degree = projection.degree;
  check_lists(projection, list_of, num_lists);
  check_ids(neighbours, first_list * degree, num_lists);
  check_points(points, num_lists * HKV_POINT_DIMS);
  const Inputs in = prepare(pool, projection, list_of, num_nodes, points);
  std::vector<int32_t> own((num_lists - first_list) * degree, -1), num_own(num_lists - first_list);
  for_nodes(pool, in, first_node, [&](NodeBuilder &builder, int32_t node) {
    const int64_t place = node - first_node;
    num_own[place] = builder.forward(node, &own[place * degree]);
  });
  const Ragged<uint32_t> reverse = invert(pool, own, num_nodes);
  for_nodes(pool, in, 0, [&](NodeBuilder &builder, int32_t node) {
    if (node < first_node && reverse.size(node) == 0) return;
    int32_t *list = neighbours + int64_t{node} * degree;
    const int64_t place = node - first_node;
    const std::vector<int32_t> known(list, node < first_node ? std::find(list, list + degree, -1)
                                                             : list);
    const int32_t *mine = node < first_node ? known.data() : &own[place * degree];
    const int count = node < first_node ? static_cast<int>(known.size()) : num_own[place];
    const int found = builder.link(node, mine, count, reverse, first_node, list);
    std::fill(list + found, list + degree, -1);
  });
  if (first_list == 0) choose_entries(in, entries);
}

}  // namespace hkv

extern "C" {

int hkv_graph_cover(const hkv_projection *projection, int32_t *list_of, int64_t *num_lists) {
  return hkv::guarded([&] {
    hkv::require(projection && num_lists && (list_of || projection->num_keys == 0),
                 "arguments must not be NULL");
    *num_lists = hkv::cover(*projection, list_of, *num_lists);
  });
}

int hkv_graph_project(hkv_pool *pool, const hkv_projection *projection, const int32_t *list_of,
                      int64_t num_lists, int64_t first_list, const int16_t *points,
                      int32_t *neighbours, int32_t *entries) {
  return hkv::guarded([&] {
    hkv::require(projection && entries, "arguments must not be NULL");
    hkv::require(first_list >= 0 && first_list <= num_lists && num_lists < INT32_MAX,
                 "first_list must be 0..num_lists");
    hkv::require(num_lists == 0 || (list_of && points && neighbours), "arguments must not be NULL");
    hkv::project(pool, *projection, list_of, num_lists, first_list, points, neighbours, entries);
  });
}

}  // extern "C"
