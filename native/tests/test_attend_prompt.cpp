// Attention of prompts, in tiles.
#include <limits>

#include "arrays.h"
#include "hybrid_kv_attend.h"

namespace {

struct Case {
  int32_t dim, value_dim, dtype;
  int64_t count, tokens, group, window;
  bool causal;
  float softcap;
  bool weighed;
};

std::vector<float> floats_of(const Rows &rows) {
  std::vector<float> all;
  for (int64_t row = 0; row < rows.count(); ++row)
    for (int32_t d = 0; d < rows.dim(); ++d) all.push_back(rows.at(row, d));
  return all;
}

/// Whether the definition, in double precision, gives each query's out and lse. In pairs of bfloat16
/// weights are rounded, and so are queries here and what comes out.
void check_case(const Case &c, hkv_pool *pool, int32_t arithmetic) {
  const bool pairs = arithmetic != HKV_FLOATS;
  const Rows keys(random_floats(c.count * c.dim, 1), c.dim, c.dtype, 3);
  const Rows values(random_floats(c.count * c.value_dim, 2), c.value_dim, c.dtype, 1);
  const int32_t dtype = pairs ? HKV_BF16 : HKV_F32;
  const Rows queries(random_floats(c.group * c.tokens * c.dim, 3), c.dim, dtype, 5);
  const hkv_kv kv = kv_of(keys, values);
  const int64_t stride = queries.keys().stride;
  const hkv_prompt asked{queries.keys().data, {0, c.tokens * stride, stride}, c.tokens, c.group,
                         c.window, dtype, c.causal, nullptr, 0, nullptr, arithmetic};
  std::vector<uint16_t> narrow(static_cast<size_t>(c.group * c.tokens * c.value_dim), 0xffff);
  std::vector<float> out(static_cast<size_t>(c.group * c.tokens * c.value_dim), -7.0f);
  std::vector<float> lse(static_cast<size_t>(c.group * c.tokens), -7.0f);
  std::vector<float> masses(static_cast<size_t>(c.group * c.count), -7.0f);
  std::vector<double> right_masses(masses.size(), 0.0);
  CHECK_OK(hkv_attend_prompt(pool, 1, 1, &kv, &asked, 0.5f, c.softcap,
                             pairs ? static_cast<void *>(narrow.data()) : out.data(), lse.data(),
                             c.weighed ? masses.data() : nullptr, nullptr));
  for (size_t i = 0; pairs && i < out.size(); ++i) {
    const uint32_t bits = static_cast<uint32_t>(narrow[i]) << 16;
    std::memcpy(&out[i], &bits, sizeof bits);
  }
  const double close = pairs ? 1e-2 : 1e-5, masses_close = pairs ? 4e-3 : 1e-4;
  const std::vector<float> all = floats_of(queries);
  for (int64_t query = 0; query < c.group * c.tokens; ++query) {
    int64_t first = 0, last = c.count;
    if (c.causal) last = c.count - c.tokens + query % c.tokens + 1;
    if (c.window > 0 && last > c.window) first = last - c.window;
    double total = 0;
    std::vector<double> weights, sums(static_cast<size_t>(c.value_dim), 0.0);
    for (int64_t key = first; key < last; ++key) {
      double logit = keys.dot(key, all.data() + query * c.dim) * 0.5;
      const double cap = static_cast<double>(c.softcap);
      if (cap > 0) logit = cap * std::tanh(logit / cap);
      weights.push_back(std::exp(logit));
      total += std::exp(logit);
      for (int32_t d = 0; d < c.value_dim; ++d)
        sums[static_cast<size_t>(d)] += std::exp(logit) * static_cast<double>(values.at(key, d));
    }
    for (int64_t key = first; key < last; ++key)
      right_masses[static_cast<size_t>(query / c.tokens * c.count + key)] +=
          weights[static_cast<size_t>(key - first)] / total;
    const float *own = out.data() + query * c.value_dim;
    for (int32_t d = 0; d < c.value_dim; ++d) {
      const double right = total == 0 ? 0.0 : sums[static_cast<size_t>(d)] / total;
      CHECK(std::fabs(static_cast<double>(own[d]) - right) < close);
    }
    const float its_lse = lse[static_cast<size_t>(query)];
    CHECK(total == 0 ? its_lse == -std::numeric_limits<float>::infinity()
                     : std::fabs(static_cast<double>(its_lse) - std::log(total)) < 1e-5);
  }
  for (size_t i = 0; c.weighed && i < masses.size(); ++i)
    CHECK(std::fabs(static_cast<double>(masses[i]) - right_masses[i]) <
          masses_close * (1 + right_masses[i]));
}

void check_case(const Case &c, hkv_pool *pool = nullptr) {
  for (const int32_t arithmetic : {HKV_FLOATS, HKV_PAIRS, HKV_AMX})
    if (arithmetic == HKV_FLOATS || (c.dtype == HKV_BF16 && hkv_has_arithmetic(arithmetic) != 0))
      check_case(c, pool, arithmetic);
}

}  // namespace

CLAIM(attention_of_a_prompt_is_that_of_the_definition) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16})
      check_case({dim, dim, dtype, 21, 9, 2, 0, true, 0.0f, true});
  for (const int64_t tokens : {1, 2, 15, 16, 17, 63, 64, 65, 130})
    for (const int64_t window : {0, 1, 7, 70}) {
      check_case({20, 7, HKV_BF16, 130, tokens, 3, window, true, 2.0f, window != 1});
      check_case({20, 70, HKV_F32, tokens, tokens, 1, window, true, 0.0f, window != 7});
    }
  for (const int64_t count : {0, 1, 255, 256, 257, 600})
    check_case({36, 36, HKV_F16, count, 5, 5, 0, false, 0.0f, true});
  for (const int32_t dtype : {HKV_F32, HKV_BF16})
    check_case({8, 8, dtype, 300, 300, 7, 33, true, 0.0f, true});  // several tiles and blocks
  check_case({8, 8, HKV_F32, 4, 0, 7, 0, true, 0.0f, true});
  check_case({8, 8, HKV_F32, 4, 3, 500, 0, true, 0.0f, true});  // a token's queries exceed a block
}

CLAIM(threads_share_a_prompt) {
  ScopedPool pool(3);
  for (const int32_t dtype : {HKV_F32, HKV_BF16})
    check_case({16, 16, dtype, 500, 450, 3, 0, true, 0.0f, true}, pool.get());
}

CLAIM(what_is_hidden_is_not_read) {
  // Keys that are not finite give no score to those who do not see them.
  std::vector<float> numbers = random_floats(40 * 8, 1);
  for (int64_t d = 0; d < 8; ++d) numbers[static_cast<size_t>(39 * 8 + d)] = std::nanf("");
  const Rows keys(numbers, 8), values(random_floats(40 * 8, 2), 8);
  const hkv_kv kv = kv_of(keys, values);
  const std::vector<float> queries = random_floats(40 * 8, 3);
  const hkv_prompt asked{queries.data(), {0, 40 * 8, 8}, 40, 1, 0, HKV_F32, 1};
  std::vector<float> out(40 * 8), lse(40);
  CHECK_OK(hkv_attend_prompt(nullptr, 1, 1, &kv, &asked, 1.0f, 0.0f, out.data(), lse.data(),
                             nullptr, nullptr));
  for (size_t token = 0; token < 39; ++token) CHECK(std::isfinite(lse[token]));
  CHECK(std::isnan(lse[39]) && std::isnan(out[39 * 8]));
}

CLAIM(pairs_are_of_bfloat16_where_the_cpu_has_them) {
  const Rows floats(random_floats(9 * 8, 1), 8), narrow(random_floats(9 * 8, 1), 8, HKV_BF16);
  std::vector<float> out(9 * 8), lse(9);
  for (int number = 0; number < 8; ++number) {
    const Rows *keys = number % 2 == 0 ? &floats : &narrow;
    const Rows *queries = number / 2 % 2 == 0 ? &floats : &narrow;
    const int32_t arithmetic = number < 4 ? HKV_PAIRS : HKV_AMX;
    const hkv_kv kv = kv_of(*keys, *keys);
    const hkv_keys asks = queries->keys();
    const hkv_prompt asked{asks.data, {0, 9 * 8, 8}, 9, 1, 0, asks.dtype, 1, nullptr, 0, nullptr, arithmetic};
    const int status = hkv_attend_prompt(nullptr, 1, 1, &kv, &asked, 1.0f, 0.0f, out.data(),
                                         lse.data(), nullptr, nullptr);
    const bool fits = keys == &narrow && queries == &narrow && hkv_has_arithmetic(arithmetic) != 0;
    CHECK((status == HKV_OK) == fits);
  }
}

CLAIM(prompts_that_are_not_finite_do_not_crash) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float strange : {infinity, -infinity, std::nanf(""), 3e38f}) {
    std::vector<float> numbers = random_floats(70 * 12, 1);
    numbers[40] = strange;
    const Rows keys(numbers, 12);
    const hkv_kv kv = kv_of(keys, keys);
    const hkv_prompt asked{numbers.data(), {0, 70 * 12, 12}, 70, 1, 0, HKV_F32, 1};
    std::vector<float> out(70 * 12), lse(70);
    for (const float softcap : {0.0f, 2.0f})
      CHECK_OK(hkv_attend_prompt(nullptr, 1, 1, &kv, &asked, strange, softcap, out.data(),
                                 lse.data(), nullptr, nullptr));
  }
}

CLAIM(blocks_that_are_not_listed_are_not_read) {
  constexpr int64_t kCount = 517, kTokens = 300, kGroup = 3, kSize = 70, kDim = 20;
  constexpr int64_t kBlocks = (kTokens + kSize - 1) / kSize, kAll = kCount / HKV_KEY_BLOCK;
  std::vector<uint8_t> listed(kBlocks * kAll);  // exactly as many as the interface says
  Random random(7);
  for (uint8_t &one : listed) one = random.below(2) == 0;
  for (int64_t block = 0; block < kBlocks; ++block) listed[static_cast<size_t>(block * kAll + 2)] = 0;
  std::vector<float> numbers = random_floats(kCount * kDim, 1);
  const int64_t first_past = (kCount - kTokens) / HKV_KEY_BLOCK;  // before every token
  CHECK(first_past == 3);
  for (int64_t i = 2 * HKV_KEY_BLOCK * kDim; i < 3 * HKV_KEY_BLOCK * kDim; ++i)
    numbers[static_cast<size_t>(i)] = std::nanf("");
  const Rows keys(numbers, kDim), values(random_floats(kCount * kDim, 2), kDim);
  const hkv_kv kv = kv_of(keys, values);
  const std::vector<float> queries = random_floats(kGroup * kTokens * kDim, 3);
  const hkv_prompt asked{queries.data(), {0, kTokens * kDim, kDim}, kTokens, kGroup, 0, HKV_F32, 1,
                         listed.data(), kSize, nullptr, 0};
  std::vector<float> out(kGroup * kTokens * kDim), lse(kGroup * kTokens);
  for (const bool shared : {false, true}) {
    ScopedPool pool(3);
    CHECK_OK(hkv_attend_prompt(shared ? pool.get() : nullptr, 1, 1, &kv, &asked, 0.5f, 0.0f,
                               out.data(), lse.data(), nullptr, nullptr));
    for (int64_t query = 0; query < kGroup * kTokens; ++query) {
      const int64_t token = query % kTokens, block = token / kSize;
      const int64_t past = (kCount - kTokens + block * kSize) / HKV_KEY_BLOCK;
      double total = 0, sum = 0;
      for (int64_t key = 0; key <= kCount - kTokens + token; ++key) {
        const int64_t own = key / HKV_KEY_BLOCK;
        if (own < past && listed[static_cast<size_t>(block * kAll + own)] == 0) continue;
        const double weight = std::exp(0.5 * keys.dot(key, queries.data() + query * kDim));
        total += weight, sum += weight * static_cast<double>(values.at(key, 5));
      }
      const double got = static_cast<double>(out[static_cast<size_t>(query * kDim + 5)]);
      CHECK(std::fabs(got - sum / total) < 1e-5);
      const double its_lse = static_cast<double>(lse[static_cast<size_t>(query)]);
      CHECK(std::fabs(its_lse - std::log(total)) < 1e-5);
    }
  }
}

CLAIM(tokens_of_a_prompt_may_have_places) {
  constexpr int64_t kCount = 700, kGroup = 2, kDim = 12, kAll = kCount / HKV_KEY_BLOCK;
  std::vector<int64_t> positions;
  for (int64_t at = 0; at < kCount; at += 13) positions.push_back(at);
  positions.push_back(kCount - 1);
  const auto tokens = static_cast<int64_t>(positions.size());
  std::vector<float> numbers = random_floats(kCount * kDim, 1);
  for (int64_t i = 400 * kDim; i < 401 * kDim; ++i) numbers[static_cast<size_t>(i)] *= 40.0f;
  const Rows keys(numbers, kDim), values(random_floats(kCount * kDim, 2), kDim);
  const hkv_kv kv = kv_of(keys, values);
  const std::vector<float> queries = random_floats(kGroup * tokens * kDim, 3);
  const hkv_prompt asked{queries.data(), {0, tokens * kDim, kDim}, tokens, kGroup, 0, HKV_F32, 1,
                         nullptr, 0, positions.data()};
  const auto rows = static_cast<size_t>(kGroup * tokens);
  std::vector<float> out(rows * kDim), lse(rows), only(rows), masses(rows * kAll, -7.0f);
  CHECK_OK(hkv_attend_prompt(nullptr, 1, 1, &kv, &asked, 0.5f, 0.0f, out.data(), lse.data(),
                             nullptr, nullptr));
  CHECK_OK(hkv_attend_prompt(nullptr, 1, 1, &kv, &asked, 0.5f, 0.0f, nullptr, only.data(), nullptr,
                             masses.data()));
  for (size_t query = 0; query < rows; ++query) {
    CHECK(lse[query] == only[query]);
    const int64_t last = positions[query % static_cast<size_t>(tokens)];
    double total = 0, sum = 0;
    std::vector<double> blocks(kAll + 1, 0.0);
    for (int64_t key = 0; key <= last; ++key) {
      const double weight = std::exp(0.5 * keys.dot(key, queries.data() + query * kDim));
      total += weight, sum += weight * static_cast<double>(values.at(key, 5));
      blocks[static_cast<size_t>(key / HKV_KEY_BLOCK)] += weight;
    }
    CHECK(std::fabs(static_cast<double>(out[query * kDim + 5]) - sum / total) < 1e-5);
    for (size_t block = 0; block < kAll; ++block) {
      const double got = static_cast<double>(masses[query * kAll + block]);
      CHECK(std::fabs(got - blocks[block] / total) < 1e-5);
    }
  }
}

CLAIM(blocks_and_places_that_do_not_fit_are_refused) {
  const Rows keys(random_floats(130 * 9, 1), 9);
  const hkv_kv kv = kv_of(keys, keys);
  const std::vector<float> queries = random_floats(5 * 9, 2);
  const std::vector<uint8_t> listed(2, 1);
  const std::vector<int64_t> places{0, 1, 2, 3, 129}, mixed{0, 2, 1, 3, 4}, far{0, 1, 2, 3, 130},
      below{-1, 1, 2, 3, 4};
  std::vector<float> out(5 * 9), lse(5), masses(130), block_masses(10);
  hkv_prompt asked{queries.data(), {0, 45, 9}, 5, 1, 0, HKV_F32, 1, nullptr, 0, nullptr};
  const auto call = [&](float *all = nullptr, float *by_block = nullptr, bool needs_out = true) {
    return hkv_attend_prompt(nullptr, 1, 1, &kv, &asked, 1.0f, 0.0f,
                             needs_out ? out.data() : nullptr, lse.data(), all, by_block);
  };
  CHECK_REFUSED(call(nullptr, nullptr, false), "arrays must not be NULL");
  CHECK_OK(call(nullptr, block_masses.data(), false));
  for (const auto *wrong : {&mixed, &far, &below}) {
    asked.positions = wrong->data();
    CHECK_REFUSED(call(), "positions must be ascending rows of the keys");
  }
  asked.positions = places.data();
  CHECK_OK(call());
  CHECK_REFUSED(call(masses.data()), "masses are of all tokens, got positions of some");
  asked.window = 2;
  CHECK_REFUSED(call(), "positions are of causal attention to all rows, no window");
  asked.positions = nullptr;
  CHECK_REFUSED(call(nullptr, block_masses.data()), "block_masses are of attention to all rows");
  asked.listed = listed.data();
  CHECK_REFUSED(call(), "blocks of keys are of causal attention, no window");
  asked.window = 0;
  CHECK_REFUSED(call(), "block must be at least 1");
  asked.block = 5;
  CHECK_OK(call());
  CHECK_REFUSED(call(masses.data()), "masses are of attention to all rows, got blocks of keys");
  CHECK_REFUSED(call(nullptr, block_masses.data()), "block_masses are of attention to all rows");
}

CLAIM(attention_of_a_prompt_refuses_what_does_not_fit) {
  const Rows keys(random_floats(5 * 9, 1), 9);
  const hkv_kv good = kv_of(keys, keys);
  const std::vector<float> queries = random_floats(5 * 9, 2);
  std::vector<float> out(5 * 9), lse(5);
  const hkv_prompt right{queries.data(), {0, 45, 9}, 5, 1, 0, HKV_F32, 1};
  const auto call = [&](const hkv_kv *kv, const hkv_prompt *asked, float softcap = 0.0f,
                        int32_t heads = 1) {
    return hkv_attend_prompt(nullptr, 1, heads, kv, asked, 1.0f, softcap, out.data(), lse.data(),
                             nullptr, nullptr);
  };
  const auto changed = [&](auto change) {
    hkv_prompt asked = right;
    change(asked);
    return asked;
  };
  CHECK_OK(call(&good, &right));
  CHECK_REFUSED(call(&good, nullptr), "asked must not be NULL");
  CHECK_REFUSED(call(nullptr, &right), "kv must not be NULL");
  CHECK_REFUSED(call(&good, &right, -1.0f), "softcap must be at least 0");
  CHECK_REFUSED(call(&good, &right, 0.0f, -1), "sizes must be at least 0");
  const hkv_prompt long_one = changed([](hkv_prompt &p) { p.tokens = 6; });
  CHECK_REFUSED(call(&good, &long_one), "a key for each token");
  const hkv_prompt no_group = changed([](hkv_prompt &p) { p.group = 0; });
  CHECK_REFUSED(call(&good, &no_group), "group must be at least 1");
  const hkv_prompt backwards = changed([](hkv_prompt &p) { p.window = -1; });
  CHECK_REFUSED(call(&good, &backwards), "window must be at least 0");
  const hkv_prompt both = changed([](hkv_prompt &p) { p.window = 2, p.causal = 0; });
  CHECK_REFUSED(call(&good, &both), "a window needs causal attention");
  const hkv_prompt strange = changed([](hkv_prompt &p) { p.dtype = 7; });
  CHECK_REFUSED(call(&good, &strange), "dtype");
  const hkv_prompt empty = changed([](hkv_prompt &p) { p.queries = nullptr; });
  CHECK_REFUSED(call(&good, &empty), "arrays must not be NULL");
}
