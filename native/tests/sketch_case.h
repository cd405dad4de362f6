// Sketches for tests: random maps, and keys divided over tiers of different plans.
#pragma once

#include <memory>

#include "arrays.h"
#include "hybrid_kv_sketch.h"

/// Random projections of `dim` channels, codes in the middle of their ranges.
class SketchMap {
 public:
  SketchMap(int32_t dim, int32_t of_8, int32_t of_4, int32_t of_2) {
    const int64_t dims = 4 * of_8 + 8 * of_4 + 16 * of_2, room = (dims + 15) / 16 * 16;
    columns_ = random_floats(dim * room, 11);
    start_.assign(static_cast<size_t>(room), 0.0f);
    for (int64_t i = 0; i < room; ++i) {
      const float top = i < 4 * of_8 ? 255.0f : i < 4 * of_8 + 8 * of_4 ? 15.0f : 3.0f;
      if (i < dims) start_[static_cast<size_t>(i)] = top / 2;
      for (int64_t d = 0; d < dim; ++d)
        columns_[static_cast<size_t>(d * room + i)] *= i < dims ? top / 8 : 0.0f;
    }
    map_ = {columns_.data(), columns_.data(), start_.data(), dim, of_8, of_4, of_2};
  }
  SketchMap(const SketchMap &) = delete;
  SketchMap &operator=(const SketchMap &) = delete;
  const hkv_sketch_map &get() const { return map_; }

 private:
  std::vector<float> columns_, start_;
  hkv_sketch_map map_;
};

/// The first `count` keys of a head in tiers by turns; one tier holds all in order, without ids.
class SketchCase {
 public:
  SketchCase(const Rows &rows, int64_t count, int num_tiers) : rows_(rows), count_(count) {
    const hkv_keys keys = rows.keys();
    for (int at = 0; at < num_tiers; ++at) {
      maps_.push_back(std::make_unique<SketchMap>(rows.dim(), at, 9 - 4 * at, at == 1 ? 11 : 1));
      const hkv_sketch_map &map = maps_.back()->get();
      ids_.emplace_back();
      for (int64_t row = at; row < count; row += num_tiers)
        ids_.back().push_back(static_cast<int32_t>(row));
      ids_.back().shrink_to_fit();
      const auto held = static_cast<int64_t>(ids_.back().size());
      blocks_.push_back(
          std::make_unique<Aligned>((held + 15) / 16 * hkv_sketch_block_bytes(&map)));
      CHECK_OK(hkv_sketch_encode(nullptr, &map, &keys, ids_.back().data(), held, 0,
                                 blocks_.back()->data()));
    }
    for (size_t at = 0; at < maps_.size(); ++at)
      tiers_.push_back({&maps_[at]->get(), blocks_[at]->data(),
                        num_tiers == 1 ? nullptr : ids_[at].data(),
                        static_cast<int64_t>(ids_[at].size()), nullptr, 0, 0, 0, 0, 0});
  }
  SketchCase(const SketchCase &) = delete;
  SketchCase &operator=(const SketchCase &) = delete;

  hkv_sketch_head head(int64_t num_rerank) const {
    return {rows_.keys(), tiers_.data(), static_cast<int32_t>(tiers_.size()), num_rerank, count_};
  }
  const hkv_sketch_tier &tier(size_t at) const { return tiers_[at]; }

 private:
  const Rows &rows_;
  int64_t count_;
  std::vector<std::unique_ptr<SketchMap>> maps_;
  std::vector<std::vector<int32_t>> ids_;
  std::vector<std::unique_ptr<Aligned>> blocks_;
  std::vector<hkv_sketch_tier> tiers_;
};
