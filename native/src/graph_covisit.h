// The nodes that queries retrieve together with a node.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "graph_inputs.h"

namespace hkv {

/// One worker's counting; its memory is that of all nodes.
class CoVisits {
 public:
  explicit CoVisits(const Inputs &inputs)
      : in_(inputs),
        length_(inputs.projection.list_length),
        weight_(inputs.num_nodes + 1, 0),
        ranks_(std::max(1, length_)) {
    const int64_t per_query = length_;
    touched_.resize(per_query * inputs.projection.cap + inputs.projection.extra_length + 1);
    bin_of_.resize(touched_.size());
    while ((kTopWeight * (inputs.projection.cap + 1)) >> shift_ >= kWeightBins) ++shift_;
    bins_.assign((UINT16_MAX >> shift_) + 1, 0);  // lists with duplicates exceed kWeightBins
  }

  /// The candidates of a node, in falling weight, of equal ones the first found.
  const std::vector<int32_t> &heaviest(int32_t node) {
    choose_queries(node);
    count_weights(node);
    take_heaviest(node);
    return heaviest_;
  }

 private:
  static constexpr int kWeightBins = 1024;  // candidates are sorted no finer than this

  static uint64_t mix(uint64_t value) {
    value += 0x9e3779b97f4a7c15u;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
    return value ^ (value >> 31);
  }

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
    const int wanted = in_.projection.candidates + 2;  // the two above have no weight, but a place
    const int lowest = count_bins(wanted);
    const int found = keep_from(lowest);
    int place = 0;
    for (int bin = highest_; bin >= lowest; --bin) place += std::exchange(bins_[bin], place);
    heaviest_.resize(found);
    for (int i = 0; i < found; ++i) heaviest_[bins_[bin_of_[i]]++] = touched_[i];
    std::fill_n(bins_.begin(), highest_ + 1, 0);
    heaviest_.resize(std::min(found, wanted));
    heaviest_.erase(std::remove_if(heaviest_.begin(), heaviest_.end(),
                                   [&](int32_t other) {
                                     return other == node || other == in_.num_nodes;
                                   }),
                    heaviest_.end());
    heaviest_.resize(std::min<size_t>(heaviest_.size(), in_.projection.candidates));
  }

  /// Moves all weights to bin_of_ and counts them; returns the lowest bin of the `wanted` heaviest.
  int count_bins(int wanted) {
    highest_ = 0;
    for (int i = 0; i < num_touched_; ++i) {
      const int bin = std::exchange(weight_[touched_[i]], uint16_t{0}) >> shift_;
      bin_of_[i] = static_cast<uint16_t>(bin);
      ++bins_[bin];
      highest_ = std::max(highest_, bin);
    }
    int lowest = highest_;
    for (int count = bins_[lowest]; lowest > 0 && count < wanted; count += bins_[lowest]) --lowest;
    return lowest;
  }

  /// Moves what is in bin `lowest` or above to the front of touched_ and bin_of_; returns how many.
  int keep_from(int lowest) {
    int found = 0;
    for (int i = 0; i < num_touched_; ++i) {
      const uint16_t bin = bin_of_[i];
      touched_[found] = touched_[i];
      bin_of_[found] = bin;
      found += bin >= lowest;
    }
    return found;
  }

  const Inputs &in_;
  const int length_;
  std::vector<uint16_t> weight_;  // by node; 0 between nodes
  std::vector<int32_t> bins_;     // 0 between nodes
  std::vector<int32_t> ranks_;
  std::vector<int32_t> touched_;  // nodes that have a weight
  std::vector<uint16_t> bin_of_;  // of those
  int num_touched_ = 0;
  int shift_ = 0, highest_ = 0;
  std::vector<uint32_t> chosen_, rest_;  // positions in the lists
  std::vector<int32_t> heaviest_;
};

}  // namespace hkv
