// Co-visit projection. Inside, keys are numbered by their lists ("nodes"), so that everything that
// is read at random is small. All arithmetic that decides is in integers, or is a single rounded
// operation: the result does not depend on threads or on the instruction set.
#include "graph_build.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "error.h"
#include "graph_prune.h"

namespace hkv {
namespace {

constexpr int kTopWeight = 256;         // weight of one query that has both keys at its top
constexpr double kRankDecay = 0.05;     // how fast weights fall with the rank
constexpr int kMaxCap = 255;            // kTopWeight * kMaxCap fits 16 bits
constexpr int kWeightBins = 1024;       // candidates are sorted no finer than this
constexpr int kReversePerDegree = 4;    // reverse edges considered, in lists
constexpr int64_t kItemNodes = 256;     // of one piece of parallel work
constexpr int kPrefetchAhead = 8;

uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

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
Ragged<uint32_t> invert(Pool *pool, const std::vector<int32_t> &targets, int32_t num_targets) {
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

struct Candidate {
  int32_t node;
  int32_t distance;
};

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

/// One worker's part of the build: everything about one node at a time.
class NodeBuilder {
 public:
  explicit NodeBuilder(const Inputs &inputs)
      : in_(inputs),
        length_(inputs.projection.list_length),
        degree_(inputs.projection.degree),
        weight_(inputs.num_nodes + 1, 0),
        ranks_(std::max(1, length_)),
        seen_(inputs.num_nodes, -1) {
    const int64_t per_query = length_;
    touched_.resize(per_query * inputs.projection.cap + inputs.projection.extra_length + 1);
    while ((kTopWeight * (inputs.projection.cap + 1)) >> shift_ >= kWeightBins) ++shift_;
    bins_.assign((UINT16_MAX >> shift_) + 1, 0);  // lists with duplicates exceed kWeightBins
  }

  /// Writes the node's own choice of neighbours; returns how many.
  int forward(int32_t node, int32_t *neighbours) {
    choose_queries(node);
    count_weights(node);
    take_heaviest(node);
    return prune(node, neighbours);
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
  /// All queries that retrieved the node; of too many, half the best and half spread over the rest.
  void choose_queries(int32_t node) {
    const uint32_t *visits = in_.visits.begin(node);
    const int64_t count = in_.visits.size(node);
    const int cap = in_.projection.cap;
    chosen_.clear();
    if (count <= cap) {
      chosen_.assign(visits, visits + count);
      return;
    }
    const int best = cap / 2;
    rest_.clear();
    std::fill(ranks_.begin(), ranks_.end(), 0);
    for (int64_t i = 0; i < count; ++i) ++ranks_[visits[i] % length_];
    int last_rank = 0, below = 0;  // ranks below last_rank are taken, and some of last_rank
    while (below + ranks_[last_rank] < best) below += ranks_[last_rank++];
    int at_last = best - below;
    for (int64_t i = 0; i < count; ++i) {
      const int rank = static_cast<int>(visits[i] % length_);
      if (rank < last_rank || (rank == last_rank && at_last-- > 0))
        chosen_.push_back(visits[i]);
      else
        rest_.push_back(visits[i]);
    }
    spread(node, cap - best);
  }

  /// One of each of `wanted` equal stretches of rest_.
  void spread(int32_t node, int wanted) {
    const auto count = static_cast<int64_t>(rest_.size());
    for (int64_t i = 0; i < wanted; ++i) {
      const int64_t first = count * i / wanted, last = count * (i + 1) / wanted;
      const uint64_t random = mix(in_.projection.seed ^ mix(uint64_t(node) << 16 | uint64_t(i)));
      chosen_.push_back(rest_[first + static_cast<int64_t>(random % uint64_t(last - first))]);
    }
  }

  /// Adds to the weights of `count` nodes and notes those that had none.
  template <typename Weight>
  void add_weights(const int32_t *nodes, int count, const Weight &weight_at) {
    // Copies in registers: the compiler cannot know that the arrays are apart.
    uint16_t *const weights = weight_.data();
    int32_t *touched = touched_.data() + num_touched_;
    for (int i = 0; i < count; ++i) {
      uint16_t &weight = weights[nodes[i]];
      *touched = nodes[i];
      touched += weight == 0;
      weight = static_cast<uint16_t>(weight + weight_at(i));
    }
    num_touched_ = static_cast<int>(touched - touched_.data());
  }

  void count_weights(int32_t node) {
    num_touched_ = 0;
    const uint16_t *weights = in_.weights.data();
    for (size_t i = 0; i < chosen_.size(); ++i) {
      if (i + 1 < chosen_.size()) prefetch_list(chosen_[i + 1]);
      const int rank = static_cast<int>(chosen_[i] % length_);
      const int32_t *list = in_.lists.data() + (chosen_[i] - rank);
      add_weights(list, rank, [=](int) { return weights[rank]; });
      add_weights(list + rank, length_ - rank, [=](int at) { return weights[rank + at]; });
    }
    const int extra = in_.projection.extra_length;
    add_weights(in_.extra.data() + int64_t{node} * extra, extra,
                [=](int) { return weights[length_]; });
  }

  void prefetch_list(uint32_t visit) const {
    const int32_t *list = in_.lists.data() + (visit - visit % length_);
    for (int at = 0; at < length_; at += 16) __builtin_prefetch(list + at);
  }

  /// heaviest_ becomes the heaviest nodes in falling weight, of equal ones the first found.
  void take_heaviest(int32_t node) {
    weight_[node] = weight_[in_.num_nodes] = 0;
    int highest = 0;
    for (int i = 0; i < num_touched_; ++i) {
      const int bin = weight_[touched_[i]] >> shift_;
      ++bins_[bin];
      highest = std::max(highest, bin);
    }
    int place = 0;
    for (int bin = highest; bin >= 0; --bin) place += std::exchange(bins_[bin], place);
    heaviest_.resize(num_touched_);
    for (int i = 0; i < num_touched_; ++i)
      heaviest_[bins_[weight_[touched_[i]] >> shift_]++] = touched_[i];
    std::fill_n(bins_.begin(), highest + 1, 0);
    heaviest_.resize(std::min(num_touched_, in_.projection.candidates + 2));
    heaviest_.erase(std::remove_if(heaviest_.begin(), heaviest_.end(),
                                   [&](int32_t other) {
                                     return other == node || other == in_.num_nodes;
                                   }),
                    heaviest_.end());
    heaviest_.resize(std::min<size_t>(heaviest_.size(), in_.projection.candidates));
    for (int i = 0; i < num_touched_; ++i) weight_[touched_[i]] = 0;
  }

  int prune(int32_t node, int32_t *neighbours) {
    accepted_.clear();
    rejected_.clear();
    const auto count = static_cast<int>(heaviest_.size());
    for (int i = 0; i < count && accepted_.count() < degree_; ++i) {
      if (i + kPrefetchAhead < count)
        __builtin_prefetch(in_.point(heaviest_[i + kPrefetchAhead]));
      const int32_t other = heaviest_[i];
      if (!try_accept(other, in_.distance_between(node, other), neighbours))
        rejected_.push_back(other);
    }
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
    int filled = accepted_.count();
    for (size_t i = 0; i < rejected_.size() && filled < degree_; ++i)
      neighbours[filled++] = rejected_[i];
    return filled;
  }

  const Inputs &in_;
  const int length_, degree_;
  std::vector<uint16_t> weight_;  // by node; 0 between nodes
  std::vector<int32_t> bins_;     // 0 between nodes
  std::vector<int32_t> ranks_;
  std::vector<int32_t> seen_;  // the last node that saw this one
  std::vector<int32_t> touched_;
  int num_touched_ = 0;
  int shift_ = 0;
  std::vector<uint32_t> chosen_, rest_;  // positions in the lists
  std::vector<int32_t> heaviest_, rejected_;
  std::vector<Candidate> pool_;
  Accepted accepted_;
};

std::vector<uint16_t> rank_weights(int length) {
  std::vector<uint16_t> weights(length + 1);
  for (int rank = 0; rank <= length; ++rank)
    weights[rank] =
        static_cast<uint16_t>(std::max(1.0, std::floor(kTopWeight / (1.0 + kRankDecay * rank))));
  return weights;
}

Inputs prepare(Pool *pool, const hkv_projection &projection, const int32_t *list_of,
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
  require(projection.extra != nullptr || projection.extra_length == 0, "extra must not be NULL");
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
  for (int64_t key = 0; key < projection.num_keys; ++key)
    require(list_of[key] < num_lists, "list_of names no list");
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
