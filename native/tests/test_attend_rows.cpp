// Partial attention over all rows, and the merge of parts.
#include <limits>

#include "arrays.h"
#include "hybrid_kv_attend.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Result {
  std::vector<float> out, lse;

  Result(int64_t rows, int32_t dim)
      : out(static_cast<size_t>(rows * dim)), lse(static_cast<size_t>(rows)) {}
};

/// The definition for one query, in double precision.
void expect(const Rows &keys, const Rows &values, const float *query, const int64_t *positions,
            int64_t newest, float softcap, const float *out, float lse) {
  double total = 0;
  std::vector<double> sums(static_cast<size_t>(values.dim()), 0.0);
  for (int64_t row = 0; row < keys.count(); ++row) {
    if (positions != nullptr && positions[row] > newest) continue;
    double logit = keys.dot(row, query) * 0.5;
    if (softcap > 0)
      logit = static_cast<double>(softcap) * std::tanh(logit / static_cast<double>(softcap));
    total += std::exp(logit);
    for (int32_t d = 0; d < values.dim(); ++d)
      sums[static_cast<size_t>(d)] += std::exp(logit) * static_cast<double>(values.at(row, d));
  }
  for (int32_t d = 0; d < values.dim(); ++d) {
    const double right = total == 0 ? 0.0 : sums[static_cast<size_t>(d)] / total;
    CHECK(std::fabs(static_cast<double>(out[d]) - right) < 1e-4);
  }
  CHECK(total == 0 ? lse == kNone : std::fabs(static_cast<double>(lse) - std::log(total)) < 1e-4);
}

void check_case(int32_t dim, int32_t value_dim, int32_t dtype, int64_t count, int64_t num_queries,
                float softcap, bool hide) {
  const Rows keys(random_floats(count * dim, 1), dim, dtype, 3);
  const Rows values(random_floats(count * value_dim, 2), value_dim, dtype, 1);
  const Rows queries(random_floats(num_queries * dim, 3), dim, dtype);
  const hkv_kv kv = kv_of(keys, values);
  std::vector<int64_t> positions;
  Random random(4);
  for (int64_t i = 0; i < count; ++i) positions.push_back(random.below(2 * count));
  const int64_t newest = count;
  const hkv_visible visible{positions.data(), count, &newest, 2};
  Result got(num_queries, value_dim);
  CHECK_OK(hkv_attend_rows(nullptr, 1, 1, &kv, queries.keys().data, dtype, num_queries,
                           hide ? &visible : nullptr, 0.5f, softcap, got.out.data(),
                           got.lse.data()));
  for (int64_t query = 0; query < num_queries; ++query) {
    std::vector<float> own;
    for (int32_t d = 0; d < dim; ++d) own.push_back(queries.at(query, d));
    expect(keys, values, own.data(), hide ? positions.data() : nullptr, newest - (1 - query % 2),
           softcap, got.out.data() + query * value_dim, got.lse[static_cast<size_t>(query)]);
  }
}

}  // namespace

CLAIM(attention_over_rows_is_that_of_the_definition) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16})
      check_case(dim, dim, dtype, 21, 5, 0.0f, false);
  for (const int64_t count : {0, 1, 3, 4, 15, 16, 17, 255, 256, 257, 4096, 4097})
    check_case(20, 7, HKV_BF16, count, 3, 2.0f, count % 2 == 1);
  for (const int64_t num_queries : {1, 2, 3, 4, 7, 16, 17, 33})
    check_case(36, 72, HKV_F16, 37, num_queries, 0.0f, num_queries % 2 == 1);
}

CLAIM(heads_and_batch_rows_lie_where_their_steps_say) {
  const int32_t dim = 12;
  const int64_t count = 9;
  const std::vector<float> all = random_floats(6 * count * dim, 1);
  const std::vector<float> queries = random_floats(6 * dim, 2);
  const auto of = [&](int64_t place) {
    return std::vector<float>(all.begin() + place * count * dim,
                              all.begin() + (place + 1) * count * dim);
  };
  const Rows rows(all, dim);
  hkv_kv kv = kv_of(rows, rows);
  kv.keys.count = kv.values.count = count;
  for (int64_t *step : {kv.key_step, kv.value_step}) {
    step[0] = count * dim;  // three heads, each with two batch rows
    step[1] = 2 * count * dim;
  }
  ScopedPool pool(2);
  Result got(6, dim);
  CHECK_OK(hkv_attend_rows(pool.get(), 2, 3, &kv, queries.data(), HKV_F32, 1, nullptr, 0.5f, 0.0f,
                           got.out.data(), got.lse.data()));
  for (int64_t place = 0; place < 6; ++place) {
    const Rows own(of(place % 3 * 2 + place / 3), dim);
    expect(own, own, queries.data() + place * dim, nullptr, 0, 0.0f, got.out.data() + place * dim,
           got.lse[static_cast<size_t>(place)]);
  }
}

CLAIM(rows_that_are_not_finite_do_not_crash) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float strange : {infinity, -infinity, std::nanf(""), 3e38f}) {
    std::vector<float> values = random_floats(7 * 36, 1);
    values[40] = strange;
    const Rows keys(values, 36);
    const hkv_kv kv = kv_of(keys, keys);
    const std::vector<float> query(36, strange);
    Result got(1, 36);
    CHECK_OK(hkv_attend_rows(nullptr, 1, 1, &kv, query.data(), HKV_F32, 1, nullptr, strange, 0.0f,
                             got.out.data(), got.lse.data()));
  }
}

CLAIM(attention_over_rows_refuses_what_does_not_fit) {
  const Rows keys(random_floats(5 * 9, 1), 9);
  const hkv_kv good = kv_of(keys, keys);
  const std::vector<float> query = random_floats(9, 2);
  const int64_t positions[5] = {}, newest = 0;
  Result got(1, 9);
  const auto call = [&](const hkv_kv *kv, int32_t batch, int64_t queries, float softcap,
                        int32_t dtype, const hkv_visible *visible) {
    return hkv_attend_rows(nullptr, batch, 1, kv, query.data(), dtype, queries, visible, 1.0f,
                           softcap, got.out.data(), got.lse.data());
  };
  CHECK_OK(call(&good, 1, 1, 0.0f, HKV_F32, nullptr));
  CHECK_OK(call(&good, 0, 1, 0.0f, HKV_F32, nullptr));
  CHECK_REFUSED(call(&good, -1, 1, 0.0f, HKV_F32, nullptr), "sizes");
  CHECK_REFUSED(call(&good, 1, INT64_MIN, 0.0f, HKV_F32, nullptr), "sizes");
  CHECK_REFUSED(call(nullptr, 1, 1, 0.0f, HKV_F32, nullptr), "kv must not be NULL");
  CHECK_REFUSED(call(&good, 1, 1, std::nanf(""), HKV_F32, nullptr), "softcap");
  CHECK_REFUSED(call(&good, 1, 1, 0.0f, 3, nullptr), "dtype");
  hkv_kv kv = good;
  kv.values.count = 4;
  CHECK_REFUSED(call(&kv, 1, 1, 0.0f, HKV_F32, nullptr), "as many values as keys");
  hkv_visible visible{positions, 5, &newest, 1};
  CHECK_OK(call(&good, 1, 1, 0.0f, HKV_F32, &visible));
  for (const int64_t tokens : {int64_t{0}, INT64_MAX}) {
    visible.new_tokens = tokens;
    CHECK_REFUSED(call(&good, 1, 1, 0.0f, HKV_F32, &visible), "new tokens");
  }
  visible = {nullptr, 5, &newest, 1};
  CHECK_REFUSED(call(&good, 1, 1, 0.0f, HKV_F32, &visible), "positions must not be NULL");
}

CLAIM(a_merge_is_attention_over_the_union) {
  const float outs[2][6] = {{1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}};
  const float lses[2][3] = {{0.0f, kNone, kNone}, {std::log(3.0f), 2.0f, kNone}};
  const hkv_part parts[] = {{outs[0], lses[0], HKV_F32}, {outs[1], lses[1], HKV_F32}};
  Result got(3, 2);
  CHECK_OK(hkv_merge(nullptr, 2, parts, 3, 2, HKV_F32, got.out.data(), got.lse.data()));
  const float right[] = {5.5f, 6.5f, 9.0f, 10.0f, 0.0f, 0.0f};
  for (size_t i = 0; i < 6; ++i) CHECK(std::fabs(got.out[i] - right[i]) < 1e-6f);
  CHECK(std::fabs(got.lse[0] - std::log(4.0f)) < 1e-6f);
  CHECK(got.lse[1] == 2.0f && got.lse[2] == kNone);
}

CLAIM(a_merge_may_write_into_a_part) {
  for (const int32_t dim : {3, 300}) {
    std::vector<float> first = random_floats(4 * dim, 1), second = random_floats(4 * dim, 2);
    std::vector<float> lse = random_floats(4, 3), other = random_floats(4, 4);
    const hkv_part parts[] = {{first.data(), lse.data(), HKV_F32},
                              {second.data(), other.data(), HKV_F32}};
    Result apart(4, dim);
    CHECK_OK(hkv_merge(nullptr, 2, parts, 4, dim, HKV_F32, apart.out.data(), apart.lse.data()));
    CHECK_OK(hkv_merge(nullptr, 2, parts, 4, dim, HKV_F32, first.data(), lse.data()));
    CHECK(first == apart.out && lse == apart.lse);
  }
}

CLAIM(a_merge_refuses_what_does_not_fit) {
  const std::vector<float> out = random_floats(9, 1);
  const float lse = 0;
  Result got(1, 9);
  const hkv_part good{out.data(), &lse, HKV_F32};
  const auto call = [&](const hkv_part *parts, int32_t num_parts, int64_t rows, int32_t dim,
                        int32_t dtype) {
    return hkv_merge(nullptr, num_parts, parts, rows, dim, dtype, got.out.data(), got.lse.data());
  };
  CHECK_OK(call(&good, 1, 1, 9, HKV_F32));
  CHECK_OK(call(&good, 1, 0, 9, HKV_F32));
  CHECK_REFUSED(call(&good, 0, 1, 9, HKV_F32), "at least one part");
  CHECK_REFUSED(call(&good, 1, -1, 9, HKV_F32), "no negative sizes");
  CHECK_REFUSED(call(&good, 1, 1, 0, HKV_F32), "dim must be 1..4096");
  CHECK_REFUSED(call(nullptr, 1, 1, 9, HKV_F32), "parts must not be NULL");
  CHECK_REFUSED(call(&good, 1, 1, 9, -1), "dtype");
  const hkv_part empty{nullptr, &lse, HKV_F32}, strange{out.data(), &lse, 7};
  CHECK_REFUSED(call(&empty, 1, 1, 9, HKV_F32), "parts must not be NULL");
  CHECK_REFUSED(call(&strange, 1, 1, 9, HKV_F32), "dtype");
}
