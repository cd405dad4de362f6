// Queries of one head as its tiers' codes see them.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <vector>

#include "error.h"
#include "sketch.h"
#include "sketch_dots.h"

namespace hkv {

/// What turns a query's sum of products with one tier's codes into a score.
struct SketchScale {
  float half_scale;
  int32_t twice_zero;  // sum of (2^bits - 1) * code
  int32_t shift;       // what `DotSums` leaves out

  float score(int32_t sum) const {
    return half_scale * static_cast<float>(2 * sum - twice_zero);  // an integer below 2^24
  }

  /// The least sum whose score is above `threshold`; scores rise with sums.
  int32_t least_above(float threshold) const {
    int32_t low = -kFarthest, high = kFarthest;  // beyond all sums that there are
    while (low < high) {
      const int32_t middle = low + (high - low) / 2;
      if (score(middle) > threshold)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }

 private:
  static constexpr int32_t kFarthest = 1 << 23;
};

/// The queries of a group for one tier, in slices of kSketchSlice.
class SketchQueries {
 public:
  /// queries: [count, dim]; raises NotFinite.
  void prepare(const hkv_sketch_map &map, const float *queries, int64_t count) {
    const SketchLines lines(map);
    const int room = lines.room();
    count_ = count;
    words_of_query_ = kWordsOf8 * lines.of_8 + 2 * lines.of_4 + 4 * lines.of_2;
    grow(values_, count * room);
    grow(words_, count * words_of_query_);
    grow(scales_, count);
    project(queries, count, map.dim, map.query_columns, room, nullptr, values_.data());
    if (!all_finite(values_.data(), count * room))
      throw NotFinite("queries must be finite, and so must query_map times them");
    for (int64_t query = 0; query < count; ++query)
      put_query(lines, values_.data() + query * room, query);
  }

  int num_queries(int64_t slice) const {
    return static_cast<int>(std::min<int64_t>(kSketchSlice, count_ - slice * kSketchSlice));
  }
  int64_t num_slices() const { return (count_ + kSketchSlice - 1) / kSketchSlice; }

  /// The words of a slice: [quad][query], those of 8-bit codes first.
  const int32_t *words(int64_t slice) const {
    return words_.data() + slice * kSketchSlice * words_of_query_;
  }
  const SketchScale &scale(int64_t query) const { return scales_[query]; }

 private:
  template <typename Value>
  static void grow(std::vector<Value> &values, int64_t size) {
    if (static_cast<int64_t>(values.size()) < size) values.resize(size);
  }

  void put_query(const SketchLines &lines, const float *x, int64_t query) {
    float largest = 0.0f;
    for (int i = 0; i < lines.dims(); ++i) largest = std::max(largest, std::fabs(x[i]));
    const float scale = largest / kLargestCode;
    const float inverse = scale >= FLT_MIN ? 1.0f / scale : 0.0f;
    int8_t codes[HKV_SKETCH_DIMS];
    const int end_of_8 = kQuadChannels * lines.of_8, end_of_4 = end_of_8 + 8 * lines.of_4;
    int32_t twice_zero = 0, sum_of_8 = 0;
    for (int i = 0; i < lines.dims(); ++i) {
      const float limit = kLargestCode, value = std::min(std::max(x[i] * inverse, -limit), limit);
      codes[i] = static_cast<int8_t>((value + kRoundWhole) - kRoundWhole);
      twice_zero += codes[i] * (i < end_of_8 ? 255 : i < end_of_4 ? 15 : 3);
      sum_of_8 += i < end_of_8 ? codes[i] : 0;
    }
    scales_[query] = {0.5f * scale, twice_zero, kShiftedBytes ? 128 * sum_of_8 : 0};
    put_words(lines, codes, query);
  }

  void put_words(const SketchLines &lines, const int8_t *codes, int64_t query) {
    const int64_t slice = query / kSketchSlice;
    const int width = num_queries(slice);
    int32_t *to = words_.data() + slice * kSketchSlice * words_of_query_;
    const int64_t lane = query % kSketchSlice;
    for (int quad = 0; quad < lines.of_8; ++quad, codes += kQuadChannels, to += width * kWordsOf8)
      put_word_of_8(codes, to + lane * kWordsOf8);
    for (int quad = 0; quad < 2 * lines.of_4 + 4 * lines.of_2; ++quad, codes += kQuadChannels) {
      std::memcpy(to + lane, codes, kQuadChannels);
      to += width;
    }
  }

  int64_t count_ = 0, words_of_query_ = 0;
  std::vector<float> values_;  // [count, room]
  std::vector<int32_t> words_;
  std::vector<SketchScale> scales_;
};

}  // namespace hkv
