// Partial attention over retrieved ids: scores, softmax and the weighted sum in one pass per query,
// without a gathered copy of keys and values.
#include "hybrid_kv_attend.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attend_checks.h"
#include "convert.h"
#include "error.h"
#include "pool.h"
#include "row_scores.h"
#include "softmax.h"

namespace hkv {
namespace {

struct Scratch {
  std::vector<float> query, logits, sums, biases;
  std::vector<uint32_t> ids;
};

Scratch &scratch() {
  thread_local Scratch own;
  return own;
}

struct Attend {
  const hkv_kv *kv;
  const void *queries;
  int32_t query_dtype;
  int64_t num_queries;
  const int64_t *ids;
  int64_t num_ids;
  const float *bias;
  float scale, softcap;
  float *out, *lse;

  void item(int64_t row) const;

 private:
  template <typename Element>
  void attend(const Entries &from, int64_t row) const;
  int64_t take_ids(const Entries &from, int64_t row) const;
};

/// The ids that are there, in order, with their biases if there are any.
int64_t Attend::take_ids(const Entries &from, int64_t row) const {
  Scratch &own = scratch();
  grow(own.ids, num_ids);
  if (bias != nullptr) grow(own.biases, num_ids);
  int64_t count = 0;
  for (int64_t i = 0; i < num_ids; ++i) {
    const int64_t id = ids[row * num_ids + i];
    require(id < from.keys.count, "an id is not below the number of keys");
    own.ids[count] = static_cast<uint32_t>(id);
    bool there = id >= 0;
    if (bias != nullptr) {
      own.biases[count] = bias[row * num_ids + i];
      there = there && own.biases[count] != kNoLogit;
    }
    count += there;
  }
  return count;
}

/// sums [Vectors] += weights of rows, from one vector of each row on; asks for later rows meanwhile.
template <typename Element, int Vectors>
void add_columns(const Element *const *rows, const Element *const *later, const float *weights,
                 int64_t count, int start, float *to) {
  Floats sums[Vectors];
  for (int i = 0; i < Vectors; ++i) sums[i] = load_floats(to + i * kLanes);
  for (int64_t row = 0; row < count; ++row)
    for (int i = 0; i < Vectors; ++i) {
      __builtin_prefetch(later[row] + start + i * kLanes);
      sums[i] += load_floats(rows[row] + start + i * kLanes) * weights[row];
    }
  for (int i = 0; i < Vectors; ++i) store_floats(to + i * kLanes, sums[i]);
}

/// sums [padded] += weights of rows; a row's last vector may overlap the one before.
template <typename Element>
void add_rows(const Element *const *rows, const Element *const *later, const float *weights,
              int64_t count, const RowVectors &vectors, float *sums) {
  if (vectors.dim < kLanes) {
    Floats sum = load_floats(sums);
    for (int64_t row = 0; row < count; ++row)
      sum += read_vector(rows[row], vectors, 0) * weights[row];
    store_floats(sums, sum);
    return;
  }
  int vector = 0;  // only the last one may start elsewhere
  for (; vector + 8 <= vectors.dim / kLanes; vector += 8)
    add_columns<Element, 8>(rows, later, weights, count, vectors.start(vector),
                            sums + vector * kLanes);
  for (; vector < vectors.count; ++vector)
    add_columns<Element, 1>(rows, later, weights, count, vectors.start(vector),
                            sums + vector * kLanes);
}

template <typename Element>
void add_values(const hkv_keys &values, const uint32_t *ids, const float *weights, int64_t count,
                float *sums) {
  constexpr int64_t kRows = 8;  // that are still in the first cache when their columns are added
  const RowVectors vectors(values.dim);
  const Element *base = static_cast<const Element *>(values.data);
  const int64_t ahead = rows_ahead<Element>(values.dim);
  for (int64_t at = 0; at < count; at += kRows) {
    const int64_t num_rows = std::min(kRows, count - at);
    const Element *rows[kRows], *later[kRows];
    for (int64_t i = 0; i < num_rows; ++i) {
      rows[i] = base + int64_t{ids[at + i]} * values.stride;
      later[i] = base + int64_t{ids[std::min(at + ahead + i, count - 1)]} * values.stride;
    }
    add_rows(rows, later, weights + at, num_rows, vectors, sums);
  }
}

template <typename Element>
void Attend::attend(const Entries &from, int64_t row) const {
  Scratch &own = scratch();
  const RowVectors key_vectors(from.keys.dim), value_vectors(from.values.dim);
  float *to = out + row * from.values.dim;
  const int64_t count = take_ids(from, row);
  std::fill_n(to, from.values.dim, 0.0f);
  lse[row] = kNoLogit;
  if (count == 0) return;
  grow(own.query, key_vectors.padded());
  grow(own.sums, value_vectors.padded());
  grow(own.logits, count + kLanes);
  key_vectors.pad(floats_of(queries, query_dtype, row * from.keys.dim, from.keys.dim),
                  own.query.data());
  score_listed<Element>(from.keys, own.query.data(), own.ids.data(), count, own.logits.data());
  const Element *values = static_cast<const Element *>(from.values.data);
  const int64_t first = std::min(rows_ahead<Element>(from.values.dim), count);
  for (int64_t i = 0; i < first; ++i)  // arrive during the softmax
    prefetch_row(values + int64_t{own.ids[i]} * from.values.stride, from.values.dim);
  to_logits(own.logits.data(), count, scale, softcap);
  if (bias != nullptr)
    for (int64_t i = 0; i < count; ++i) own.logits[i] += own.biases[i];
  const float largest = largest_of(own.logits.data(), count);
  const float total = to_weights(own.logits.data(), count, largest);
  std::fill_n(own.sums.data(), value_vectors.padded(), 0.0f);
  add_values<Element>(from.values, own.ids.data(), own.logits.data(), count, own.sums.data());
  value_vectors.unpad(own.sums.data(), to);
  for (int d = 0; d < from.values.dim; ++d) to[d] /= total;
  lse[row] = largest + std::log(total);
}

void Attend::item(int64_t row) const {
  const Entries from = entries_of(*kv, 0, row / num_queries);
  with_dtype(from.keys.dtype, [&](auto *element) {
    attend<std::remove_const_t<std::remove_pointer_t<decltype(element)>>>(from, row);
  });
}

void check(int32_t heads, const Attend &job) {
  require(job.num_ids >= 0, "sizes must be at least 0");
  check_attention(1, heads, job.kv, job.queries, job.query_dtype, job.num_queries, job.softcap,
                  job.out, job.lse);
  const bool empty = heads == 0 || job.num_queries == 0 || job.num_ids == 0;
  require(empty || job.ids != nullptr, "ids must not be NULL");
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_attend(hkv_pool *pool, int32_t heads, const hkv_kv *kv, const void *queries,
                          int32_t query_dtype, int64_t num_queries, const int64_t *ids,
                          int64_t num_ids, const float *bias, float scale, float softcap,
                          float *out, float *lse) {
  return hkv::guarded([&] {
    const hkv::Attend job{kv,   queries, query_dtype, num_queries, ids, num_ids,
                          bias, scale,   softcap,     out,         lse};
    hkv::check(heads, job);
    hkv::parallel_for(pool, heads * num_queries, [&job](int64_t row, int) { job.item(row); });
  });
}
