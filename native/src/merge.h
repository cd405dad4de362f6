// The exact merge of partial attentions by their log-sum-exp.
#pragma once

#include "hybrid_kv_attend.h"

namespace hkv {

/// One row of the union of parts, as `hkv_merge` says.
void merge_row(int32_t num_parts, const hkv_part *parts, int64_t row, int32_t dim, int32_t dtype,
               void *out, float *lse);

}  // namespace hkv
