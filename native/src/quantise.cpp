// The 8-bit recipe: statistics of a head's keys, then codes in rows and blocks.
//
// Every step is a single rounded operation in an order that does not depend on the instruction set
// or on threads, so that all libraries and the portable implementation give the same bits.
#include "quantise.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "convert.h"
#include "error.h"
#include "pool.h"

namespace hkv {
namespace {

constexpr float kHeadroom = 2.0f;     // appended keys may be this much larger before they clamp
constexpr double kSpan = 0x1p-20;     // the smallest level is not further below the largest need
constexpr float kNoKeysLow = 0x1p-16;  // levels where there is nothing to learn them from
constexpr float kNoKeysHigh = 0x1p4;
constexpr int64_t kItemKeys = 4096;  // of one piece of parallel work; whole blocks

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

/// A row's normalised values, padded with 0 to whole vectors.
class Normaliser {
 public:
  explicit Normaliser(const hkv_quantised &quantised)
      : dim_(quantised.dim),
        padded_((dim_ + kLanes - 1) / kLanes * kLanes),
        mean_(padded_, 0.0f),
        inverse_(padded_, 0.0f),
        values_(padded_, 0.0f) {
    std::copy_n(quantised.mean, dim_, mean_.begin());
    for (int d = 0; d < dim_; ++d) inverse_[d] = 1.0f / quantised.channel[d];
  }

  /// values() becomes (row - mean) / channel; returns the largest magnitude.
  template <typename Element>
  float read(const Element *row) {
    convert(row, dim_, values_.data());
    Floats largest{};
    for (int d = 0; d < padded_; d += kLanes) {
      const Floats shifted = load_floats(&values_[d]) - load_floats(&mean_[d]);
      const Floats value = shifted * load_floats(&inverse_[d]);
      store_floats(&values_[d], value);
      const Floats magnitude = value < 0.0f ? -value : value;
      largest = magnitude > largest ? magnitude : largest;
    }
    float result = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) result = std::max(result, largest[lane]);
    return result;
  }

  const float *values() const { return values_.data(); }

 private:
  const int dim_, padded_;
  std::vector<float> mean_, inverse_, values_;
};

/// Rounded and clamped; NaN gives the smallest code.
inline int round_code(float value) {
  const float limit = kLargestCode;
  const float clamped = value > -limit ? (value < limit ? value : limit) : -limit;
  return static_cast<int>(std::lrintf(clamped));
}

/// Largest |a b| of `dim` products.
float largest_product(const float *a, const float *b, int dim) {
  Floats lanes{};
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const Floats product = load_floats(a + d) * load_floats(b + d);
    const Floats magnitude = product < 0.0f ? -product : product;
    lanes = magnitude > lanes ? magnitude : lanes;
  }
  float largest = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, lanes[lane]);
  for (; d < dim; ++d) largest = std::max(largest, std::fabs(a[d] * b[d]));
  return largest;
}

/// codes [dim] = the products a b, times `inverse`, as `round_code` rounds them; returns their sum.
int32_t round_products(const float *a, const float *b, int dim, float inverse, int8_t *codes) {
  constexpr float kLimit = kLargestCode;
  constexpr float kRound = 0x1.8p23f;  // adding it leaves no bits behind the point
  Ints sums{};
  int d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    Floats value = load_floats(a + d) * load_floats(b + d);
    value *= inverse;
    value = value > -kLimit ? value : Floats{} - kLimit;
    value = value < kLimit ? value : Floats{} + kLimit;
    const Floats rounded = (value + kRound) - kRound;
    const Ints whole = __builtin_convertvector(rounded, Ints);
    const Bytes narrow = __builtin_convertvector(whole, Bytes);
    std::memcpy(codes + d, &narrow, sizeof narrow);
    sums += whole;
  }
  int32_t sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  for (; d < dim; ++d) {
    codes[d] = static_cast<int8_t>(round_code(a[d] * b[d] * inverse));
    sum += codes[d];
  }
  return sum;
}

template <typename Element>
const Element *row_of(const hkv_keys &keys, int64_t row) {
  return static_cast<const Element *>(keys.data) + row * keys.stride;
}

/// Means over all keys of `read(value, channel)`, summed in the order of the keys.
template <typename Element, typename Read>
void channel_means(const hkv_keys &keys, const Read &read, float *means) {
  std::vector<float> values(keys.dim);
  std::vector<double> sums(keys.dim, 0.0);
  for (int64_t row = 0; row < keys.count; ++row) {
    convert(row_of<Element>(keys, row), keys.dim, values.data());
    for (int d = 0; d < keys.dim; ++d) sums[d] += read(static_cast<double>(values[d]), d);
  }
  const double count = static_cast<double>(std::max<int64_t>(1, keys.count));
  for (int d = 0; d < keys.dim; ++d) means[d] = static_cast<float>(sums[d] / count);
}

void fill_levels(float low, float high, float *levels) {
  const double first = std::max(static_cast<double>(low), static_cast<double>(high) * kSpan);
  const double last = static_cast<double>(high) * kHeadroom;
  const double step = std::log2(last / first) / (HKV_LEVELS - 1);
  for (int i = 0; i < HKV_LEVELS; ++i) levels[i] = static_cast<float>(first * std::exp2(i * step));
}

template <typename Element>
void take_statistics(const hkv_keys &keys, hkv_quantised &to) {
  channel_means<Element>(keys, [](double value, int) { return value; }, to.mean);
  const float *mean = to.mean;
  channel_means<Element>(
      keys, [mean](double value, int d) { return std::fabs(value - static_cast<double>(mean[d])); },
      to.channel);
  for (int d = 0; d < keys.dim; ++d)
    if (!(to.channel[d] >= FLT_MIN)) to.channel[d] = 1.0f;  // all keys agree in this channel
  Normaliser normaliser(to);
  float low = FLT_MAX, high = 0.0f;
  for (int64_t row = 0; row < keys.count; ++row) {
    const float need = normaliser.read(row_of<Element>(keys, row)) / kLargestCode;
    if (!(need >= FLT_MIN)) continue;
    low = std::min(low, need);
    high = std::max(high, need);
  }
  if (high > 0.0f)
    fill_levels(low, high, to.levels);
  else
    fill_levels(kNoKeysLow, kNoKeysHigh, to.levels);
}

void clear_block(uint8_t *block, int dim) {
  const int64_t bytes = int64_t{quads(dim)} * kLineBytes;
  std::memset(block, kZeroCode, bytes);
  const float none = std::numeric_limits<float>::quiet_NaN();
  for (int lane = 0; lane < HKV_BLOCK_KEYS; ++lane)
    std::memcpy(block + bytes + 4 * lane, &none, sizeof none);
}

void put_into_block(const uint8_t *codes, float level, int64_t key, hkv_quantised &to) {
  uint8_t *block = to.blocks + key / HKV_BLOCK_KEYS * block_bytes(to.dim);
  const int lane = static_cast<int>(key % HKV_BLOCK_KEYS);
  if (lane == 0) clear_block(block, to.dim);
  uint8_t *slot = block + kQuadChannels * lane;
  for (int quad = 0; quad < quads(to.dim); ++quad, slot += kLineBytes)
    std::memcpy(slot, codes + kQuadChannels * quad, kQuadChannels);
  std::memcpy(slot, &level, sizeof level);
}

template <typename Element>
void quantise_rows(const hkv_keys &keys, int64_t first, int64_t last, hkv_quantised &to) {
  Normaliser normaliser(to);
  std::vector<uint8_t> codes(row_bytes(to.dim), kZeroCode);
  for (int64_t key = first; key < last; ++key) {
    const float need = normaliser.read(row_of<Element>(keys, key)) / kLargestCode;
    const float *found = std::lower_bound(to.levels, to.levels + HKV_LEVELS, need);
    const int level = static_cast<int>(std::min<int64_t>(found - to.levels, HKV_LEVELS - 1));
    const float inverse = 1.0f / to.levels[level];
    const float *values = normaliser.values();
    for (int d = 0; d < to.dim; ++d)
      codes[d] = static_cast<uint8_t>(round_code(values[d] * inverse) + kZeroCode);
    if (to.rows != nullptr) {
      std::memcpy(to.rows + key * row_bytes(to.dim), codes.data(), codes.size());
      to.scale_codes[key] = static_cast<uint8_t>(level);
    }
    if (to.blocks != nullptr) put_into_block(codes.data(), to.levels[level], key, to);
  }
}

struct Piece {
  int32_t head;
  int64_t first, last;
};

/// The new keys of all heads in pieces; no two of them touch the same block.
std::vector<Piece> pieces_of(int32_t heads, const hkv_keys *keys, const hkv_quantised *quantised) {
  std::vector<Piece> pieces;
  for (int32_t head = 0; head < heads; ++head)
    for (int64_t first = quantised[head].count; first < keys[head].count;) {
      const int64_t next = (first / kItemKeys + 1) * kItemKeys;
      const int64_t last = std::min(next, keys[head].count);
      pieces.push_back({head, first, last});
      first = last;
    }
  return pieces;
}

void check_pairs(int32_t heads, const hkv_keys *keys, const hkv_quantised *quantised) {
  require(heads >= 0, "heads must be at least 0");
  require(heads == 0 || (keys != nullptr && quantised != nullptr),
          "keys and quantised must not be NULL");
  for (int32_t head = 0; head < heads; ++head) {
    check_keys(keys[head]);
    check_quantised(quantised[head]);
    require(keys[head].dim == quantised[head].dim, "keys and quantised must agree in dim");
    require(keys[head].count <= quantised[head].capacity,
            "quantised must have capacity for all keys");
  }
}

void append(hkv_pool *pool, int32_t heads, const hkv_keys *keys, hkv_quantised *quantised) {
  const std::vector<Piece> pieces = pieces_of(heads, keys, quantised);
  parallel_for(pool, static_cast<int64_t>(pieces.size()), [&](int64_t item, int) {
    const Piece &piece = pieces[item];
    with_dtype(keys[piece.head].dtype, [&](auto *element) {
      using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
      quantise_rows<Element>(keys[piece.head], piece.first, piece.last, quantised[piece.head]);
    });
  });
  for (int32_t head = 0; head < heads; ++head)
    quantised[head].count = std::max(quantised[head].count, keys[head].count);
}

}  // namespace

void check_keys(const hkv_keys &keys) {
  require(keys.dim >= 1 && keys.dim <= HKV_MAX_DIM, "dim must be 1..4096");
  require(keys.count >= 0, "the number of keys must be at least 0");
  require(keys.stride >= keys.dim, "the stride of keys must be at least dim");
  require(keys.count == 0 || keys.data != nullptr, "keys must not be NULL");
  require(keys.dtype >= HKV_F32 && keys.dtype <= HKV_BF16,
          "dtype must be float32 (0), float16 (1) or bfloat16 (2)");
}

void check_quantised(const hkv_quantised &quantised) {
  require(quantised.dim >= 1 && quantised.dim <= HKV_MAX_DIM, "dim must be 1..4096");
  require(quantised.mean && quantised.channel && quantised.levels, "statistics must not be NULL");
  require(quantised.count >= 0 && quantised.count <= quantised.capacity,
          "count must be 0..capacity");
  require((quantised.rows == nullptr) == (quantised.scale_codes == nullptr),
          "rows and scale_codes come together");
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(quantised.rows) |
                              reinterpret_cast<uintptr_t>(quantised.blocks);
  require(addresses % kLineBytes == 0, "rows and blocks must lie on 64 bytes");
}

QueryScale quantise_query(const hkv_quantised &keys, const float *query, int8_t *codes,
                          int64_t padded) {
  const float largest = largest_product(query, keys.channel, keys.dim);
  double offset = 0.0;
  for (int d = 0; d < keys.dim; ++d)
    offset += static_cast<double>(query[d]) * static_cast<double>(keys.mean[d]);
  const float scale = largest / kLargestCode;
  const float inverse = scale >= FLT_MIN ? 1.0f / scale : 0.0f;
  const int32_t sum = round_products(query, keys.channel, keys.dim, inverse, codes);
  std::memset(codes + keys.dim, 0, padded - keys.dim);
  return {scale, sum, static_cast<float>(offset)};
}

}  // namespace hkv

extern "C" {

int64_t hkv_row_bytes(int32_t dim) { return hkv::row_bytes(dim); }
int64_t hkv_block_bytes(int32_t dim) { return hkv::block_bytes(dim); }

int hkv_quantise(hkv_pool *pool, int32_t heads, const hkv_keys *keys, hkv_quantised *quantised) {
  return hkv::guarded([&] {
    hkv::check_pairs(heads, keys, quantised);
    hkv::parallel_for(pool, heads, [&](int64_t head, int) {
      hkv::with_dtype(keys[head].dtype, [&](auto *element) {
        using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
        hkv::take_statistics<Element>(keys[head], quantised[head]);
      });
      quantised[head].count = 0;
    });
    hkv::append(pool, heads, keys, quantised);
  });
}

int hkv_quantise_append(hkv_pool *pool, int32_t heads, const hkv_keys *keys,
                        hkv_quantised *quantised) {
  return hkv::guarded([&] {
    hkv::check_pairs(heads, keys, quantised);
    hkv::append(pool, heads, keys, quantised);
  });
}

int hkv_quantise_query(const hkv_quantised *quantised, const float *query, int8_t *codes,
                       float *scale, int32_t *sum, float *offset) {
  return hkv::guarded([&] {
    hkv::require(quantised && query && codes && scale && sum && offset,
                 "arguments must not be NULL");
    hkv::check_quantised(*quantised);
    const hkv::QueryScale result =
        hkv::quantise_query(*quantised, query, codes, hkv::row_bytes(quantised->dim));
    *scale = result.scale;
    *sum = result.sum;
    *offset = result.offset;
  });
}

}  // extern "C"
