#include "step_search.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "attend_checks.h"
#include "error.h"
#include "exact_scores.h"
#include "pool.h"
#include "sort.h"

namespace hkv {
namespace {

/// Rows of [heads, size] of some heads; the array itself where they are all in order.
template <typename Value>
const Value *of_heads(const Value *from, int64_t size, const hkv_search &search, int32_t heads,
                      std::vector<Value> &to) {
  if (from == nullptr) return nullptr;
  bool all = search.num_heads == heads;
  for (int32_t at = 0; at < search.num_heads; ++at) all = all && search.heads[at] == at;
  if (all) return from;
  grow(to, search.num_heads * size);
  for (int32_t at = 0; at < search.num_heads; ++at)
    std::copy_n(from + search.heads[at] * size, size, to.data() + at * size);
  return to.data();
}

/// Scratch of one thread.
struct Ranking {
  std::vector<float> query, scores;
  std::vector<uint32_t> ids;
  SortBestFirst sort;

  /// The named rows of one query, best first, then -1; ids, scores: [count].
  template <typename Element>
  void run(const hkv_keys &keys, const float *from, const int64_t *named, int64_t count,
           int64_t *to_ids, float *to_scores) {
    grow(query, exact_room(keys.dim));
    std::fill(std::copy_n(from, keys.dim, query.data()), query.data() + exact_room(keys.dim), 0.0f);
    grow(scores, count);
    grow(ids, count);
    int64_t there = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (named[i] < 0) continue;
      require(named[i] < keys.count, "a named row lies beyond the keys");
      ids[there++] = static_cast<uint32_t>(named[i]);
    }
    score_exactly<Element>(keys, query.data(), ids.data(), there, scores.data());
    sort.run({scores.data(), ids.data(), there});
    std::copy_n(ids.data(), there, to_ids);
    std::fill(to_ids + there, to_ids + count, -1);
    std::copy_n(scores.data(), there, to_scores);
  }
};

Ranking &ranking_here() {
  thread_local Ranking own;
  return own;
}

}  // namespace

void check_named(const hkv_layer &layer, const hkv_step &step) {
  if (step.named == nullptr) return;
  require(layer.cold.num_searches > 0, "rows can be named of cold entries only");
  require(step.num_named >= 1, "num_named must be at least 1");
  require(layer.cold.kv.keys.count <= std::numeric_limits<uint32_t>::max(),
          "a head must have fewer than 2^32 keys");
}

void check_searches(const hkv_layer &layer) {
  const hkv_cold &cold = layer.cold;
  require(cold.num_searches >= 0, "sizes must be at least 0");
  if (cold.num_searches == 0) return;
  require(cold.searches != nullptr, "searches must not be NULL");
  require(cold.width >= 1, "width must be at least 1");
  for (int32_t at = 0; at < cold.num_searches; ++at) {
    const hkv_search &search = cold.searches[at];
    require(search.kind >= HKV_SEARCH_FLAT && search.kind <= HKV_SEARCH_SKETCH,
            "a search must be flat (0), graph (1) or sketch (2)");
    require(search.num_heads >= 1 && search.heads != nullptr && search.head != nullptr,
            "a search must have heads");
    require(search.width >= 1 && search.width <= std::numeric_limits<int32_t>::max() &&
                search.num_ranked <= std::numeric_limits<int32_t>::max(),
            "a search must be 1..2^31-1 wide");
    require(search.first_row >= 0, "first_row must be at least 0");
    for (int32_t place = 0; place < search.num_heads; ++place)
      require(search.heads[place] >= 0 && search.heads[place] < layer.heads,
              "a search names a head that the layer has not");
  }
}

int Searches::run(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                  const float *queries) {
  const hkv_cold &cold = layer.cold;
  scored_ = 0;
  grow(sources_, layer.heads);
  for (auto &own : sources_) own.clear();
  grow(ids_, cold.num_searches);
  grow(scores_, cold.num_searches);
  if (step.named != nullptr) {
    rank_named(pool, layer, step, queries);
    return HKV_OK;
  }
  for (int32_t at = 0; at < cold.num_searches; ++at) {
    const int status = run_one(pool, layer, step, queries, at);
    if (status != HKV_OK) return status;
    const hkv_search &search = cold.searches[at];
    for (int32_t place = 0; place < search.num_heads; ++place) {
      const int64_t first = place * layer.num_queries * search.width;
      sources_[search.heads[place]].push_back(
          {ids_[at].data() + first, scores_[at].data() + first, search.width, search.first_row});
    }
  }
  return HKV_OK;
}

void Searches::rank_named(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                          const float *queries) {
  const int64_t each = layer.num_queries * step.num_named, dim = layer.cold.kv.keys.dim;
  grow(ids_[0], layer.heads * each);
  grow(scores_[0], layer.heads * each);
  const auto rank = [&](int64_t row) {
    const int64_t at = row * step.num_named;
    const Entries from = entries_of(layer.cold.kv, 0, row / layer.num_queries);
    with_dtype(from.keys.dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      ranking_here().run<Element>(from.keys, queries + row * dim, step.named + at, step.num_named,
                                  ids_[0].data() + at, scores_[0].data() + at);
    });
  };
  parallel_for(pool, layer.heads * layer.num_queries, [&](int64_t row, int) { rank(row); });
  for (int32_t head = 0; head < layer.heads; ++head)
    sources_[head].push_back(
        {ids_[0].data() + head * each, scores_[0].data() + head * each, step.num_named, 0});
  scored_ = layer.heads * each;
}

int Searches::run_one(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                      const float *queries, int32_t at) {
  const hkv_search &search = layer.cold.searches[at];
  const int64_t count = layer.num_queries, dim = layer.cold.kv.keys.dim;
  const float *own = of_heads(queries, count * dim, search, layer.heads, queries_);
  const int64_t found = search.num_heads * count * search.width;
  grow(ids_[at], found);
  grow(scores_[at], found);
  int64_t *ids = ids_[at].data();
  float *scores = scores_[at].data();
  int64_t scored = 0;
  int status;
  if (search.kind == HKV_SEARCH_FLAT) {
    status = hkv_flat_search(pool, search.num_heads,
                             static_cast<const hkv_flat_head *>(search.head), own, count,
                             search.width, search.num_ranked, HKV_IDS_INT64, ids, scores, &scored);
  } else if (search.kind == HKV_SEARCH_SKETCH) {
    status = hkv_sketch_search(pool, search.num_heads,
                               static_cast<const hkv_sketch_head *>(search.head), own, count,
                               search.width, ids, scores, &scored, nullptr);
  } else {
    const hkv_graph_query query{search.beams,
                                static_cast<int32_t>(count),
                                static_cast<int32_t>(search.width),
                                static_cast<int32_t>(search.num_ranked),
                                search.num_expanded,
                                static_cast<int32_t>(step.warm == nullptr ? 0 : step.num_warm),
                                std::numeric_limits<float>::infinity(),
                                search.walks};
    grow(rows_, search.num_heads);
    grow(dots_, search.num_heads);
    status = hkv_graph_search(
        pool, search.num_heads, static_cast<const hkv_graph_head *>(search.head), &query, own,
        of_heads(step.warm, count * step.num_warm, search, layer.heads, warm_), ids, scores,
        rows_.data(), dots_.data());
    for (int32_t place = 0; status == HKV_OK && place < search.num_heads; ++place)
      scored += dots_[place];
  }
  scored_ += scored;
  return status;
}

int64_t Searches::take(int64_t head, int64_t query, int64_t width, int64_t *ids,
                       float *scores) const {
  const std::vector<Source> &sources = sources_[head];
  int64_t count = 0;
  for (const Source &source : sources) {
    const int64_t *from = source.ids + query * source.width;
    const float *its = source.scores + query * source.width;
    int64_t there = 0;
    while (there < source.width && from[there] >= 0) ++there;
    // What is there already moves behind the better ones of this search, from the worst on.
    int64_t old = count, one = there;
    for (int64_t place = old + one; place-- > 0;) {
      const bool is_new = old == 0 || (one > 0 && its[one - 1] <= scores[old - 1]);
      const int64_t id = is_new ? from[one - 1] + source.first_row : ids[old - 1];
      const float score = is_new ? its[one - 1] : scores[old - 1];
      --(is_new ? one : old);
      if (place >= width) continue;
      ids[place] = id;
      scores[place] = score;
    }
    count = std::min(width, count + there);
  }
  return count;
}

}  // namespace hkv
