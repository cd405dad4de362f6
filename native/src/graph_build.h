// Builds a graph from what queries retrieved: a key links to what its queries retrieved with it.
#pragma once

#include <cstdint>

#include "hybrid_kv_graph.h"
#include "pool.h"

namespace hkv {

/// Raises Invalid unless the sizes and parameters are in range.
void check_projection(const hkv_projection &projection);

/// See hkv_graph_cover; returns the new number of lists.
int64_t cover(const hkv_projection &projection, int32_t *list_of, int64_t num_lists);

/// See hkv_graph_project.
void project(Pool *pool, const hkv_projection &projection, const int32_t *list_of,
             int64_t num_lists, int64_t first_list, const int16_t *points, int32_t *neighbours,
             int32_t *entries);

}  // namespace hkv
