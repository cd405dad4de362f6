#include "append.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "convert.h"
#include "error.h"
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
void append(const hkv_pages &to, const NewToken &token) {
  const auto *keys = static_cast<const Element *>(token.keys);
  const auto *values = static_cast<const Element *>(token.values);
  for (int32_t head = 0; head < to.heads; ++head) {
    const int64_t page = head * to.slots + token.slot, place = page * to.page_size + token.offset;
    std::copy_n(keys + head * token.key_step, to.dim,
                static_cast<Element *>(to.keys) + place * to.dim);
    std::copy_n(values + head * token.value_step, to.value_dim,
                static_cast<Element *>(to.values) + place * to.value_dim);
    if (to.lows != nullptr)
      digest(static_cast<const Element *>(to.keys) + page * to.page_size * to.dim,
             token.offset + 1, to.dim, static_cast<Element *>(to.lows) + page * to.dim,
             static_cast<Element *>(to.highs) + page * to.dim);
  }
}

template <typename Element>
bool is_finite(const Element *row, int32_t dim) {
  float sum = 0.0f;
  for (int32_t d = 0; d < dim; ++d) sum += 0.0f * to_float(row[d]);  // NaN unless it is finite
  return sum == 0.0f;
}

}  // namespace

void NewToken::check(const hkv_pages *to) const {
  require(to != nullptr && keys != nullptr && values != nullptr, "arrays must not be NULL");
  require(to->keys != nullptr && to->values != nullptr && to->positions != nullptr,
          "pages must not be NULL");
  require((to->lows == nullptr) == (to->highs == nullptr), "digests must be both there, or none");
  require(to->heads >= 1 && to->dim >= 1 && to->value_dim >= 1 && to->page_size >= 1,
          "sizes must be at least 1");
  require(slot >= 0 && slot < to->slots, "slot must be 0..slots - 1");
  require(offset >= 0 && offset < to->page_size, "offset must be 0..page_size - 1");
}

bool NewToken::has_finite_keys(int32_t heads, int32_t dim, int32_t dtype) const {
  bool all = true;
  with_dtype(dtype, [&](auto *element) {
    const auto *first = static_cast<decltype(element)>(keys);
    for (int32_t head = 0; head < heads; ++head) all &= is_finite(first + head * key_step, dim);
  });
  return all;
}

void NewToken::store(const hkv_pages &to) const {
  with_dtype(to.dtype, [&](auto *element) {
    append<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(to, *this);
  });
}

}  // namespace hkv

extern "C" int hkv_append(const hkv_pages *pages, const void *keys, int64_t key_step,
                          const void *values, int64_t value_step, int64_t slot, int64_t offset,
                          int64_t position) {
  return hkv::guarded([&] {
    const hkv::NewToken token{keys, key_step, values, value_step, slot, offset};
    token.check(pages);
    token.store(*pages);
    token.show(*pages, position);
  });
}
