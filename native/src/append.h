// One new token of a layer: its key and value, its position, and the digest of its page.
#pragma once

#include "hybrid_kv_pages.h"

namespace hkv {

/// A token and its place in pages; the key of head h is at h * key_step elements.
struct NewToken {
  const void *keys;
  int64_t key_step;
  const void *values;
  int64_t value_step;
  int64_t slot, offset;

  void check(const hkv_pages *to) const;

  /// Whether all channels of all keys are.
  bool has_finite_keys(int32_t heads, int32_t dim, int32_t dtype) const;

  /// Everything but its position, without which nobody sees it.
  void store(const hkv_pages &to) const;
  void show(const hkv_pages &to, int64_t position) const {
    to.positions[slot * to.page_size + offset] = position;
  }
};

}  // namespace hkv
