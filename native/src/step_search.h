// The searches of one step: every kind by its own entry point, and what they found by head; or the
// ranking of what another search has named.
#pragma once

#include <cstdint>
#include <vector>

#include "hybrid_kv_step.h"
#include "softmax.h"

namespace hkv {

/// What the searches of a step found; kept by the thread that asked, so that memory is reused.
class Searches {
 public:
  /// A status of the C door; its sentence is set.
  ///
  /// queries: [heads, num_queries, dim] float32.
  int run(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step, const float *queries);

  int64_t scored() const { return scored_; }

  /// The number of an extent's first entry; of that behind the last one, the number of all entries.
  int64_t first(int32_t extent) const { return firsts_[extent]; }

  /// Which extent has an entry.
  int32_t extent_of(int64_t entry) const {
    int32_t extent = 0;
    while (entry >= firsts_[extent + 1]) ++extent;
    return extent;
  }

  /// The best entries of a query, best first: at most `width`.
  ///
  /// Searches of one head are merged by score; of equal scores that of the earlier search is first.
  int64_t take(int64_t head, int64_t query, int64_t width, int64_t *ids, float *scores) const;

 private:
  /// Some of what was found for one query, best first.
  struct Found {
    const int64_t *ids;
    const float *scores;
    int64_t count;
  };

  struct Room {
    std::vector<int64_t> ids;
    std::vector<float> scores;
  };

  /// What one search found for one head: [num_queries, width], best first, then -1.
  ///
  /// first: the entry that its id 0 stands for; end: the first that the row does not see.
  struct Source {
    const int64_t *ids;
    const float *scores;
    int64_t width, first, end;

    Found of(int64_t query, Room &room) const;
  };

  void count_entries(const hkv_cold &cold);
  void take_up(const hkv_layer &layer, const hkv_step &step);
  int run_extent(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step, const float *queries,
                 int32_t extent, int32_t first_place);
  int run_one(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step, const float *queries,
              const hkv_search &search, const int64_t *warm, int32_t place);
  const int64_t *warm_of(const hkv_layer &layer, const hkv_step &step, int32_t extent);
  void rank_named(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                  const float *queries);

  std::vector<int64_t> firsts_;               // by extent, and the number of all entries
  std::vector<std::vector<Source>> sources_;  // by KV head
  std::vector<std::vector<int64_t>> ids_;     // by search: [heads, queries, width]
  std::vector<std::vector<float>> scores_;
  std::vector<float> queries_;  // of the heads of one search
  std::vector<int64_t> own_warm_, warm_, rows_, dots_;  // own: of an extent, as its rows
  int64_t scored_ = 0;
};

/// Refuses what does not fit.
void check_searches(const hkv_layer &layer);
void check_named(const hkv_layer &layer, const hkv_step &step);
void check_found(const hkv_layer &layer, const hkv_step &step);

}  // namespace hkv
