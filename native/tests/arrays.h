// Arrays of exactly the size that the interface asks for, so that ASan sees the first byte too far.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"
#include "hybrid_kv_attend.h"
#include "hybrid_kv_rows.h"

/// Numbers that are the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}

  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * 0x2545f4914f6cdd1du >> 11;
  }
  int64_t below(int64_t limit) {
    return static_cast<int64_t>(bits() % static_cast<uint64_t>(limit));
  }
  float uniform() {
    return static_cast<float>(static_cast<int64_t>(bits() % 20001) - 10000) * 1e-4f;
  }

 private:
  uint64_t state_;
};

inline std::vector<float> random_floats(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float &value : values) value = random.uniform();
  return values;
}

/// Memory on 64 bytes, without a byte to spare.
class Aligned {
 public:
  explicit Aligned(int64_t bytes)
      : data_(bytes > 0 ? static_cast<uint8_t *>(std::aligned_alloc(64, static_cast<size_t>(bytes)))
                        : nullptr) {
    if (bytes > 0) std::memset(data_, 0xa5, static_cast<size_t>(bytes));
  }
  ~Aligned() { std::free(data_); }
  Aligned(const Aligned &) = delete;
  Aligned &operator=(const Aligned &) = delete;
  uint8_t *data() const { return data_; }

 private:
  uint8_t *data_;
};

/// Rows of one head in any dtype. The last row ends where the memory does.
class Rows {
 public:
  Rows(const std::vector<float> &values, int32_t dim, int32_t dtype = HKV_F32, int64_t gap = 0)
      : values_(values),
        count_(static_cast<int64_t>(values.size()) / dim),
        dim_(dim),
        dtype_(dtype),
        stride_(dim + gap) {
    const int64_t elements = count_ == 0 ? 0 : (count_ - 1) * stride_ + dim;
    const size_t size = dtype == HKV_F32 ? 4 : 2;
    bytes_.assign(static_cast<size_t>(elements) * size, 0xff);  // the gaps hold NaN
    bytes_.shrink_to_fit();
    for (int64_t row = 0; row < count_; ++row)
      for (int32_t d = 0; d < dim; ++d) {
        float &value = values_[static_cast<size_t>(row * dim + d)];
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        if (dtype != HKV_F32) bits = dtype == HKV_BF16 ? bits >> 16 : half_of(value);
        std::memcpy(bytes_.data() + static_cast<size_t>(row * stride_ + d) * size, &bits, size);
        if (dtype == HKV_BF16) {
          bits <<= 16;
          std::memcpy(&value, &bits, 4);
        } else if (dtype == HKV_F16) {
          value = float_of(bits);
        }
      }
  }

  hkv_keys keys() const {
    return {bytes_.empty() ? nullptr : bytes_.data(), count_, stride_, dim_, dtype_};
  }
  int64_t count() const { return count_; }
  int32_t dim() const { return dim_; }

  double dot(int64_t row, const float *query) const {
    double sum = 0;
    for (int32_t d = 0; d < dim_; ++d)
      sum += static_cast<double>(values_[static_cast<size_t>(row * dim_ + d)]) *
             static_cast<double>(query[d]);
    return sum;
  }
  float at(int64_t row, int32_t d) const { return values_[static_cast<size_t>(row * dim_ + d)]; }

  /// Of a half; subnormals are 0.
  static float float_of(uint32_t half) {
    const int exponent = static_cast<int>(half >> 10 & 31u);
    if (exponent == 0) return 0.0f;
    const float magnitude = std::ldexp(static_cast<float>(1024u + (half & 1023u)), exponent - 25);
    return (half & 0x8000u) != 0 ? -magnitude : magnitude;
  }

 private:
  /// Towards zero; subnormals become 0.
  static uint32_t half_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x38800000u) return sign;
    return sign | ((magnitude - 0x38000000u) >> 13);
  }

  std::vector<float> values_;  // as they are read back
  std::vector<uint8_t> bytes_;
  int64_t count_;
  int32_t dim_, dtype_;
  int64_t stride_;
};

/// Keys and values of one head of one batch row.
inline hkv_kv kv_of(const Rows &keys, const Rows &values) {
  return {keys.keys(), values.keys(), {0, 0}, {0, 0}};
}

/// Quantised keys of one head in memory of their own.
class Quantised {
 public:
  Quantised(int32_t dim, int64_t capacity, bool with_rows, bool with_blocks)
      : mean_(static_cast<size_t>(dim)),
        channel_(static_cast<size_t>(dim)),
        levels_(HKV_LEVELS),
        codes_(static_cast<size_t>(with_rows ? capacity : 0)),
        rows_(with_rows ? capacity * hkv_row_bytes(dim) : 0),
        blocks_(with_blocks ? (capacity + 15) / 16 * hkv_block_bytes(dim) : 0) {
    head_ = {mean_.data(),
             channel_.data(),
             levels_.data(),
             rows_.data(),
             rows_.data() == nullptr ? nullptr : codes_.data(),
             blocks_.data(),
             0,
             capacity,
             dim};
  }
  Quantised(const Rows &rows, bool with_rows, bool with_blocks, int64_t spare = 0)
      : Quantised(rows.dim(), rows.count() + spare, with_rows, with_blocks) {
    const hkv_keys keys = rows.keys();
    CHECK_OK(hkv_quantise(nullptr, 1, &keys, &head_));
  }

  hkv_quantised &head() { return head_; }

 private:
  std::vector<float> mean_, channel_, levels_;
  std::vector<uint8_t> codes_;
  Aligned rows_, blocks_;
  hkv_quantised head_;
};

/// A pool for the length of a scope.
class ScopedPool {
 public:
  explicit ScopedPool(int32_t threads) { CHECK_OK(hkv_pool_create(threads, nullptr, 0, &pool_)); }
  ~ScopedPool() { hkv_pool_destroy(pool_); }
  ScopedPool(const ScopedPool &) = delete;
  ScopedPool &operator=(const ScopedPool &) = delete;
  hkv_pool *get() const { return pool_; }

 private:
  hkv_pool *pool_ = nullptr;
};

/// Widths around those of vectors, and odd ones.
constexpr int32_t kDims[] = {1, 3, 4, 7, 16, 36, 72, 100, 128};
