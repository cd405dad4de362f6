// Partial attention over as many rows as a KV head has.
#include <limits>

#include "arrays.h"
#include "hybrid_kv_attend.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

/// Each head's rows against the definition in double precision.
void check_case(int32_t dim, int32_t value_dim, int32_t dtype, int64_t num_queries,
                const std::vector<int64_t> &lengths, float softcap, bool biased) {
  const int64_t heads = static_cast<int64_t>(lengths.size());
  std::vector<int64_t> starts;
  int64_t count = 0;
  for (const int64_t length : lengths) {
    count += 2;  // room that belongs to nobody
    starts.push_back(count);
    count += length;
  }
  const Rows keys(random_floats(count * dim, 1), dim, dtype, 3);
  const Rows values(random_floats(count * value_dim, 2), value_dim, dtype, 1);
  const std::vector<float> queries = random_floats(heads * num_queries * dim, 3);
  std::vector<float> bias = random_floats(count, 4);
  for (size_t i = 0; i < bias.size(); i += 3) bias[i] = kNone;
  const hkv_ragged rows{keys.keys(), values.keys(), starts.data(), lengths.data(),
                        biased ? bias.data() : nullptr};
  std::vector<float> out(static_cast<size_t>(heads * num_queries * value_dim), 7.0f);
  std::vector<float> lse(static_cast<size_t>(heads * num_queries), 7.0f);
  ScopedPool pool(2);
  CHECK_OK(hkv_attend_ragged(pool.get(), static_cast<int32_t>(heads), &rows, queries.data(), HKV_F32,
                             num_queries, 0.5f, softcap, out.data(), lse.data()));
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t query = head * num_queries; query < (head + 1) * num_queries; ++query) {
      double total = 0;
      std::vector<double> sums(static_cast<size_t>(value_dim), 0.0);
      const int64_t start = starts[static_cast<size_t>(head)];
      for (int64_t row = start; row < start + lengths[static_cast<size_t>(head)]; ++row) {
        double logit = keys.dot(row, queries.data() + query * dim) * 0.5;
        if (softcap > 0)
          logit = static_cast<double>(softcap) * std::tanh(logit / static_cast<double>(softcap));
        if (biased) logit += static_cast<double>(bias[static_cast<size_t>(row)]);
        total += std::exp(logit);
        for (int32_t d = 0; d < value_dim; ++d)
          sums[static_cast<size_t>(d)] += std::exp(logit) * static_cast<double>(values.at(row, d));
      }
      for (int32_t d = 0; d < value_dim; ++d) {
        const double right = total == 0 ? 0.0 : sums[static_cast<size_t>(d)] / total;
        const float got = out[static_cast<size_t>(query * value_dim + d)];
        CHECK(std::fabs(static_cast<double>(got) - right) < 1e-4);
      }
      const float got = lse[static_cast<size_t>(query)];
      CHECK(total == 0 ? got == kNone
                       : std::fabs(static_cast<double>(got) - std::log(total)) < 1e-4);
    }
}

}  // namespace

CLAIM(every_head_attends_its_own_rows) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16})
      check_case(dim, dim, dtype, 5, {21, 0, 3}, 0.0f, dim % 2 == 0);
  for (const int64_t length : {0, 1, 15, 16, 17, 256, 257, 4096, 4097})
    check_case(20, 7, HKV_BF16, 3, {length, 5}, 2.0f, length % 2 == 1);
  for (const int64_t num_queries : {1, 2, 3, 4, 16, 17, 33})
    check_case(36, 72, HKV_F16, num_queries, {37, 1}, 0.0f, num_queries % 2 == 1);
}

CLAIM(attention_over_ragged_rows_refuses_what_does_not_fit) {
  const Rows keys(random_floats(5 * 9, 1), 9);
  const std::vector<float> query = random_floats(9, 2);
  std::vector<float> out(9);
  float lse = 0;
  int64_t start = 2, length = 3;
  hkv_ragged rows{keys.keys(), keys.keys(), &start, &length, nullptr};
  const auto call = [&](const hkv_ragged *of, int32_t heads, float softcap = 0.0f) {
    return hkv_attend_ragged(nullptr, heads, of, query.data(), HKV_F32, 1, 1.0f, softcap, out.data(),
                             &lse);
  };
  CHECK_OK(call(&rows, 1));
  CHECK_OK(call(nullptr, 0));
  CHECK_REFUSED(call(nullptr, 1), "rows must not be NULL");
  CHECK_REFUSED(call(&rows, -1), "sizes");
  CHECK_REFUSED(call(&rows, 1, -1.0f), "softcap");
  for (const auto &[bad_start, bad_length] :
       {std::pair<int64_t, int64_t>{3, 3}, {-1, 3}, {0, -1}, {0, 6}, {INT64_MAX, 1}, {1, INT64_MAX}}) {
    start = bad_start, length = bad_length;
    CHECK_REFUSED(call(&rows, 1), "must lie inside the array");
  }
  start = length = 0;
  CHECK_OK(call(&rows, 1));
  rows.starts = nullptr;
  CHECK_REFUSED(call(&rows, 1), "starts and lengths must not be NULL");
  rows.starts = &start;
  rows.values.count = 4;
  CHECK_REFUSED(call(&rows, 1), "as many values as keys");
}
