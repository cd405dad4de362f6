// One new token of a layer: its key and value, its position, and the digest of its page.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "convert.h"
#include "error.h"
#include "hybrid_kv_pages.h"
#include "quantise.h"

namespace hkv {
namespace {

/// The least and greatest of `count` rows in every channel; one that is NaN stays NaN.
template <typename Element>
void digest(const Element *rows, int64_t count, int32_t dim, Element *lows, Element *highs) {
  std::copy_n(rows, dim, lows);
  std::copy_n(rows, dim, highs);
  for (int64_t row = 1; row < count; ++row)
    for (int32_t d = 0; d < dim; ++d) {
      const Element stored = rows[row * dim + d];
      const float value = to_float(stored);
      if (value < to_float(lows[d]) || value != value) lows[d] = stored;
      if (value > to_float(highs[d]) || value != value) highs[d] = stored;
    }
}

template <typename Element>
void append(const hkv_pages &to, const Element *keys, int64_t key_step, const Element *values,
            int64_t value_step, int64_t slot, int64_t offset) {
  for (int32_t head = 0; head < to.heads; ++head) {
    const int64_t page = head * to.slots + slot, place = page * to.page_size + offset;
    std::copy_n(keys + head * key_step, to.dim, static_cast<Element *>(to.keys) + place * to.dim);
    std::copy_n(values + head * value_step, to.value_dim,
                static_cast<Element *>(to.values) + place * to.value_dim);
    if (to.lows != nullptr)
      digest(static_cast<const Element *>(to.keys) + page * to.page_size * to.dim, offset + 1,
             to.dim, static_cast<Element *>(to.lows) + page * to.dim,
             static_cast<Element *>(to.highs) + page * to.dim);
  }
}

void check(const hkv_pages *to, const void *keys, const void *values, int64_t slot,
           int64_t offset) {
  require(to != nullptr && keys != nullptr && values != nullptr, "arrays must not be NULL");
  require(to->keys != nullptr && to->values != nullptr && to->positions != nullptr,
          "pages must not be NULL");
  require((to->lows == nullptr) == (to->highs == nullptr), "digests must be both there, or none");
  require(to->heads >= 1 && to->dim >= 1 && to->value_dim >= 1 && to->page_size >= 1,
          "sizes must be at least 1");
  require(slot >= 0 && slot < to->slots, "slot must be 0..slots - 1");
  require(offset >= 0 && offset < to->page_size, "offset must be 0..page_size - 1");
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_append(const hkv_pages *pages, const void *keys, int64_t key_step,
                          const void *values, int64_t value_step, int64_t slot, int64_t offset,
                          int64_t position) {
  return hkv::guarded([&] {
    hkv::check(pages, keys, values, slot, offset);
    hkv::with_dtype(pages->dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      hkv::append(*pages, static_cast<const Element *>(keys), key_step,
                  static_cast<const Element *>(values), value_step, slot, offset);
    });
    pages->positions[slot * pages->page_size + offset] = position;
  });
}
