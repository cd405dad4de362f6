// Quantised keys and queries.
#include <limits>

#include "arrays.h"

namespace {

/// q . k as the codes have it.
double coded_dot(const hkv_quantised &head, int64_t key, const std::vector<int8_t> &codes,
                 float scale, int32_t sum, float offset) {
  int64_t product = 0;
  const int64_t bytes = hkv_row_bytes(head.dim);
  for (int64_t d = 0; d < bytes; ++d)
    product += int64_t{head.rows[key * bytes + d]} * codes[static_cast<size_t>(d)];
  const float level = head.levels[head.scale_codes[key]];
  return static_cast<double>(product - 128 * int64_t{sum}) * static_cast<double>(level * scale) +
         static_cast<double>(offset);
}

}  // namespace

CLAIM(sizes_of_rows_and_blocks_are_whole_lines) {
  CHECK(hkv_row_bytes(1) == 64 && hkv_row_bytes(64) == 64 && hkv_row_bytes(65) == 128);
  CHECK(hkv_block_bytes(1) == 128 && hkv_block_bytes(4) == 128 && hkv_block_bytes(5) == 192);
  CHECK(hkv_row_bytes(INT32_MAX) == int64_t{1} << 31);
  CHECK(hkv_block_bytes(INT32_MAX) == (int64_t{1} << 35) + 64);
}

CLAIM(codes_give_scores_back) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16}) {
      const Rows rows(random_floats(37 * dim, 1), dim, dtype, 5);
      Quantised quantised(rows, true, true);
      const std::vector<float> query = random_floats(dim, 2);
      std::vector<int8_t> codes(static_cast<size_t>(hkv_row_bytes(dim)));
      float scale = 0, offset = 0;
      int32_t sum = 0;
      CHECK_OK(
          hkv_quantise_query(&quantised.head(), query.data(), codes.data(), &scale, &sum, &offset));
      for (int64_t key = 0; key < rows.count(); ++key) {
        const double coded = coded_dot(quantised.head(), key, codes, scale, sum, offset);
        CHECK(std::fabs(coded - rows.dot(key, query.data())) < 0.02 * dim);
      }
    }
}

CLAIM(appending_gives_the_codes_of_one_go) {
  const int32_t dim = 36;
  const std::vector<float> values = random_floats(53 * dim, 3);
  const Rows all(values, dim);
  Quantised once(all, true, true), steps(dim, 53, true, true);
  hkv_keys keys = all.keys();
  CHECK_OK(hkv_quantise(nullptr, 1, &keys, &steps.head()));
  steps.head().count = 17;  // statistics of all, codes of 17
  for (const int64_t count : {17, 18, 48, 53}) {
    keys.count = count;
    CHECK_OK(hkv_quantise_append(nullptr, 1, &keys, &steps.head()));
    CHECK(steps.head().count == count);
  }
  keys.count = 20;  // nothing is new, and nothing is forgotten
  CHECK_OK(hkv_quantise_append(nullptr, 1, &keys, &steps.head()));
  CHECK(steps.head().count == 53);
  CHECK(std::memcmp(once.head().rows, steps.head().rows,
                    static_cast<size_t>(53 * hkv_row_bytes(dim))) == 0);
  CHECK(std::memcmp(once.head().blocks, steps.head().blocks,
                    static_cast<size_t>(4 * hkv_block_bytes(dim))) == 0);
}

CLAIM(few_equal_huge_and_unequal_keys_are_quantised) {
  for (const int32_t dim : {1, 72}) {
    for (const int64_t count : {0, 1, 2, 16, 17}) {
      const Rows equal(std::vector<float>(static_cast<size_t>(count * dim), 0.7f), dim);
      Quantised quantised(equal, true, true);
      CHECK(quantised.head().count == count);
    }
    const float infinity = std::numeric_limits<float>::infinity();
    for (const float strange : {0.0f, 1e-42f, 3e38f, -3e38f, infinity, -infinity, std::nanf("")}) {
      std::vector<float> values = random_floats(19 * dim, 4);
      values[static_cast<size_t>(7 * dim)] = strange;
      Quantised quantised(Rows(values, dim), true, true);  // callers refuse what is not finite
      std::vector<int8_t> codes(static_cast<size_t>(hkv_row_bytes(dim)));
      std::vector<float> query(static_cast<size_t>(dim), strange);
      float scale = 0, offset = 0;
      int32_t sum = 0;
      CHECK_OK(
          hkv_quantise_query(&quantised.head(), query.data(), codes.data(), &scale, &sum, &offset));
    }
  }
}

CLAIM(many_heads_are_quantised_alike_by_any_number_of_threads) {
  const int32_t dim = 20;
  std::vector<Rows> rows;
  for (uint64_t head = 0; head < 5; ++head)
    rows.emplace_back(random_floats((4096 + 31 * static_cast<int64_t>(head)) * dim, head), dim);
  ScopedPool pool(3);
  std::vector<hkv_keys> keys;
  std::vector<hkv_quantised> heads;
  std::vector<Quantised *> owners;
  for (const Rows &one : rows) {
    keys.push_back(one.keys());
    owners.push_back(new Quantised(dim, one.count(), true, true));
    heads.push_back(owners.back()->head());
  }
  CHECK_OK(hkv_quantise(pool.get(), 5, keys.data(), heads.data()));
  for (size_t head = 0; head < rows.size(); ++head) {
    Quantised alone(rows[head], true, true);
    CHECK(heads[head].count == rows[head].count());
    CHECK(std::memcmp(alone.head().rows, heads[head].rows,
                      static_cast<size_t>(rows[head].count() * hkv_row_bytes(dim))) == 0);
    CHECK(std::memcmp(alone.head().blocks, heads[head].blocks,
                      static_cast<size_t>((rows[head].count() + 15) / 16 * hkv_block_bytes(dim))) ==
          0);
    delete owners[head];
  }
}

CLAIM(descriptors_that_cannot_be_read_are_refused) {
  const Rows rows(random_floats(17 * 8, 1), 8);
  Quantised owner(8, 17, true, true);
  const hkv_keys good = rows.keys();
  const hkv_quantised fine = owner.head();
  const auto refused = [&](const hkv_keys &keys, hkv_quantised head, const char *text) {
    CHECK_REFUSED(hkv_quantise(nullptr, 1, &keys, &head), text);
    CHECK_REFUSED(hkv_quantise_append(nullptr, 1, &keys, &head), text);
  };
  hkv_keys keys = good;
  for (const int32_t dim : {0, -1, 4097, INT32_MIN}) {
    keys.dim = dim;
    refused(keys, fine, "dim must be 1..4096");
  }
  keys = good, keys.count = -1;
  refused(keys, fine, "number of keys must be at least 0");
  keys = good, keys.stride = 7;
  refused(keys, fine, "stride");
  keys = good, keys.data = nullptr;
  refused(keys, fine, "keys must not be NULL");
  for (const int32_t dtype : {-1, 3}) {
    keys = good, keys.dtype = dtype;
    refused(keys, fine, "dtype must be");
  }
  keys = good, keys.count = 18;
  refused(keys, fine, "capacity for all keys");
  hkv_quantised head = fine;
  head.dim = 7;
  refused(good, head, "agree in dim");
  head = fine, head.mean = nullptr;
  refused(good, head, "statistics");
  head = fine, head.count = 18;
  refused(good, head, "count must be 0..capacity");
  head = fine, head.count = -1;
  refused(good, head, "count must be 0..capacity");
  head = fine, head.scale_codes = nullptr;
  refused(good, head, "come together");
  head = fine, head.rows += 1;
  refused(good, head, "64 bytes");
  head = fine;
  CHECK_REFUSED(hkv_quantise(nullptr, -1, &good, &head), "heads");
  CHECK_REFUSED(hkv_quantise(nullptr, 1, nullptr, &head), "NULL");
  CHECK_REFUSED(hkv_quantise(nullptr, 1, &good, nullptr), "NULL");
  CHECK_OK(hkv_quantise(nullptr, 0, nullptr, nullptr));
  float value = 0;
  int8_t code = 0;
  int32_t sum = 0;
  CHECK_REFUSED(hkv_quantise_query(nullptr, &value, &code, &value, &sum, &value), "NULL");
  CHECK_REFUSED(hkv_quantise_query(&head, nullptr, &code, &value, &sum, &value), "NULL");
}
