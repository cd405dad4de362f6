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

  /// Begins with a query of `dim` channels, for which at most `count` entries are ranked.
  void begin(const float *from, int dim, int64_t count) {
    grow(query, exact_room(dim));
    std::fill(std::copy_n(from, dim, query.data()), query.data() + exact_room(dim), 0.0f);
    grow(scores, count);
    grow(ids, count);
    there = 0;
  }

  /// Scores those of the named entries that lie in [first, first + number of keys).
  template <typename Element>
  void add(const hkv_keys &keys, int64_t first, const int64_t *named, int64_t count) {
    const int64_t before = there;
    uint32_t *own = ids.data() + before;
    for (int64_t i = 0; i < count; ++i)
      if (named[i] >= first && named[i] < first + keys.count)
        ids[there++] = static_cast<uint32_t>(named[i] - first);
    score_exactly<Element>(keys, query.data(), own, there - before, scores.data() + before);
    for (int64_t i = 0; i < there - before; ++i) own[i] += static_cast<uint32_t>(first);
  }

  /// All of them, best first, then -1; to_ids, to_scores: [count].
  void end(int64_t count, int64_t *to_ids, float *to_scores) {
    sort.run({scores.data(), ids.data(), there});
    std::copy_n(ids.data(), there, to_ids);
    std::fill(to_ids + there, to_ids + count, -1);
    std::copy_n(scores.data(), there, to_scores);
  }

  int64_t there = 0;
};

Ranking &ranking_here() {
  thread_local Ranking own;
  return own;
}

void check_search(const hkv_search &search, const hkv_layer &layer) {
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

}  // namespace

void check_named(const hkv_layer &layer, const hkv_step &step) {
  if (step.named == nullptr) return;
  const hkv_cold &cold = layer.cold;
  require(cold.num_extents > 0, "entries can be named of cold ones only");
  require(step.num_named >= 1, "num_named must be at least 1");
  int64_t entries = 0;
  for (int32_t at = 0; at < cold.num_extents; ++at) entries += cold.extents[at].kv.keys.count;
  const int64_t places = int64_t{layer.heads} * layer.num_queries * step.num_named;
  int64_t last = -1;
  for (int64_t i = 0; i < places; ++i) last = std::max(last, step.named[i]);
  require(last < entries, "a named entry lies beyond the keys");
}

void check_found(const hkv_layer &layer, const hkv_step &step) {
  if (step.found == nullptr) return;
  require(layer.cold.num_extents > 0 && step.named == nullptr,
          "entries can be found before of cold ones only, and not be named as well");
  require(step.found_scores != nullptr && step.num_found >= 1,
          "what was found must have scores, and num_found must be at least 1");
}

void check_searches(const hkv_layer &layer) {
  const hkv_cold &cold = layer.cold;
  require(cold.num_extents >= 0, "sizes must be at least 0");
  if (cold.num_extents == 0) return;
  require(cold.extents != nullptr, "extents must not be NULL");
  require(cold.width >= 1, "width must be at least 1");
  int64_t entries = 0;
  for (int32_t number = 0; number < cold.num_extents; ++number) {
    const hkv_extent &extent = cold.extents[number];
    require(extent.num_searches >= 1 && extent.searches != nullptr,
            "an extent must have searches");
    require(extent.kv.keys.count >= 1, "an extent must have entries");
    entries += extent.kv.keys.count;
    for (int32_t at = 0; at < extent.num_searches; ++at) check_search(extent.searches[at], layer);
  }
  require(entries <= std::numeric_limits<uint32_t>::max(),
          "a head must have fewer than 2^32 cold entries");
}

int Searches::run(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                  const float *queries) {
  const hkv_cold &cold = layer.cold;
  count_entries(cold);
  scored_ = 0;
  grow(sources_, layer.heads);
  for (auto &own : sources_) own.clear();
  int32_t searches = 0;
  for (int32_t extent = 0; extent < cold.num_extents; ++extent)
    searches += cold.extents[extent].num_searches;
  grow(ids_, searches);
  grow(scores_, searches);
  if (step.named != nullptr) {
    rank_named(pool, layer, step, queries);
    return HKV_OK;
  }
  int32_t place = 0;
  for (int32_t extent = 0; extent < cold.num_extents; ++extent) {
    if (extent == 0 && step.found != nullptr) {
      take_up(layer, step);
      continue;
    }
    const int status = run_extent(pool, layer, step, queries, extent, place);
    if (status != HKV_OK) return status;
    place += cold.extents[extent].num_searches;
  }
  return HKV_OK;
}

void Searches::count_entries(const hkv_cold &cold) {
  firsts_.assign(1, 0);
  for (int32_t extent = 0; extent < cold.num_extents; ++extent)
    firsts_.push_back(firsts_.back() + cold.extents[extent].kv.keys.count);
}

/// What was found in the first extent before.
void Searches::take_up(const hkv_layer &layer, const hkv_step &step) {
  const int64_t each = layer.num_queries * step.num_found;
  for (int32_t head = 0; head < layer.heads; ++head)
    sources_[head].push_back({step.found + head * each, step.found_scores + head * each,
                              step.num_found, 0, firsts_[1]});
}

int Searches::run_extent(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                         const float *queries, int32_t extent, int32_t first_place) {
  const hkv_extent &of = layer.cold.extents[extent];
  const int64_t *warm = warm_of(layer, step, extent);
  for (int32_t at = 0; at < of.num_searches; ++at) {
    const hkv_search &search = of.searches[at];
    const int32_t place = first_place + at;
    const int status = run_one(pool, layer, step, queries, search, warm, place);
    if (status != HKV_OK) return status;
    for (int32_t head = 0; head < search.num_heads; ++head) {
      const int64_t first = head * layer.num_queries * search.width;
      sources_[search.heads[head]].push_back({ids_[place].data() + first,
                                              scores_[place].data() + first, search.width,
                                              firsts_[extent] + search.first_row,
                                              firsts_[extent + 1]});
    }
  }
  return HKV_OK;
}

/// Where the graphs of an extent start, as its rows.
const int64_t *Searches::warm_of(const hkv_layer &layer, const hkv_step &step, int32_t extent) {
  if (step.warm == nullptr || layer.cold.num_extents == 1) return step.warm;
  const int64_t first = firsts_[extent], end = firsts_[extent + 1];
  const int64_t count = int64_t{layer.heads} * layer.num_queries * step.num_warm;
  grow(own_warm_, count);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_own = step.warm[i] >= first && step.warm[i] < end;
    own_warm_[i] = is_own ? step.warm[i] - first : -1;
  }
  return own_warm_.data();
}

void Searches::rank_named(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                          const float *queries) {
  const hkv_cold &cold = layer.cold;
  const int64_t count = step.num_named, each = layer.num_queries * count;
  grow(ids_[0], layer.heads * each);
  grow(scores_[0], layer.heads * each);
  const auto rank = [&](int64_t row) {
    Ranking &own = ranking_here();
    const int64_t *named = step.named + row * count;
    const int dim = cold.extents[0].kv.keys.dim;
    own.begin(queries + row * dim, dim, count);
    for (int32_t extent = 0; extent < cold.num_extents; ++extent) {
      const Entries from = entries_of(cold.extents[extent].kv, 0, row / layer.num_queries);
      with_dtype(from.keys.dtype, [&](auto *element) {
        using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
        own.add<Element>(from.keys, firsts_[extent], named, count);
      });
    }
    own.end(count, ids_[0].data() + row * count, scores_[0].data() + row * count);
  };
  parallel_for(pool, layer.heads * layer.num_queries, [&](int64_t row, int) { rank(row); });
  for (int32_t head = 0; head < layer.heads; ++head)
    sources_[head].push_back({ids_[0].data() + head * each, scores_[0].data() + head * each, count,
                              0, firsts_.back()});
  scored_ = layer.heads * each;
}

int Searches::run_one(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                      const float *queries, const hkv_search &search, const int64_t *warm,
                      int32_t place) {
  const int64_t count = layer.num_queries, dim = layer.cold.extents[0].kv.keys.dim;
  const float *own = of_heads(queries, count * dim, search, layer.heads, queries_);
  const int64_t found = search.num_heads * count * search.width;
  grow(ids_[place], found);
  grow(scores_[place], found);
  int64_t *ids = ids_[place].data();
  float *scores = scores_[place].data();
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
                                static_cast<int32_t>(warm == nullptr ? 0 : step.num_warm),
                                std::numeric_limits<float>::infinity(),
                                search.walks};
    grow(rows_, search.num_heads);
    grow(dots_, search.num_heads);
    status = hkv_graph_search(
        pool, search.num_heads, static_cast<const hkv_graph_head *>(search.head), &query, own,
        of_heads(warm, count * step.num_warm, search, layer.heads, warm_), ids, scores,
        rows_.data(), dots_.data());
    for (int32_t head = 0; status == HKV_OK && head < search.num_heads; ++head)
      scored += dots_[head];
  }
  scored_ += scored;
  return status;
}

/// What a row sees of the query's best; in `room` where some of it lies beyond.
Searches::Found Searches::Source::of(int64_t query, Room &room) const {
  const int64_t *from = ids + query * width;
  const float *its = scores + query * width;
  const int64_t there =
      std::find_if(from, from + width, [](int64_t id) { return id < 0; }) - from;
  const int64_t last = end - first;
  if (std::count_if(from, from + there, [=](int64_t id) { return id >= last; }) == 0)
    return {from, its, there};
  grow(room.ids, there);
  grow(room.scores, there);
  int64_t seen = 0;
  for (int64_t i = 0; i < there; ++i) {
    if (from[i] >= last) continue;
    room.ids[seen] = from[i];
    room.scores[seen++] = its[i];
  }
  return {room.ids.data(), room.scores.data(), seen};
}

int64_t Searches::take(int64_t head, int64_t query, int64_t width, int64_t *ids,
                       float *scores) const {
  thread_local Room room;
  int64_t count = 0;
  for (const Source &source : sources_[head]) {
    const Found found = source.of(query, room);
    if (count == 0) {  // as nearly always: nothing to merge with
      count = std::min(width, found.count);
      for (int64_t i = 0; i < count; ++i) ids[i] = found.ids[i] + source.first;
      std::copy_n(found.scores, count, scores);
      continue;
    }
    // What is there already moves behind the better ones of this search, from the worst on.
    int64_t old = count, one = found.count;
    for (int64_t place = old + one; place-- > 0;) {
      const bool is_new = old == 0 || (one > 0 && found.scores[one - 1] <= scores[old - 1]);
      const int64_t id = is_new ? found.ids[one - 1] + source.first : ids[old - 1];
      const float score = is_new ? found.scores[one - 1] : scores[old - 1];
      --(is_new ? one : old);
      if (place >= width) continue;
      ids[place] = id;
      scores[place] = score;
    }
    count = std::min(width, count + found.count);
  }
  return count;
}

}  // namespace hkv
