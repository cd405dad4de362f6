// Joint best-first search for the queries of one KV head.
#pragma once

#include <cstdint>

#include "hybrid_kv_graph.h"
#include "pool.h"

namespace hkv {

/// Raises Invalid unless the parameters are in range.
void check_query(const hkv_graph_query &query);

/// Raises Invalid unless the head's arrays fit together.
void check_head(const hkv_graph_head &head);

}  // namespace hkv
