// What the entry points of attention have in common: their arguments, and what is refused.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "convert.h"
#include "error.h"
#include "hybrid_kv_attend.h"
#include "quantise.h"
#include "softmax.h"

namespace hkv {

/// Keys and values of one KV head of one batch row.
struct Entries {
  hkv_keys keys, values;
};

inline Entries entries_of(const hkv_kv &kv, int64_t batch_row, int64_t head) {
  Entries found{kv.keys, kv.values};
  with_dtype(kv.keys.dtype, [&](auto *element) {
    const auto moved = [&](const void *data, const int64_t(&step)[2]) {
      if (kv.keys.count == 0) return decltype(element){nullptr};
      return static_cast<decltype(element)>(data) + batch_row * step[0] + head * step[1];
    };
    found.keys.data = moved(kv.keys.data, kv.key_step);
    found.values.data = moved(kv.values.data, kv.value_step);
  });
  return found;
}

/// `count` elements from `first` on, as floats; valid until the thread's next call.
inline const float *floats_of(const void *from, int32_t dtype, int64_t first, int64_t count) {
  thread_local std::vector<float> floats;
  grow(floats, count);
  with_dtype(dtype, [&](auto *element) {
    convert(static_cast<decltype(element)>(from) + first, count, floats.data());
  });
  return floats.data();
}

inline void check_attention(int32_t batch, int32_t heads, const hkv_kv *kv, const void *queries,
                            int32_t query_dtype, int64_t num_queries, float softcap,
                            const float *out, const float *lse) {
  with_dtype(query_dtype, [](auto *) {});
  require(batch >= 0 && heads >= 0 && num_queries >= 0, "sizes must be at least 0");
  require(softcap >= 0.0f, "softcap must be at least 0");
  if (batch == 0 || heads == 0) return;
  require(kv != nullptr, "kv must not be NULL");
  require(num_queries == 0 || (queries && out && lse), "arrays must not be NULL");
  check_keys(kv->keys);
  check_keys(kv->values);
  require(kv->keys.count == kv->values.count, "there must be as many values as keys");
  require(kv->keys.dtype == kv->values.dtype, "values must have the dtype of the keys");
  require(kv->keys.count <= std::numeric_limits<int32_t>::max(),
          "a head must have fewer than 2^31 keys");
}

}  // namespace hkv
