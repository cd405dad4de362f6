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

  /// The best entries of a query, best first: at most `width`, as rows of the layer's entries.
  ///
  /// Searches of one head are merged by score; of equal scores that of the earlier search is first.
  int64_t take(int64_t head, int64_t query, int64_t width, int64_t *ids, float *scores) const;

 private:
  /// What one search found for one head: [num_queries, width], best first, then -1.
  struct Source {
    const int64_t *ids;
    const float *scores;
    int64_t width, first_row;
  };

  int run_one(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step, const float *queries,
              int32_t at);
  void rank_named(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step,
                  const float *queries);

  std::vector<std::vector<Source>> sources_;  // by KV head
  std::vector<std::vector<int64_t>> ids_;     // by search: [heads, queries, width]
  std::vector<std::vector<float>> scores_;
  std::vector<float> queries_;  // of the heads of one search
  std::vector<int64_t> warm_, rows_, dots_;
  int64_t scored_ = 0;
};

/// Refuses what does not fit.
void check_searches(const hkv_layer &layer);
void check_named(const hkv_layer &layer, const hkv_step &step);

}  // namespace hkv
