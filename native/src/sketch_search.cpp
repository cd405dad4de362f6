// Searches by codes: a scan of all tiers of each head, whose best keys are then ranked exactly.
//
// Four loops over the heads of a layer: queries become codes and a threshold is guessed from a
// sample; blocks are scanned in parts for what is above it; the best are chosen; these are read. All
// results are those of a scan without a guess and without parts.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "error.h"
#include "exact_scores.h"
#include "pool.h"
#include "sketch_scan.h"
#include "sort.h"

namespace hkv {
namespace {

constexpr int64_t kGroup = 64;           // queries of one scan
constexpr int64_t kSampleStep = 24;      // one block of so many is scored for the guess, at least
constexpr int64_t kMostSampleStep = 96;
constexpr int64_t kBlocksOfStep = 8192;  // up to so many blocks
constexpr int64_t kSampleSlots = 32;     // vectors of maxima that a sample is reduced to, at least
constexpr int64_t kSampleAhead = 8 * 1024;  // bytes of the sample that are asked for early
constexpr int64_t kChunkBytes = 32 * 1024;   // of codes that stay in the cache for all slices
constexpr int64_t kSmallestPart = 64 * 1024;  // bytes of codes that are worth another thread
constexpr int64_t kMostParts = 64;
constexpr float kEverything = -std::numeric_limits<float>::infinity();

template <typename Value>
void grow(std::vector<Value> &values, int64_t size) {
  if (static_cast<int64_t>(values.size()) < size) values.resize(size);
}

/// Scratch of one thread; it grows to the largest search and is kept.
struct Scratch {
  std::vector<Selection> selections;
  std::vector<float> scores, maxima, padded_query;
  std::vector<uint32_t> ids;
  std::vector<uint64_t> marks;  // a bit per row, all clear between searches
  SortBestFirst sort;

  void reserve(int64_t count, int64_t keep) {
    grow(scores, count * Selection::storage(keep));
    grow(ids, count * Selection::storage(keep));
    grow(selections, count);
  }
  void restart(int64_t query, int64_t keep, float threshold) {
    const int64_t at = query * Selection::storage(keep);
    selections[query].reset(scores.data() + at, ids.data() + at, keep, threshold);
  }
};

Scratch &scratch() {
  thread_local Scratch own;
  return own;
}

/// What the loops of one search hand on, kept by the thread that asked.
struct Shared {
  std::vector<std::vector<SketchQueries>> queries;  // [head, group][tier]
  std::vector<float> thresholds;                    // [head, query]
  std::vector<float> scores;                        // [head, query, part, keep]
  std::vector<uint32_t> ids;
  std::vector<int64_t> counts;     // [head, query, part]
  std::vector<int64_t> rows_read;  // [head, group]
};

Shared &shared_here() {
  thread_local Shared own;
  return own;
}

int64_t num_coded(const hkv_sketch_head &head) {
  int64_t count = 0;
  for (int32_t tier = 0; tier < head.num_tiers; ++tier) count += head.tiers[tier].count;
  return count;
}

int64_t num_blocks(const hkv_sketch_tier &tier) {
  return (tier.count + HKV_BLOCK_KEYS - 1) / HKV_BLOCK_KEYS;
}

int64_t tier_bytes(const hkv_sketch_tier &tier) {
  return num_blocks(tier) * SketchLines(*tier.map).block_bytes();
}

int64_t code_bytes(const hkv_sketch_head &head) {
  int64_t bytes = 0;
  for (int32_t tier = 0; tier < head.num_tiers; ++tier) bytes += tier_bytes(head.tiers[tier]);
  return bytes;
}

/// One block of so many is sampled: a larger sample takes longer, a smaller one lets more keys pass,
/// by the root of its step.
int64_t sample_step(const hkv_sketch_head &head) {
  const double ratio = static_cast<double>(num_coded(head)) / (kBlocksOfStep * HKV_BLOCK_KEYS);
  return std::clamp(static_cast<int64_t>(kSampleStep * std::sqrt(ratio)), kSampleStep,
                    kMostSampleStep);
}

struct Search {
  hkv_pool *pool;
  int32_t heads;
  const hkv_sketch_head *head;
  const float *queries;
  int64_t num_queries, width;
  int64_t *ids;
  float *scores;

  void check() const;
  void run();
  int64_t num_scored() const;
  int64_t num_rows_read() const;

 private:
  void prepare_item(int64_t item);
  void scan_item(int64_t item);
  void choose_item(int64_t item);
  void rank_item(int64_t row);
  void guess(Scratch &own, int32_t at, int64_t group);
  void scan(Scratch &own, int32_t at, int64_t group, int64_t part, int64_t parts);
  void scan_tier(Scratch &own, const hkv_sketch_tier &tier, const SketchQueries &coded,
                 int64_t base, int64_t first, int64_t last);
  void scan_again(Scratch &own, int32_t at, int64_t query, Found found) const;
  void find_rows(const hkv_sketch_head &from, Found found) const;
  int64_t count_rows(Scratch &own, int32_t at, int64_t group) const;
  void write(Scratch &own, int64_t row, Found found) const;

  int64_t keep(int32_t at) const { return std::min(head[at].num_rerank, num_coded(head[at])); }
  int64_t num_exact(int32_t at) const { return head[at].keys.count - head[at].first_exact; }
  int64_t in_group(int64_t group) const { return std::min(kGroup, num_queries - group * kGroup); }
  int32_t head_of(int64_t item) const { return static_cast<int32_t>(item / groups_); }
  std::vector<SketchQueries> &coded(int32_t at, int64_t group) const {
    return shared_->queries[at * groups_ + group];
  }
  /// What was found for a query, and by one of its parts.
  Found found(int64_t row, int64_t part) const {
    const int64_t slot = row * parts_ + part;
    return {shared_->scores.data() + slot * stored_, shared_->ids.data() + slot * stored_,
            shared_->counts[slot]};
  }

  int64_t groups_ = 1, parts_ = 1;
  int64_t stored_ = 0;  // room for what a part found, whole vectors
  Shared *shared_ = nullptr;
};

void check_tier(const hkv_sketch_tier &tier, const hkv_sketch_head &head) {
  require(tier.map != nullptr, "a tier must have a map");
  check_sketch_map(*tier.map);
  require(tier.map->dim == head.keys.dim, "all tiers must have the dim of the keys");
  require(tier.count >= 0 && tier.count <= head.first_exact,
          "a tier must have 0..first_exact keys");
  require(tier.count == 0 || tier.blocks != nullptr, "the blocks of a tier must not be NULL");
  require(reinterpret_cast<uintptr_t>(tier.blocks) % kLineBytes == 0,
          "blocks must lie on 64 bytes");
  require(tier.ids == nullptr || tier.count == 0 ||
              (tier.ids[0] >= 0 && tier.ids[tier.count - 1] < head.first_exact),
          "the ids of a tier must be 0..first_exact - 1");
  check_sketch_pages(tier, head.keys);
}

void Search::check() const {
  require(heads >= 0 && (heads == 0 || head != nullptr), "head must not be NULL");
  require(num_queries >= 0, "the number of queries must be at least 0");
  require(width >= 1, "width must be at least 1");
  require(heads == 0 || num_queries == 0 ||
              (queries != nullptr && ids != nullptr && scores != nullptr),
          "arrays must not be NULL");
  for (int32_t at = 0; at < heads; ++at) {
    const hkv_sketch_head &one = head[at];
    check_keys(one.keys);
    require(one.keys.dim == head[0].keys.dim, "all heads must have the same dim");
    require(one.keys.count <= std::numeric_limits<int32_t>::max(),
            "a head must have fewer than 2^31 keys");
    require(one.num_rerank >= 1, "num_rerank must be at least 1");
    require(one.first_exact >= 0 && one.first_exact <= one.keys.count,
            "first_exact must be 0..the number of keys");
    require(one.num_tiers >= 0 && (one.num_tiers == 0 || one.tiers != nullptr),
            "tiers must not be NULL");
    for (int32_t tier = 0; tier < one.num_tiers; ++tier) check_tier(one.tiers[tier], one);
    require(num_coded(one) <= one.first_exact, "no two tiers may hold the same row");
  }
}

void Search::run() {
  check();
  if (heads == 0 || num_queries == 0) return;
  groups_ = (num_queries + kGroup - 1) / kGroup;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int32_t at = 0; at < heads; ++at) {
    least = std::min(least, code_bytes(head[at]));
    stored_ = std::max(stored_, (keep(at) + kScoreVector - 1) / kScoreVector * kScoreVector);
  }
  const int64_t threads = pool == nullptr ? 1 : pool->threads();
  parts_ = parts_of_items(heads * groups_, threads, std::min(kMostParts, least / kSmallestPart));
  shared_ = &shared_here();
  grow(shared_->queries, heads * groups_);
  grow(shared_->thresholds, heads * num_queries);
  grow(shared_->counts, heads * num_queries * parts_);
  grow(shared_->scores, heads * num_queries * parts_ * stored_);
  grow(shared_->ids, heads * num_queries * parts_ * stored_);
  grow(shared_->rows_read, heads * groups_);
  // The bodies hold one pointer, which std::function keeps without an allocation.
  const int64_t items = heads * groups_;
  parallel_for(pool, items, [this](int64_t item, int) { prepare_item(item); });
  parallel_for(pool, items * parts_, [this](int64_t item, int) { scan_item(item); });
  parallel_for(pool, items, [this](int64_t item, int) { choose_item(item); });
  parallel_for(pool, heads * num_queries, [this](int64_t row, int) { rank_item(row); });
}

void Search::prepare_item(int64_t item) {
  const int32_t at = head_of(item);
  const int64_t group = item % groups_, first = at * num_queries + group * kGroup;
  const float *rows = queries + first * head[at].keys.dim;
  std::vector<SketchQueries> &all = coded(at, group);
  grow(all, head[at].num_tiers);
  for (int32_t tier = 0; tier < head[at].num_tiers; ++tier)
    all[tier].prepare(*head[at].tiers[tier].map, rows, in_group(group));
  std::fill_n(shared_->thresholds.data() + first, in_group(group), kEverything);
  guess(scratch(), at, group);
}

/// A scan that starts without a threshold keeps nearly everything at first. A sample of all tiers
/// gives one that some more keys than are wanted will pass; where fewer do, which is rare, the query
/// is scanned again.
void Search::guess(Scratch &own, int32_t at, int64_t group) {
  const hkv_sketch_head &from = head[at];
  const int64_t step = sample_step(from);
  int64_t sampled = 0;
  for (int32_t tier = 0; tier < from.num_tiers; ++tier)
    sampled += from.tiers[tier].count / HKV_BLOCK_KEYS / step;
  const double expected = static_cast<double>(keep(at)) * static_cast<double>(sampled) *
                          HKV_BLOCK_KEYS / static_cast<double>(std::max<int64_t>(1, num_coded(from)));
  const int64_t rank = static_cast<int64_t>(expected + 4.0 * std::sqrt(expected) + 3.0);
  const int64_t slots = std::max(kSampleSlots, rank * 4 / HKV_BLOCK_KEYS);
  if (sampled < slots) return;
  const int64_t count = in_group(group), entries = slots * HKV_BLOCK_KEYS;
  grow(own.maxima, count * entries);
  std::fill_n(own.maxima.data(), count * entries, kEverything);
  int64_t slot = 0;
  for (int32_t index = 0; index < from.num_tiers; ++index) {
    const hkv_sketch_tier &tier = from.tiers[index];
    const SketchQueries &own_queries = coded(at, group)[index];
    const int64_t blocks = tier.count / HKV_BLOCK_KEYS;
    const int64_t blocks_ahead = kSampleAhead / SketchLines(*tier.map).block_bytes() + 1;
    for (int64_t block = step - 1; block < blocks; block += step) {
      for (int64_t slice = 0; slice < own_queries.num_slices(); ++slice) {
        float values[kSketchSlice * HKV_BLOCK_KEYS];
        const int64_t ahead = slice == 0 ? blocks_ahead * step : 0;
        TierScan(tier, own_queries, slice, 0).score(block, ahead, values);
        for (int query = 0; query < own_queries.num_queries(slice); ++query) {
          const float *score = values + query * HKV_BLOCK_KEYS;
          float *most = own.maxima.data() + (slice * kSketchSlice + query) * entries +
                        slot * HKV_BLOCK_KEYS;
          for (int key = 0; key < HKV_BLOCK_KEYS; ++key) most[key] = std::max(most[key], score[key]);
        }
      }
      slot = (slot + 1) % slots;
    }
  }
  for (int64_t query = 0; query < count; ++query) {
    const Cut cut = cut_at(own.maxima.data() + query * entries, entries, rank);
    shared_->thresholds[at * num_queries + group * kGroup + query] =
        cut.ties > 0 ? std::nextafter(cut.above, kEverything) : cut.above;
  }
}

void Search::scan_item(int64_t item) {
  Scratch &own = scratch();
  const int64_t part = item % parts_, group = item / parts_ % groups_;
  const int32_t at = static_cast<int32_t>(item / parts_ / groups_);
  const int64_t first = at * num_queries + group * kGroup, count = in_group(group);
  own.reserve(count, keep(at));
  for (int64_t query = 0; query < count; ++query)
    own.restart(query, keep(at), shared_->thresholds[first + query]);
  scan(own, at, group, part, parts_);
  for (int64_t query = 0; query < count; ++query) {
    Selection &selection = own.selections[query];
    const int64_t slot = (first + query) * parts_ + part;
    shared_->counts[slot] = selection.finish();
    std::copy_n(selection.scores(), selection.count(), shared_->scores.data() + slot * stored_);
    std::copy_n(selection.ids(), selection.count(), shared_->ids.data() + slot * stored_);
  }
}

/// Part `part` of the bytes of all tiers, for the queries of a group.
void Search::scan(Scratch &own, int32_t at, int64_t group, int64_t part, int64_t parts) {
  const int64_t total = code_bytes(head[at]);
  const int64_t begin = total / parts * part;
  const int64_t end = part + 1 == parts ? total : total / parts * (part + 1);
  int64_t base = 0, bytes_before = 0;
  for (int32_t index = 0; index < head[at].num_tiers; ++index) {
    const hkv_sketch_tier &tier = head[at].tiers[index];
    const int64_t block_bytes = SketchLines(*tier.map).block_bytes();
    const auto block_at = [&](int64_t bytes) {
      return std::clamp<int64_t>((bytes - bytes_before) / block_bytes, 0, num_blocks(tier));
    };
    scan_tier(own, tier, coded(at, group)[index], base, block_at(begin), block_at(end));
    base += tier.count;
    bytes_before += tier_bytes(tier);
  }
}

void Search::scan_tier(Scratch &own, const hkv_sketch_tier &tier, const SketchQueries &coded,
                       int64_t base, int64_t first, int64_t last) {
  const int64_t blocks = kChunkBytes / SketchLines(*tier.map).block_bytes();
  const int64_t chunk = coded.num_slices() > 1 ? std::max<int64_t>(1, blocks) : last - first;
  for (int64_t at = first; at < last; at += chunk)
    for (int64_t slice = 0; slice < coded.num_slices(); ++slice)
      TierScan(tier, coded, slice, base)
          .push(at, std::min(last, at + chunk), &own.selections[slice * kSketchSlice]);
}

/// The best of all parts, as rows of the keys.
void Search::choose_item(int64_t item) {
  Scratch &own = scratch();
  const int32_t at = head_of(item);
  const int64_t group = item % groups_, wanted = keep(at);
  for (int64_t query = group * kGroup; query < group * kGroup + in_group(group); ++query) {
    const int64_t row = at * num_queries + query;
    Found all = found(row, 0);
    for (int64_t part = 1; part < parts_; ++part) {  // places ascend from part to part
      const Found one = found(row, part);
      std::copy_n(one.scores, one.count, all.scores + all.count);
      std::copy_n(one.ids, one.count, all.ids + all.count);
      all.count += one.count;
    }
    if (all.count < wanted) {
      scan_again(own, at, query, all);
      all.count = wanted;
    } else if (all.count > wanted) {
      const Cut cut = cut_at(all.scores, all.count, wanted);
      all.count = apply_cut(cut, all.scores, all.ids, all.count);
    }
    find_rows(head[at], all);
    shared_->counts[row * parts_] = all.count;
  }
  shared_->rows_read[item] = count_rows(own, at, group);
}

/// A query that too few keys passed, without a threshold.
void Search::scan_again(Scratch &own, int32_t at, int64_t query, Found to) const {
  own.reserve(1, keep(at));
  own.restart(0, keep(at), kEverything);
  int64_t base = 0;
  for (int32_t index = 0; index < head[at].num_tiers; ++index) {
    const hkv_sketch_tier &tier = head[at].tiers[index];
    SketchQueries alone;
    alone.prepare(*tier.map, queries + (at * num_queries + query) * head[at].keys.dim, 1);
    TierScan(tier, alone, 0, base).push(0, num_blocks(tier), own.selections.data());
    base += tier.count;
  }
  own.selections[0].finish();
  std::copy_n(own.selections[0].scores(), keep(at), to.scores);
  std::copy_n(own.selections[0].ids(), keep(at), to.ids);
}

/// Numbers of candidates become rows of the keys.
void Search::find_rows(const hkv_sketch_head &from, Found all) const {
  int32_t index = 0;
  uint32_t base = 0;
  for (int64_t i = 0; i < all.count; ++i) {  // ascending
    while (all.ids[i] - base >= from.tiers[index].count)
      base += static_cast<uint32_t>(from.tiers[index++].count);
    all.ids[i] = row_of(from.tiers[index], all.ids[i] - base);
  }
}

/// Distinct rows that the queries of a group will read.
int64_t Search::count_rows(Scratch &own, int32_t at, int64_t group) const {
  grow(own.marks, (head[at].keys.count + 63) / 64);
  const int64_t first = at * num_queries + group * kGroup;
  int64_t distinct = num_exact(at);
  for (const bool counting : {true, false})
    for (int64_t row = first; row < first + in_group(group); ++row) {
      const Found all = found(row, 0);
      for (int64_t i = 0; i < all.count; ++i) {
        uint64_t &word = own.marks[all.ids[i] / 64];
        const uint64_t bit = uint64_t{1} << (all.ids[i] % 64);
        distinct += counting && (word & bit) == 0;
        word = counting ? word | bit : 0;
      }
    }
  return distinct;
}

void Search::rank_item(int64_t row) {
  Scratch &own = scratch();
  const int32_t at = static_cast<int32_t>(row / num_queries);
  const hkv_sketch_head &from = head[at];
  const Found chosen = found(row, 0);
  const int64_t room = chosen.count + num_exact(at) + kScoreVector;
  grow(own.scores, room);
  grow(own.ids, room);
  Found all{own.scores.data(), own.ids.data(), chosen.count + num_exact(at)};
  std::copy_n(chosen.ids, chosen.count, all.ids);
  for (int64_t i = chosen.count; i < all.count; ++i)
    all.ids[i] = static_cast<uint32_t>(from.first_exact + i - chosen.count);
  const int dim = from.keys.dim;
  grow(own.padded_query, exact_room(dim));
  std::fill_n(own.padded_query.data(), exact_room(dim), 0.0f);
  std::copy_n(queries + row * dim, dim, own.padded_query.data());
  with_dtype(from.keys.dtype, [&](auto *element) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    score_exactly<Element>(from.keys, own.padded_query.data(), all.ids, all.count, all.scores);
  });
  write(own, row, all);
}

/// Sorts what was ranked, of equal scores the lower row first, and writes the best.
void Search::write(Scratch &own, int64_t row, Found all) const {
  all.count = apply_cut({kEverything, 0}, all.scores, all.ids, all.count);  // NaN is no score
  if (all.count > width) {  // ties stay, as their rows decide
    const Cut cut = cut_at(all.scores, all.count, width);
    const float above = cut.ties > 0 ? std::nextafter(cut.above, kEverything) : cut.above;
    all.count = apply_cut({above, 0}, all.scores, all.ids, all.count);
  }
  own.sort.run(all);
  for (int64_t i = 0; i < all.count;) {
    int64_t end = i + 1;
    while (end < all.count && all.scores[end] == all.scores[i]) ++end;
    if (end - i > 1) std::sort(all.ids + i, all.ids + end);
    i = end;
  }
  all.count = std::min(all.count, width);
  std::copy_n(all.ids, all.count, ids + row * width);
  std::copy_n(all.scores, all.count, scores + row * width);
  std::fill(ids + row * width + all.count, ids + (row + 1) * width, -1);
  std::fill(scores + row * width + all.count, scores + (row + 1) * width, kEverything);
}

int64_t Search::num_scored() const {
  int64_t scored = 0;
  for (int32_t at = 0; at < heads; ++at)
    scored += num_queries * (num_coded(head[at]) + keep(at) + num_exact(at));
  return scored;
}

int64_t Search::num_rows_read() const {
  int64_t rows = 0;
  for (int64_t item = 0; shared_ != nullptr && item < heads * groups_; ++item)
    rows += shared_->rows_read[item];
  return rows;
}

}  // namespace
}  // namespace hkv

extern "C" {

int hkv_sketch_search(hkv_pool *pool, int32_t heads, const hkv_sketch_head *head,
                      const float *queries, int64_t num_queries, int64_t width, int64_t *ids,
                      float *scores, int64_t *scored, int64_t *rows_read) {
  return hkv::guarded([&] {
    hkv::Search search{};
    search.pool = pool;
    search.heads = heads;
    search.head = head;
    search.queries = queries;
    search.num_queries = num_queries;
    search.width = width;
    search.ids = ids;
    search.scores = scores;
    search.run();
    if (scored != nullptr) *scored = search.num_scored();
    if (rows_read != nullptr) *rows_read = search.num_rows_read();
  });
}

}  // extern "C"
