// Partial attention over retrieved ids.
#include <limits>

#include "arrays.h"
#include "hybrid_kv_attend.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Result {
  std::vector<float> out, lse;
};

/// The definition, in double precision.
Result expected(const Rows &keys, const Rows &values, const std::vector<float> &queries,
                const std::vector<int64_t> &ids, const std::vector<float> &bias,
                int64_t num_queries, float scale, float softcap) {
  Result result{std::vector<float>(static_cast<size_t>(num_queries * values.dim()), 0.0f),
                std::vector<float>(static_cast<size_t>(num_queries), kNone)};
  const int64_t num_ids = static_cast<int64_t>(ids.size()) / num_queries;
  for (int64_t query = 0; query < num_queries; ++query) {
    double total = 0;
    std::vector<double> sums(static_cast<size_t>(values.dim()), 0.0);
    for (int64_t i = 0; i < num_ids; ++i) {
      const int64_t id = ids[static_cast<size_t>(query * num_ids + i)];
      if (id < 0) continue;
      double logit = keys.dot(id, queries.data() + query * keys.dim()) * static_cast<double>(scale);
      if (softcap > 0)
        logit = static_cast<double>(softcap) * std::tanh(logit / static_cast<double>(softcap));
      if (!bias.empty()) logit += static_cast<double>(bias[static_cast<size_t>(query * num_ids + i)]);
      total += std::exp(logit);
      for (int32_t d = 0; d < values.dim(); ++d)
        sums[static_cast<size_t>(d)] += std::exp(logit) * static_cast<double>(values.at(id, d));
    }
    if (total == 0) continue;
    for (int32_t d = 0; d < values.dim(); ++d)
      result.out[static_cast<size_t>(query * values.dim() + d)] =
          static_cast<float>(sums[static_cast<size_t>(d)] / total);
    result.lse[static_cast<size_t>(query)] = static_cast<float>(std::log(total));
  }
  return result;
}

void check_case(int32_t dim, int32_t value_dim, int32_t dtype, int64_t num_ids, float softcap,
                bool biased = false) {
  const int64_t count = 37, num_queries = 3;
  const Rows keys(random_floats(count * dim, 1), dim, dtype, 3);
  const Rows values(random_floats(count * value_dim, 2), value_dim, dtype, 1);
  const std::vector<float> queries = random_floats(num_queries * dim, 3);
  std::vector<int64_t> ids;
  Random random(4);
  for (int64_t i = 0; i < num_queries * num_ids; ++i) ids.push_back(random.below(count + 2) - 2);
  std::vector<float> bias;
  if (biased) {
    bias = random_floats(num_queries * num_ids, 5);
    for (size_t i = 0; i < bias.size(); i += 3) bias[i] = kNone;
    std::fill_n(bias.begin(), num_ids, kNone);  // the first query has nothing
  }
  const Result right = expected(keys, values, queries, ids, bias, num_queries, 0.5f, softcap);
  const hkv_kv head = kv_of(keys, values);
  Result got{std::vector<float>(right.out.size()), std::vector<float>(right.lse.size())};
  CHECK_OK(hkv_attend(nullptr, 1, &head, queries.data(), HKV_F32, num_queries, ids.data(), num_ids,
                      biased ? bias.data() : nullptr, 0.5f, softcap, got.out.data(),
                      got.lse.data()));
  for (size_t i = 0; i < right.out.size(); ++i) CHECK(std::fabs(got.out[i] - right.out[i]) < 1e-4f);
  for (size_t i = 0; i < right.lse.size(); ++i)
    CHECK(got.lse[i] == right.lse[i] || std::fabs(got.lse[i] - right.lse[i]) < 1e-4f);
}

}  // namespace

CLAIM(attention_is_that_of_the_definition) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16}) check_case(dim, dim, dtype, 13, 0.0f);
  for (const int64_t num_ids : {1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 100})
    check_case(36, 7, HKV_BF16, num_ids, 2.0f);
}

CLAIM(a_bias_is_added_to_the_logits_and_hides) {
  for (const int64_t num_ids : {1, 3, 4, 16, 17, 100})
    for (const float softcap : {0.0f, 2.0f}) check_case(36, 7, HKV_F16, num_ids, softcap, true);
}

CLAIM(no_ids_give_nothing) {
  const Rows keys(random_floats(5 * 9, 1), 9);
  const hkv_kv head = kv_of(keys, keys);
  const std::vector<float> queries = random_floats(2 * 9, 2);
  const int64_t absent[] = {-1, INT64_MIN};
  for (const int64_t num_ids : {0, 1}) {
    std::vector<float> out(2 * 9, 1.0f), lse(2, 1.0f);
    CHECK_OK(hkv_attend(nullptr, 1, &head, queries.data(), HKV_F32, 2,
                        num_ids > 0 ? absent : nullptr, num_ids, nullptr, 1.0f, 0.0f, out.data(),
                        lse.data()));
    for (const float value : out) CHECK(value == 0.0f);
    for (const float value : lse) CHECK(value == kNone);
  }
}

CLAIM(logits_far_apart_neither_overflow_nor_vanish) {
  const Rows keys({1000.0f, -1000.0f, 999.0f}, 1), values({1.0f, 2.0f, 3.0f}, 1);
  const hkv_kv head = kv_of(keys, values);
  const float query = 3.0f;
  const int64_t ids[] = {1, 0, 2};
  float out = 0, lse = 0;
  CHECK_OK(
      hkv_attend(nullptr, 1, &head, &query, HKV_F32, 1, ids, 3, nullptr, 1.0f, 0.0f, &out, &lse));
  CHECK(std::fabs(lse - (3000.0f + std::log1p(std::exp(-3.0f)))) < 1e-2f);
  CHECK(std::fabs(out - (1.0f + 2.0f * std::exp(-3.0f) / (1.0f + std::exp(-3.0f)))) < 1e-4f);
}

CLAIM(weights_are_exponentials_over_their_whole_range) {
  const Rows values({0.0f, 1.0f}, 1);
  const float query = 1.0f;
  const int64_t ids[] = {0, 1};
  for (float logit = 0.0f; logit > -86.0f; logit -= 0.37f) {
    const Rows keys({0.0f, logit}, 1);
    const hkv_kv head = kv_of(keys, values);
    float out = 0, lse = 0;
    CHECK_OK(
        hkv_attend(nullptr, 1, &head, &query, HKV_F32, 1, ids, 2, nullptr, 1.0f, 0.0f, &out, &lse));
    const double weight = std::exp(static_cast<double>(logit));
    CHECK(std::fabs(static_cast<double>(out) - weight / (1 + weight)) <= 1e-6 * weight);
  }
}

CLAIM(what_is_not_finite_does_not_crash) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float strange : {infinity, -infinity, std::nanf(""), 3e38f}) {
    std::vector<float> values = random_floats(7 * 36, 1);
    values[40] = strange;
    const Rows keys(values, 36);
    const hkv_kv head = kv_of(keys, keys);
    const std::vector<float> query(36, strange);
    const int64_t ids[] = {0, 1, 2, 3, 4, 5, 6};
    std::vector<float> out(36), lse(1);
    CHECK_OK(hkv_attend(nullptr, 1, &head, query.data(), HKV_F32, 1, ids, 7, nullptr, strange, 0.0f,
                        out.data(), lse.data()));
  }
}

CLAIM(attention_refuses_what_does_not_fit) {
  const Rows keys(random_floats(5 * 9, 1), 9);
  const hkv_kv good = kv_of(keys, keys);
  const std::vector<float> query = random_floats(9, 2);
  std::vector<float> out(9);
  float lse = 0;
  const int64_t id = 0;
  const auto call = [&](const hkv_kv *head, int32_t heads, int64_t queries, int64_t num_ids,
                        float softcap) {
    return hkv_attend(nullptr, heads, head, query.data(), HKV_F32, queries, &id, num_ids, nullptr,
                      1.0f, softcap, out.data(), &lse);
  };
  CHECK_REFUSED(call(&good, -1, 1, 1, 0.0f), "sizes");
  CHECK_REFUSED(call(&good, 1, -1, 1, 0.0f), "sizes");
  CHECK_REFUSED(call(&good, 1, 1, -1, 0.0f), "sizes");
  CHECK_REFUSED(call(&good, 1, INT64_MIN, 1, 0.0f), "sizes");
  CHECK_REFUSED(call(nullptr, 1, 1, 1, 0.0f), "kv must not be NULL");
  CHECK_REFUSED(call(&good, 1, 1, 1, -1.0f), "softcap");
  CHECK_REFUSED(call(&good, 1, 1, 1, std::nanf("")), "softcap");
  CHECK_REFUSED(hkv_attend(nullptr, 1, &good, nullptr, HKV_F32, 1, &id, 1, nullptr, 1.0f, 0.0f,
                           out.data(), &lse),
                "NULL");
  CHECK_REFUSED(hkv_attend(nullptr, 1, &good, query.data(), HKV_F32, 1, nullptr, 1, nullptr, 1.0f,
                           0.0f, out.data(), &lse),
                "ids must not be NULL");
  hkv_kv head = good;
  head.values.count = 4;
  CHECK_REFUSED(call(&head, 1, 1, 1, 0.0f), "as many values as keys");
  head = good, head.values.dtype = HKV_F16;
  CHECK_REFUSED(call(&head, 1, 1, 1, 0.0f), "dtype of the keys");
  head = good, head.values.data = nullptr;
  CHECK_REFUSED(call(&head, 1, 1, 1, 0.0f), "NULL");
  for (const int64_t bad : {int64_t{5}, INT64_MAX})
    CHECK_REFUSED(hkv_attend(nullptr, 1, &good, query.data(), HKV_F32, 1, &bad, 1, nullptr, 1.0f,
                             0.0f, out.data(), &lse),
                  "an id is not below");
  CHECK_OK(call(nullptr, 0, 1, 1, 0.0f));
  CHECK_OK(call(&good, 1, 0, 1, 0.0f));
}
