// Partial attention of a few queries over as many rows as their KV head has.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attend_checks.h"
#include "few_queries.h"

namespace hkv {
namespace {

struct Job {
  int32_t heads;
  const hkv_ragged &rows;
  const void *queries;
  int32_t query_dtype;
  int64_t num_queries;
  float scale, softcap;

  int64_t slices() const { return (num_queries + kSlice - 1) / kSlice; }
  int64_t pieces() const { return pieces_of(*std::max_element(rows.lengths, rows.lengths + heads)); }

  /// out [heads, num_queries, dim of values], lse [heads, num_queries]: a slice's over one piece,
  /// which may be empty where other heads have more rows.
  void attend(int64_t slice, int64_t piece, float *out, float *lse) const {
    with_dtype(rows.keys.dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      thread_local Few<Element> few;
      attend(few, slice, piece, out, lse);
    });
  }

 private:
  template <typename Element>
  void attend(Few<Element> &few, int64_t slice, int64_t piece, float *out, float *lse) const {
    const int64_t head = slice / slices(), first_query = slice % slices() * kSlice;
    const int64_t count = std::min<int64_t>(kSlice, num_queries - first_query);
    const int64_t row = head * num_queries + first_query, dim = rows.keys.dim;
    const int64_t start = rows.starts[head], length = rows.lengths[head];
    Entries from{rows.keys, rows.values};
    from.keys.count = from.values.count = length;
    if (length > 0) {
      from.keys.data = static_cast<const Element *>(rows.keys.data) + start * rows.keys.stride;
      from.values.data = static_cast<const Element *>(rows.values.data) + start * rows.values.stride;
    }
    few.begin(from, floats_of(queries, query_dtype, row * dim, count * dim), count);
    const int64_t last = std::min(length, (piece + 1) * kPiece);
    for (int64_t at = piece * kPiece; at < last; at += kChunk)
      few.add(at, std::min(kChunk, last - at), nullptr, nullptr,
              rows.bias == nullptr ? nullptr : rows.bias + start + at, scale, softcap);
    for (int64_t query = 0; query < count; ++query)
      few.end(query, out + (row + query) * rows.values.dim, lse + row + query);
  }
};

void check(int32_t heads, const hkv_ragged *rows) {
  if (heads == 0) return;
  require(rows->starts != nullptr && rows->lengths != nullptr, "starts and lengths must not be NULL");
  for (int32_t head = 0; head < heads; ++head) {
    const int64_t start = rows->starts[head], length = rows->lengths[head];
    require(start >= 0 && length >= 0 && length <= rows->keys.count &&
                start <= rows->keys.count - length,
            "a head's rows must lie inside the array");
  }
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_attend_ragged(hkv_pool *pool, int32_t heads, const hkv_ragged *rows,
                                 const void *queries, int32_t query_dtype, int64_t num_queries,
                                 float scale, float softcap, float *out, float *lse) {
  return hkv::guarded([&] {
    hkv::require(heads <= 0 || rows != nullptr, "rows must not be NULL");
    hkv_kv kv{};
    if (rows != nullptr) kv.keys = rows->keys, kv.values = rows->values;
    hkv::check_attention(1, heads, &kv, queries, query_dtype, num_queries, softcap, out, lse);
    hkv::check(heads, rows);
    if (heads == 0 || num_queries == 0) return;
    const hkv::Job job{heads, *rows, queries, query_dtype, num_queries, scale, softcap};
    hkv::attend_in_pieces(pool, heads * job.slices(), job.pieces(), heads * num_queries,
                          rows->values.dim, out, lse,
                          [&](int64_t slice, int64_t piece, float *to, float *its_lse) {
                            job.attend(slice, piece, to, its_lse);
                          });
  });
}
