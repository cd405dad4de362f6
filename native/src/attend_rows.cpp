// Partial attention of a few queries over every row of a KV head.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "attend_checks.h"
#include "few_queries.h"

namespace hkv {
namespace {

/// The work of one call, in pieces of rows for slices of the queries of each KV head.
struct Job {
  int32_t batch, heads;
  const hkv_kv &kv;
  const void *queries;
  int32_t query_dtype;
  int64_t num_queries;
  const hkv_visible *visible;
  float scale, softcap;

  int64_t slices() const { return (num_queries + kSlice - 1) / kSlice; }
  int64_t pieces() const { return pieces_of(kv.keys.count); }
  int64_t rows() const { return int64_t{batch} * heads * num_queries; }

  /// out [rows(), dim of values] and lse [rows()]: a slice's part over one piece.
  void attend(int64_t slice, int64_t piece, float *out, float *lse) const {
    with_dtype(kv.keys.dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      thread_local Few<Element> few;
      attend(few, slice, piece, out, lse);
    });
  }

 private:
  template <typename Element>
  void attend(Few<Element> &few, int64_t slice, int64_t piece, float *out, float *lse) const {
    const int64_t place = slice / slices(), batch_row = place / heads;
    const int64_t first_query = slice % slices() * kSlice;
    const int64_t count = std::min<int64_t>(kSlice, num_queries - first_query);
    const int64_t row = place * num_queries + first_query;
    const Entries from = entries_of(kv, batch_row, place % heads);
    const int64_t dim = kv.keys.dim;
    few.begin(from, floats_of(queries, query_dtype, row * dim, count * dim), count);
    const int64_t *positions = nullptr;
    int64_t newest[kSlice];
    if (visible != nullptr) {
      positions = visible->positions + batch_row * visible->row_step;
      const int64_t tokens = visible->new_tokens;
      for (int64_t query = 0; query < count; ++query)
        newest[query] = visible->newest[batch_row] - (tokens - 1 - (first_query + query) % tokens);
    }
    const int64_t last = std::min(kv.keys.count, (piece + 1) * kPiece);
    for (int64_t at = piece * kPiece; at < last; at += kChunk)
      few.add(at, std::min(kChunk, last - at), positions == nullptr ? nullptr : positions + at,
              newest, nullptr, scale, softcap);
    for (int64_t query = 0; query < count; ++query)
      few.end(query, out + (row + query) * kv.values.dim, lse + row + query);
  }
};

void check(const hkv_visible &visible, bool empty) {
  require(visible.new_tokens >= 1 && visible.new_tokens <= std::numeric_limits<int32_t>::max(),
          "the number of new tokens must be 1..2^31-1");
  require(empty || (visible.positions != nullptr && visible.newest != nullptr),
          "positions must not be NULL");
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_attend_rows(hkv_pool *pool, int32_t batch, int32_t heads, const hkv_kv *kv,
                               const void *queries, int32_t query_dtype, int64_t num_queries,
                               const hkv_visible *visible, float scale, float softcap, float *out,
                               float *lse) {
  return hkv::guarded([&] {
    hkv::check_attention(batch, heads, kv, queries, query_dtype, num_queries, softcap, out, lse);
    const bool empty = batch == 0 || heads == 0 || num_queries == 0;
    if (visible != nullptr) hkv::check(*visible, empty || kv->keys.count == 0);
    if (empty) return;
    const hkv::Job job{batch,       heads,   *kv,   queries, query_dtype,
                       num_queries, visible, scale, softcap};
    hkv::attend_in_pieces(pool, int64_t{batch} * heads * job.slices(), job.pieces(), job.rows(),
                          kv->values.dim, out, lse,
                          [&](int64_t slice, int64_t piece, float *to, float *its_lse) {
                            job.attend(slice, piece, to, its_lse);
                          });
  });
}
