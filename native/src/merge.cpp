// Attention over the union of disjoint parts.
// Source: online softmax (Milakov and Gimelshein 2018).
#include "merge.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "convert.h"
#include "error.h"
#include "pool.h"
#include "softmax.h"

namespace hkv {
namespace {

constexpr int64_t kRows = 256;  // one after the other on one thread
constexpr int64_t kColumns = 256;

void check(int32_t num_parts, const hkv_part *parts, int64_t rows, int32_t dim, const void *out,
           const float *lse) {
  require(num_parts >= 1 && rows >= 0, "there must be at least one part, and no negative sizes");
  require(dim >= 1 && dim <= HKV_MAX_DIM, "dim must be 1..4096");
  require(parts != nullptr, "parts must not be NULL");
  if (rows == 0) return;
  require(out != nullptr && lse != nullptr, "arrays must not be NULL");
  for (int32_t part = 0; part < num_parts; ++part)
    require(parts[part].out != nullptr && parts[part].lse != nullptr, "parts must not be NULL");
}

/// sums [count] += weight * the part's columns from `first` on.
void add_part(const hkv_part &part, int64_t first, int64_t count, float weight, float *sums) {
  with_dtype(part.dtype, [&](auto *element) {
    float values[kColumns];
    convert(static_cast<decltype(element)>(part.out) + first, count, values);
    for (int64_t i = 0; i < count; ++i) sums[i] += weight * values[i];
  });
}

}  // namespace

void merge_row(int32_t num_parts, const hkv_part *parts, int64_t row, int32_t dim, int32_t dtype,
               void *out, float *lse) {
  float largest = kNoLogit;
  for (int32_t part = 0; part < num_parts; ++part)
    largest = std::max(largest, parts[part].lse[row]);
  // Where every part is empty, any other number than -inf makes all weights 0 instead of NaN.
  const float base = largest == kNoLogit ? 0.0f : largest;
  float total = 0.0f;
  for (int32_t part = 0; part < num_parts; ++part) total += std::exp(parts[part].lse[row] - base);
  const float scale = total == 0.0f ? 0.0f : 1.0f / total;
  for (int64_t first = 0; first < dim; first += kColumns) {
    const int64_t count = std::min<int64_t>(kColumns, dim - first), at = row * dim + first;
    float sums[kColumns] = {};
    for (int32_t part = 0; part < num_parts; ++part) {
      const float weight = std::exp(parts[part].lse[row] - base) * scale;
      if (weight != 0.0f) add_part(parts[part], at, count, weight, sums);
    }
    with_dtype(dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      Element *to = static_cast<Element *>(out) + at;
      for (int64_t i = 0; i < count; ++i) round_to(sums[i], to[i]);
    });
  }
  lse[row] = total == 0.0f ? kNoLogit : base + std::log(total);
}

}  // namespace hkv

extern "C" int hkv_merge(hkv_pool *pool, int32_t num_parts, const hkv_part *parts, int64_t rows,
                         int32_t dim, int32_t dtype, void *out, float *lse) {
  return hkv::guarded([&] {
    hkv::check(num_parts, parts, rows, dim, out, lse);
    const int64_t items = (rows + hkv::kRows - 1) / hkv::kRows;
    hkv::parallel_for(items > 1 ? pool : nullptr, items, [&](int64_t item, int) {
      const int64_t last = std::min(rows, (item + 1) * hkv::kRows);
      for (int64_t row = item * hkv::kRows; row < last; ++row)
        hkv::merge_row(num_parts, parts, row, dim, dtype, out, lse);
    });
  });
}
