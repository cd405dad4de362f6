// A step in one call against its parts: searches, attention of what they found, resident rows, merge.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>

#include "graph_case.h"
#include "hybrid_kv_step.h"
#include "sketch_case.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Sizes {
  int32_t heads = 2, dim = 20, value_dim = 12, dtype = HKV_BF16;
  int64_t num_queries = 3, page_size = 16, num_pages = 5, tail_fill = 7, num_cold = 300, width = 9;
  int64_t num_chosen = 5, oldest = 1, newest = 2;
};

/// Rows [from, to) of some rows.
std::vector<float> some(const Rows &rows, const std::vector<int64_t> &wanted) {
  std::vector<float> values;
  for (const int64_t row : wanted)
    for (int32_t d = 0; d < rows.dim(); ++d) values.push_back(rows.at(row, d));
  return values;
}

std::vector<int64_t> of_range(int64_t count, int64_t first = 0) {
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < count; ++row) rows.push_back(first + row);
  return rows;
}

/// A layer with everything that its descriptor points at.
class LayerCase {
 public:
  explicit LayerCase(const Sizes &sizes)
      : sizes(sizes),
        num_slots(sizes.num_pages + 2),
        page_keys(random_floats(sizes.heads * num_slots * sizes.page_size * sizes.dim, 1), sizes.dim,
                  sizes.dtype),
        page_values(random_floats(sizes.heads * num_slots * sizes.page_size * sizes.value_dim, 2),
                    sizes.value_dim, sizes.dtype),
        cold_keys(random_floats(sizes.heads * sizes.num_cold * sizes.dim, 3), sizes.dim, sizes.dtype),
        cold_values(random_floats(sizes.heads * sizes.num_cold * sizes.value_dim, 4), sizes.value_dim,
                    sizes.dtype),
        queries(random_floats(sizes.heads * sizes.num_queries * sizes.dim, 5), sizes.dim,
                sizes.dtype) {
    for (int64_t page = 0; page < sizes.num_pages; ++page)  // neither in order nor together
      slots.push_back((page * 3 + 1) % num_slots);
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
    std::reverse(slots.begin(), slots.end());
    layer.heads = sizes.heads;
    layer.num_queries = sizes.num_queries;
    layer.resident = {per_head(page_keys, page_values, num_slots * sizes.page_size),
                      slots.data(),
                      static_cast<int64_t>(slots.size()),
                      sizes.page_size,
                      sizes.num_chosen,
                      sizes.oldest,
                      sizes.newest,
                      {},
                      0};
    if (sizes.num_cold == 0) return;
    extent.kv = per_head(cold_keys, cold_values, sizes.num_cold);
    layer.cold = {&extent, 1, sizes.width};
    for (int32_t head = 0; head < sizes.heads; ++head) {
      heads.push_back(head);
      flat.push_back({keys_of(head), nullptr});
    }
    searches.push_back({HKV_SEARCH_FLAT, sizes.heads, heads.data(), flat.data(), 0, sizes.width, 0,
                        nullptr, nullptr, 0});
    extent.searches = searches.data();
    extent.num_searches = 1;
  }

  hkv_kv per_head(const Rows &keys, const Rows &values, int64_t rows) const {
    hkv_kv kv = kv_of(keys, values);
    kv.keys.count = kv.values.count = rows;
    kv.key_step[1] = rows * keys.dim();
    kv.value_step[1] = rows * values.dim();
    return kv;
  }

  hkv_keys keys_of(int32_t head, int64_t first = 0) const {
    hkv_keys keys = cold_keys.keys();
    keys.data = static_cast<const uint8_t *>(keys.data) +
                (head * sizes.num_cold + first) * sizes.dim * (sizes.dtype == HKV_F32 ? 4 : 2);
    keys.count = sizes.num_cold - first;
    return keys;
  }

  /// The least and the greatest keys of all slots.
  void add_digests() {
    for (int32_t head = 0; head < sizes.heads; ++head)
      for (int64_t slot = 0; slot < num_slots; ++slot)
        for (int32_t d = 0; d < sizes.dim; ++d) {
          float low = -kNone, high = kNone;
          for (int64_t i = 0; i < sizes.page_size; ++i) {
            const float value =
                page_keys.at((head * num_slots + slot) * sizes.page_size + i, d);
            low = std::min(low, value);
            high = std::max(high, value);
          }
          lows.push_back(low);
          highs.push_back(high);
        }
    layer.resident.digests.lows = {lows.data(), num_slots, sizes.dim, sizes.dim, HKV_F32};
    layer.resident.digests.highs = {highs.data(), num_slots, sizes.dim, sizes.dim, HKV_F32};
    layer.resident.digest_step = num_slots * sizes.dim;
  }

  /// Rows of a head's pages, in any order.
  std::vector<int64_t> rows_of(int32_t head, const std::vector<int64_t> &pages) const {
    std::vector<int64_t> rows;
    for (const int64_t slot : pages)
      for (int64_t i = 0; i < (slot == slots.back() ? sizes.tail_fill : sizes.page_size); ++i)
        rows.push_back((head * num_slots + slot) * sizes.page_size + i);
    return rows;
  }

  const Sizes sizes;
  const int64_t num_slots;
  const Rows page_keys, page_values, cold_keys, cold_values, queries;
  std::vector<int64_t> slots;
  std::vector<int32_t> heads;
  std::vector<hkv_flat_head> flat;
  std::vector<hkv_search> searches;
  std::vector<float> lows, highs;
  hkv_extent extent{};
  hkv_layer layer{};
};

/// What a step gives.
struct Given {
  std::vector<float> out, lse;
  std::vector<int64_t> ids;
  float *half = nullptr;  // is asked for where it is set
  hkv_step_report report{};

  explicit Given(const Sizes &sizes)
      : out(static_cast<size_t>(sizes.heads * sizes.num_queries * sizes.value_dim)),
        lse(static_cast<size_t>(sizes.heads * sizes.num_queries)),
        ids(static_cast<size_t>(sizes.heads * sizes.num_queries * sizes.width)) {}

  int run(hkv_pool *pool, const LayerCase &of, float softcap = 0.0f,
          const std::vector<int64_t> &named = {}) {
    hkv_step step{of.queries.keys().data, of.sizes.dtype, HKV_F32, of.sizes.tail_fill, 0.5f,
                  softcap, nullptr, 0, ids.data(), out.data(), lse.data()};
    step.half = half;
    if (!named.empty()) {
      step.named = named.data();
      step.num_named = static_cast<int64_t>(named.size() / lse.size());
    }
    return hkv_attend_step(pool, &of.layer, &step, &report);
  }
};

/// The same by the entry points of its parts, with `pages` attended by each head.
void check_parts(const LayerCase &of, const Given &got, float softcap,
                 const std::vector<std::vector<int64_t>> &pages, const std::vector<int64_t> &ids) {
  const Sizes &sizes = of.sizes;
  const int64_t num_queries = sizes.num_queries, row = sizes.value_dim;
  for (int32_t head = 0; head < sizes.heads; ++head) {
    const Rows keys(some(of.page_keys, of.rows_of(head, pages[static_cast<size_t>(head)])), sizes.dim);
    const Rows values(some(of.page_values, of.rows_of(head, pages[static_cast<size_t>(head)])),
                      sizes.value_dim);
    std::vector<int64_t> mine;
    for (int64_t query = 0; query < num_queries; ++query) mine.push_back(head * num_queries + query);
    const Rows queries(some(of.queries, mine), sizes.dim);
    std::vector<float> outs[2], lses[2];
    for (int part = 0; part < 2; ++part) {
      outs[part].resize(static_cast<size_t>(num_queries * row));
      lses[part].assign(static_cast<size_t>(num_queries), kNone);
    }
    const hkv_kv near = kv_of(keys, values);
    CHECK_OK(hkv_attend_rows(nullptr, 1, 1, &near, queries.keys().data, HKV_F32, num_queries, nullptr,
                             0.5f, softcap, outs[0].data(), lses[0].data()));
    if (!ids.empty()) {
      hkv_kv far = of.extent.kv;
      far.keys = of.keys_of(head);
      const int64_t size = sizes.dtype == HKV_F32 ? 4 : 2;
      far.values.data = static_cast<const uint8_t *>(far.values.data) +
                        head * sizes.num_cold * sizes.value_dim * size;
      const int64_t *own = ids.data() + head * num_queries * sizes.width;
      CHECK_OK(hkv_attend(nullptr, 1, &far, queries.keys().data, HKV_F32, num_queries, own,
                          sizes.width, nullptr, 0.5f, softcap, outs[1].data(), lses[1].data()));
      for (int64_t i = 0; i < num_queries * sizes.width; ++i)
        CHECK(got.ids[static_cast<size_t>(head * num_queries * sizes.width + i)] == own[i]);
    }
    const hkv_part parts[] = {{outs[0].data(), lses[0].data(), HKV_F32},
                              {outs[1].data(), lses[1].data(), HKV_F32}};
    CHECK_OK(hkv_merge(nullptr, 2, parts, num_queries, sizes.value_dim, HKV_F32, outs[0].data(),
                       lses[0].data()));
    for (int64_t query = 0; query < num_queries; ++query) {
      const auto at = static_cast<size_t>(head * num_queries + query);
      const float lse = lses[0][static_cast<size_t>(query)];
      CHECK(got.lse[at] == lse || std::fabs(got.lse[at] - lse) < 1e-4f);
      for (int64_t d = 0; d < row; ++d)
        CHECK(std::fabs(got.out[at * static_cast<size_t>(row) + static_cast<size_t>(d)] -
                        outs[0][static_cast<size_t>(query * row + d)]) < 1e-4f);
    }
  }
}

std::vector<int64_t> found(const LayerCase &of, const hkv_search &search) {
  const Sizes &sizes = of.sizes;
  std::vector<float> queries;
  for (int64_t row = 0; row < of.queries.count(); ++row)
    for (int32_t d = 0; d < sizes.dim; ++d) queries.push_back(of.queries.at(row, d));
  std::vector<int64_t> ids(static_cast<size_t>(sizes.heads * sizes.num_queries * sizes.width), -1);
  CHECK_OK(hkv_flat_search(nullptr, sizes.heads, static_cast<const hkv_flat_head *>(search.head),
                           queries.data(), sizes.num_queries, sizes.width, search.num_ranked,
                           HKV_IDS_INT64, ids.data(), nullptr, nullptr));
  return ids;
}

std::vector<std::vector<int64_t>> all_pages(const LayerCase &of) {
  return std::vector<std::vector<int64_t>>(static_cast<size_t>(of.sizes.heads), of.slots);
}

void check_case(const Sizes &sizes, float softcap, int32_t threads) {
  const LayerCase of(sizes);
  ScopedPool pool(threads);
  Given got(sizes);
  CHECK_OK(got.run(pool.get(), of, softcap));
  const bool cold = sizes.num_cold > 0;
  check_parts(of, got, softcap, all_pages(of),
              cold ? found(of, of.searches[0]) : std::vector<int64_t>());
  if (!cold) return;
  const int64_t most = std::min(sizes.width, sizes.num_cold);
  CHECK(got.report.most_retrieved == most);
  CHECK(got.report.retrieved == sizes.heads * sizes.num_queries * most);
  CHECK(got.report.scored == sizes.heads * sizes.num_queries * sizes.num_cold);
  CHECK(got.report.rows_read >= sizes.heads * most && got.report.rows_read <= got.report.retrieved);
}

}  // namespace

CLAIM(a_step_is_search_attention_and_merge) {
  for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16})
    for (const int32_t dim : kDims) {
      Sizes sizes;
      sizes.dtype = dtype;
      sizes.dim = sizes.value_dim = dim;
      check_case(sizes, dim % 2 == 0 ? 0.0f : 3.0f, 1 + dim % 2);
    }
  for (const int64_t num_queries : {1, 4, 5, 16, 17, 33}) {
    Sizes sizes;
    sizes.num_queries = num_queries;
    sizes.heads = num_queries > 16 ? 3 : 1;
    check_case(sizes, 0.0f, 2);
  }
  for (const int64_t width : {1, 2, 300, 301}) {
    Sizes sizes;
    sizes.width = width;
    check_case(sizes, 0.0f, 2);
  }
}

CLAIM(a_step_attends_pages_in_place_whatever_their_order_and_number) {
  for (const int64_t num_pages : {1, 2, 16, 17, 260, 600})
    for (const int64_t page_size : {1, 16}) {
      Sizes sizes;
      sizes.num_pages = sizes.num_chosen = num_pages;
      sizes.page_size = page_size;
      sizes.tail_fill = (page_size + 1) / 2;
      sizes.num_cold = num_pages % 2 == 0 ? 40 : 0;
      check_case(sizes, 0.0f, 3);
    }
}

CLAIM(a_step_without_pages_or_entries_is_empty) {
  Sizes sizes;
  sizes.num_pages = sizes.num_chosen = sizes.num_cold = 0;
  LayerCase of(sizes);
  of.layer.resident.num_pages = of.layer.resident.num_chosen = 0;
  Given got(sizes);
  CHECK_OK(got.run(nullptr, of));
  for (const float lse : got.lse) CHECK(lse == kNone);
  for (const float out : got.out) CHECK(out == 0.0f);
}

CLAIM(a_step_of_cold_entries_alone_is_their_attention) {
  Sizes sizes;
  sizes.num_pages = sizes.num_chosen = sizes.tail_fill = 0;
  const LayerCase of(sizes);
  Given got(sizes);
  CHECK_OK(got.run(nullptr, of, 2.0f));
  check_parts(of, got, 2.0f, all_pages(of), found(of, of.searches[0]));
}

/// Rows for each query: what its search finds, from the worst on, among others and places without.
static std::vector<int64_t> named_among(const LayerCase &of, int64_t others) {
  const std::vector<int64_t> best = found(of, of.searches[0]);
  const int64_t width = of.sizes.width;
  std::vector<int64_t> named;
  for (int64_t row = 0; row < of.sizes.heads * of.sizes.num_queries; ++row) {
    const int64_t *own = best.data() + row * width;
    for (int64_t i = width; i-- > 0;) named.insert(named.end(), {own[i], -1});
    for (int64_t id = 0, added = 0; added < others; ++id) {
      if (std::find(own, own + width, id) != own + width) continue;
      named.push_back(id);
      ++added;
    }
  }
  return named;
}

CLAIM(a_step_ranks_what_it_names_and_searches_nothing) {
  for (const int32_t dtype : {HKV_F32, HKV_BF16})
    for (const int64_t others : {0, 1, 40}) {
      Sizes sizes;
      sizes.dtype = dtype;
      sizes.num_pages = sizes.num_chosen = others == 1 ? 0 : 5;
      sizes.tail_fill = others == 1 ? 0 : 7;
      LayerCase of(sizes);
      const std::vector<int64_t> best = found(of, of.searches[0]), named = named_among(of, others);
      const std::vector<hkv_flat_head> wrong(of.flat.size());
      of.searches[0].head = wrong.data();  // nobody may look there
      Given got(sizes);
      ScopedPool pool(2);
      CHECK_OK(got.run(pool.get(), of, 0.0f, named));
      check_parts(of, got, 0.0f, all_pages(of), best);
      CHECK(got.report.scored == static_cast<int64_t>(named.size()));
      std::vector<int64_t> few(named.size(), -1);
      few[0] = named[0];
      CHECK_OK(got.run(nullptr, of, 0.0f, few));
      CHECK(got.ids[0] == named[0] && got.ids[1] == -1 && got.report.retrieved == 1);
    }
}

CLAIM(a_step_refuses_names_that_are_no_rows) {
  Sizes sizes;
  LayerCase of(sizes);
  Given got(sizes);
  std::vector<int64_t> named = named_among(of, 3);
  named[1] = sizes.num_cold;
  CHECK_REFUSED(got.run(nullptr, of, 0.0f, named), "a named entry lies beyond the keys");
  sizes.num_cold = 0;
  const LayerCase warm(sizes);
  CHECK_REFUSED(got.run(nullptr, warm, 0.0f, named), "entries can be named of cold ones only");
}

CLAIM(a_step_merges_searches_of_one_head_by_score) {
  Sizes sizes;
  LayerCase of(sizes);
  const std::vector<int64_t> whole = found(of, of.searches[0]);
  const int64_t cut = 130;
  std::vector<hkv_flat_head> first, later;
  const int32_t order[] = {1, 0};
  for (const int32_t head : order) {
    first.push_back({of.keys_of(head), nullptr});
    first.back().keys.count = cut;
    later.push_back({of.keys_of(head, cut), nullptr});
  }
  std::vector<hkv_search> parts(3, of.searches[0]);
  parts[0].heads = parts[1].heads = parts[2].heads = order;
  parts[0].head = first.data();
  parts[1].num_heads = parts[2].num_heads = 1;  // the later keys of each head by itself
  parts[1].head = &later[0];
  parts[2].head = &later[1];
  parts[2].heads = &order[1];
  parts[1].first_row = parts[2].first_row = cut;
  parts[1].width = 5;  // narrower, and still as good here
  of.extent.searches = parts.data();
  of.extent.num_searches = 3;
  Given got(sizes);
  CHECK_OK(got.run(nullptr, of));
  int64_t same = 0;
  for (size_t i = 0; i < whole.size(); ++i) same += got.ids[i] == whole[i];
  CHECK(same >= static_cast<int64_t>(whole.size()) - 4 * sizes.num_queries);
  for (int64_t row = 0; row < sizes.num_queries; ++row)  // head 0 was searched in full width
    for (int64_t i = 0; i < sizes.width; ++i) {
      const auto at = static_cast<size_t>(row * sizes.width + i);
      CHECK(got.ids[at] == whole[at]);
    }
  parts[1].width = sizes.width;
  CHECK_OK(got.run(nullptr, of));
  CHECK(got.ids == whole);
  check_parts(of, got, 0.0f, all_pages(of), whole);
}

/// The cold entries of a case in several extents, whose ends its searches do not know of.
struct InExtents {
  const LayerCase &of;
  std::vector<std::vector<hkv_flat_head>> flat;
  std::vector<hkv_search> searches;
  std::vector<hkv_extent> extents;
  hkv_layer layer;

  /// ends: of the extents; beyond: further keys that the searches find.
  InExtents(const LayerCase &of, const std::vector<int64_t> &ends, int64_t beyond)
      : of(of), flat(ends.size()), searches(ends.size(), of.searches[0]), layer(of.layer) {
    int64_t first = 0;
    const int64_t size = of.sizes.dtype == HKV_F32 ? 4 : 2;
    for (size_t at = 0; at < ends.size(); ++at) {
      const int64_t count = ends[at] - first;
      for (int32_t head = 0; head < of.sizes.heads; ++head) {
        flat[at].push_back({of.keys_of(head, first), nullptr});
        int64_t &keys = flat[at].back().keys.count;
        keys = std::min(keys, count + beyond);
      }
      searches[at].head = flat[at].data();
      searches[at].width = of.sizes.width + beyond;
      hkv_extent extent = of.extent;
      for (hkv_keys *rows : {&extent.kv.keys, &extent.kv.values}) {
        rows->data = static_cast<const uint8_t *>(rows->data) + first * rows->dim * size;
        rows->count = count;
      }
      extents.push_back(extent);
      first = ends[at];
    }
    for (size_t at = 0; at < ends.size(); ++at) {
      extents[at].searches = &searches[at];
      extents[at].num_searches = 1;
    }
    layer.cold.extents = extents.data();
    layer.cold.num_extents = static_cast<int32_t>(ends.size());
  }

  int run(hkv_pool *pool, Given &got, const std::vector<int64_t> &named = {}) const {
    hkv_step step{of.queries.keys().data, of.sizes.dtype, HKV_F32, of.sizes.tail_fill, 0.5f,
                  0.0f, nullptr, 0, got.ids.data(), got.out.data(), got.lse.data()};
    if (!named.empty()) {
      step.named = named.data();
      step.num_named = static_cast<int64_t>(named.size() / got.lse.size());
    }
    return hkv_attend_step(pool, &layer, &step, &got.report);
  }
};

CLAIM(extents_attended_whole_are_those_whose_searches_find_all) {
  for (const int32_t dtype : {HKV_F32, HKV_BF16})
    for (const int64_t num_pages : {0, 5})
      for (const std::vector<int64_t> &ends :
           std::vector<std::vector<int64_t>>{{1}, {300}, {130, 131, 300}, {4100, 9001}}) {
        Sizes sizes;
        sizes.dtype = dtype;
        sizes.num_cold = sizes.width = ends.back();
        sizes.num_pages = sizes.num_chosen = num_pages;
        const LayerCase of(sizes);
        Given found(sizes), got(sizes);
        CHECK_OK(found.run(nullptr, of));
        InExtents whole(of, ends, 0);
        std::vector<hkv_kv> entries;
        for (const hkv_extent &extent : whole.extents) entries.push_back(extent.kv);
        if (num_pages == 0) whole.layer.resident.kv = whole.layer.cold.extents[0].kv;
        whole.layer.cold = {};
        whole.layer.whole = entries.data();
        whole.layer.num_whole = static_cast<int32_t>(entries.size());
        ScopedPool pool(2);
        CHECK_OK(whole.run(pool.get(), got));
        CHECK(got.report.retrieved == 0 && got.report.scored == 0);
        for (size_t at = 0; at < got.lse.size(); ++at)
          CHECK(std::fabs(got.lse[at] - found.lse[at]) < 1e-4f);
        for (size_t at = 0; at < got.out.size(); ++at)
          CHECK(std::fabs(got.out[at] - found.out[at]) < 1e-4f);
        entries[0].keys.dim += 1;
        CHECK(whole.run(nullptr, got) != HKV_OK);
        whole.layer.whole = nullptr;
        CHECK(whole.run(nullptr, got) != HKV_OK);
      }
}

CLAIM(a_step_attends_entries_of_several_extents_as_if_they_lay_together) {
  for (const int32_t dtype : {HKV_F32, HKV_BF16})
    for (const std::vector<int64_t> &ends : std::vector<std::vector<int64_t>>{
             {300}, {1, 300}, {130, 131, 290, 300}, {295, 300}})
      for (const int64_t beyond : {0, 7}) {
        Sizes sizes;
        sizes.dtype = dtype;
        const LayerCase of(sizes);
        const InExtents parts(of, ends, beyond);
        const std::vector<int64_t> best = found(of, of.searches[0]);
        Given got(sizes);
        ScopedPool pool(2);
        CHECK_OK(parts.run(pool.get(), got));
        check_parts(of, got, 0.0f, all_pages(of), best);
        CHECK(got.report.retrieved == sizes.heads * sizes.num_queries * sizes.width);
        Given named(sizes);
        CHECK_OK(parts.run(pool.get(), named, named_among(of, 5)));
        check_parts(of, named, 0.0f, all_pages(of), best);
      }
}

CLAIM(a_step_takes_up_what_was_found_in_its_first_extent) {
  Sizes sizes;
  const LayerCase of(sizes);
  for (const int64_t cut : {130, 295}) {
    const InExtents parts(of, {cut, sizes.num_cold}, 0);
    const auto places = static_cast<size_t>(sizes.heads * sizes.num_queries * sizes.width);
    std::vector<int64_t> ids(places);
    std::vector<float> scores(places), queries;
    for (int64_t row = 0; row < of.queries.count(); ++row)
      for (int32_t d = 0; d < sizes.dim; ++d) queries.push_back(of.queries.at(row, d));
    CHECK_OK(hkv_flat_search(nullptr, sizes.heads, parts.flat[0].data(), queries.data(),
                             sizes.num_queries, sizes.width, 0, HKV_IDS_INT64, ids.data(),
                             scores.data(), nullptr));
    InExtents blind(of, {cut, sizes.num_cold}, 0);
    const std::vector<hkv_flat_head> wrong(of.flat.size());
    blind.searches[0].head = wrong.data();  // nobody may look there
    Given whole(sizes), got(sizes);
    CHECK_OK(parts.run(nullptr, whole));
    hkv_step step{of.queries.keys().data, sizes.dtype, HKV_F32, sizes.tail_fill, 0.5f,
                  0.0f, nullptr, 0, got.ids.data(), got.out.data(), got.lse.data()};
    step.found = ids.data();
    step.num_found = sizes.width;
    CHECK_REFUSED(hkv_attend_step(nullptr, &blind.layer, &step, &got.report), "must have scores");
    step.found_scores = scores.data();
    ScopedPool pool(2);
    CHECK_OK(hkv_attend_step(pool.get(), &blind.layer, &step, &got.report));
    CHECK(got.ids == whole.ids && got.out == whole.out && got.lse == whole.lse);
    CHECK(got.report.scored ==
          whole.report.scored - sizes.heads * sizes.num_queries * cut);
    step.named = ids.data();
    step.num_named = sizes.width;
    CHECK_REFUSED(hkv_attend_step(nullptr, &blind.layer, &step, &got.report), "not be named");
  }
}

CLAIM(a_step_passes_over_what_the_row_does_not_see) {
  Sizes sizes;
  const LayerCase of(sizes);
  std::vector<hkv_flat_head> short_heads = of.flat;
  for (hkv_flat_head &head : short_heads) head.keys.count = 280;
  hkv_search shorter = of.searches[0];
  shorter.head = short_heads.data();
  const InExtents parts(of, {280}, 20);
  Given got(sizes);
  CHECK_OK(parts.run(nullptr, got));
  check_parts(of, got, 0.0f, all_pages(of), found(of, shorter));
}

CLAIM(a_step_searches_graphs_and_sketches_as_their_own_calls_do) {
  Sizes sizes;
  sizes.heads = 2;
  sizes.num_pages = sizes.num_chosen = 2;
  LayerCase of(sizes);
  const Rows first(some(of.cold_keys, of_range(sizes.num_cold)), sizes.dim, sizes.dtype);
  const Rows second(some(of.cold_keys, of_range(sizes.num_cold, sizes.num_cold)), sizes.dim,
                    sizes.dtype);
  const Rows linked(some(first, of_range(sizes.num_cold - 20)), sizes.dim);
  const std::vector<int32_t> lists = best_keys(linked, random_floats(40 * sizes.dim, 7), 12);
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 12, sizes.num_cold - 20, 8), graph));
  const GraphCase graphs(first, graph);
  const SketchCase sketches(second, sizes.num_cold - 30, 2);
  const hkv_graph_head graph_head = graphs.head();
  const hkv_sketch_head sketch_head = sketches.head(25);
  const int32_t heads[] = {0, 1}, walks[] = {1};
  const hkv_search parts[] = {
      {HKV_SEARCH_GRAPH, 1, &heads[0], &graph_head, 0, sizes.width, 40, beams_of(30), walks, 4},
      {HKV_SEARCH_SKETCH, 1, &heads[1], &sketch_head, 0, sizes.width, 0, nullptr, nullptr, 0}};
  of.extent.searches = parts;
  of.extent.num_searches = 2;
  std::vector<float> queries;
  for (int64_t row = 0; row < of.queries.count(); ++row)
    for (int32_t d = 0; d < sizes.dim; ++d) queries.push_back(of.queries.at(row, d));
  const int64_t size = sizes.num_queries * sizes.width;
  std::vector<int64_t> ids(static_cast<size_t>(2 * size)), warm(ids.size(), -1);
  std::vector<float> scores(ids.size());
  for (const bool is_warm : {false, true}) {
    const hkv_graph_query query{beams_of(30), static_cast<int32_t>(sizes.num_queries),
                                static_cast<int32_t>(sizes.width), 40, 4,
                                static_cast<int32_t>(is_warm ? sizes.width : 0),
                                std::numeric_limits<float>::infinity(), walks};
    int64_t rows, dots, scored;
    CHECK_OK(hkv_graph_search(nullptr, 1, &graph_head, &query, queries.data(),
                              is_warm ? warm.data() : nullptr, ids.data(), scores.data(), &rows,
                              &dots));
    CHECK_OK(hkv_sketch_search(nullptr, 1, &sketch_head,
                               queries.data() + sizes.num_queries * sizes.dim, sizes.num_queries,
                               sizes.width, ids.data() + size, scores.data() + size, &scored,
                               nullptr));
    Given got(sizes);
    const hkv_step step{of.queries.keys().data, sizes.dtype, HKV_F32, sizes.tail_fill, 0.5f, 0.0f,
                        is_warm ? warm.data() : nullptr, sizes.width, got.ids.data(),
                        got.out.data(), got.lse.data()};
    CHECK_OK(hkv_attend_step(nullptr, &of.layer, &step, &got.report));
    check_parts(of, got, 0.0f, all_pages(of), ids);
    CHECK(got.report.scored == dots + scored);
    warm = ids;
  }
}

CLAIM(a_step_begins_the_graph_of_an_extent_at_its_own_warm_entries) {
  Sizes sizes;
  sizes.heads = 1;
  const int64_t half = sizes.num_cold / 2;
  const LayerCase of(sizes);
  InExtents parts(of, {half, sizes.num_cold}, 0);
  std::vector<std::unique_ptr<Rows>> rows;
  for (const int64_t first : {int64_t{0}, half})
    rows.push_back(std::make_unique<Rows>(some(of.cold_keys, of_range(half, first)), sizes.dim,
                                          sizes.dtype));
  std::vector<std::unique_ptr<Graph>> graphs;
  std::vector<std::unique_ptr<GraphCase>> cases;
  std::vector<hkv_graph_head> heads;
  const int32_t walks[] = {1};
  for (size_t at = 0; at < 2; ++at) {
    const Rows plain(some(*rows[at], of_range(half)), sizes.dim);
    const std::vector<int32_t> lists = best_keys(plain, random_floats(40 * sizes.dim, 7), 12);
    graphs.push_back(std::make_unique<Graph>());
    CHECK_OK(build(nullptr, projection_of(lists, 12, half, 8), *graphs[at]));
    cases.push_back(std::make_unique<GraphCase>(*rows[at], *graphs[at]));
    heads.push_back(cases[at]->head());
    heads[at].num_entries = 0;  // nothing is found but from warm entries on
  }
  for (size_t at = 0; at < 2; ++at)
    parts.searches[at] = {HKV_SEARCH_GRAPH, 1,  of.heads.data(), &heads[at], 0,
                          sizes.width,      40, beams_of(30),    walks,      4};
  const auto places = static_cast<size_t>(sizes.num_queries);
  for (const size_t at : {size_t{0}, size_t{1}}) {
    const int64_t first = at == 0 ? 0 : half;
    std::vector<int64_t> warm(2 * places, -1), own(2 * places, -1);
    for (size_t query = 0; query < places; ++query) {
      own[2 * query] = heads[at].keys_of[7];
      warm[2 * query] = first + own[2 * query];
    }
    const hkv_graph_query query{beams_of(30), static_cast<int32_t>(sizes.num_queries),
                                static_cast<int32_t>(sizes.width), 40, 4, 2,
                                std::numeric_limits<float>::infinity(), walks};
    std::vector<float> queries;
    for (int64_t row = 0; row < of.queries.count(); ++row)
      for (int32_t d = 0; d < sizes.dim; ++d) queries.push_back(of.queries.at(row, d));
    std::vector<int64_t> ids(places * static_cast<size_t>(sizes.width));
    std::vector<float> scores(ids.size());
    int64_t scored_rows, dots;
    CHECK_OK(hkv_graph_search(nullptr, 1, &heads[at], &query, queries.data(), own.data(), ids.data(),
                              scores.data(), &scored_rows, &dots));
    CHECK(ids[0] >= 0);
    Given got(sizes);
    const hkv_step step{of.queries.keys().data, sizes.dtype, HKV_F32, sizes.tail_fill, 0.5f, 0.0f,
                        warm.data(), 2, got.ids.data(), got.out.data(), got.lse.data()};
    CHECK_OK(hkv_attend_step(nullptr, &parts.layer, &step, &got.report));
    for (size_t i = 0; i < ids.size(); ++i)
      CHECK(got.ids[i] == (ids[i] < 0 ? -1 : first + ids[i]));
  }
}

CLAIM(a_step_chooses_the_pages_of_the_highest_bounds) {
  for (const int64_t chosen : {3, 4, 7, 10}) {
    Sizes sizes;
    sizes.num_pages = 40;
    sizes.num_chosen = chosen;
    sizes.num_cold = chosen == 7 ? 50 : 0;
    LayerCase of(sizes);
    of.add_digests();
    Given got(sizes);
    ScopedPool pool(2);
    CHECK_OK(got.run(pool.get(), of));
    std::vector<std::vector<int64_t>> pages;
    const auto others = static_cast<int64_t>(of.slots.size()) - 1;
    for (int32_t head = 0; head < sizes.heads; ++head) {
      std::vector<std::pair<double, int64_t>> bounds;
      for (int64_t page = 0; page < others; ++page) {
        double best = page < sizes.oldest || page > others - sizes.newest ? 1e9 : -1e9;
        for (int64_t query = 0; query < sizes.num_queries; ++query) {
          double bound = 0;
          for (int32_t d = 0; d < sizes.dim; ++d) {
            const double q = static_cast<double>(of.queries.at(head * sizes.num_queries + query, d));
            const auto at = static_cast<size_t>(
                (head * of.num_slots + of.slots[static_cast<size_t>(page)]) * sizes.dim + d);
            bound += std::max(q * static_cast<double>(of.lows[at]),
                              q * static_cast<double>(of.highs[at]));
          }
          best = std::max(best, bound);
        }
        bounds.push_back({-best, of.slots[static_cast<size_t>(page)]});
      }
      std::sort(bounds.begin(), bounds.end());
      pages.emplace_back();
      for (int64_t i = 0; i + 1 < chosen; ++i)
        pages.back().push_back(bounds[static_cast<size_t>(i)].second);
      pages.back().push_back(of.slots.back());
    }
    check_parts(of, got, 0.0f, pages,
                sizes.num_cold > 0 ? found(of, of.searches[0]) : std::vector<int64_t>());
    const int64_t cold = sizes.num_cold;
    CHECK(got.report.scored ==
          sizes.heads * sizes.num_queries * (static_cast<int64_t>(of.slots.size()) + cold));
  }
}

/// A layer whose steps bring a token, which is read from rows that are further apart than they are long.
struct WithToken {
  explicit WithToken(const Sizes &sizes)
      : of(sizes),
        key_step(sizes.dim + 5),
        value_step(sizes.value_dim + 2),
        keys(random_floats(sizes.heads * key_step, 11)),
        values(random_floats(sizes.heads * value_step, 12)),
        positions(static_cast<size_t>(of.num_slots * sizes.page_size), -1),
        got(sizes) {
    of.add_digests();
    const hkv_kv &kv = of.layer.resident.kv;
    pages = {const_cast<void *>(kv.keys.data), const_cast<void *>(kv.values.data), positions.data(),
             of.lows.data(), of.highs.data(), of.num_slots, sizes.page_size, sizes.heads, sizes.dim,
             sizes.value_dim, sizes.dtype};
    of.layer.pages = &pages;
  }

  int64_t place() const { return of.slots.back() * of.sizes.page_size + of.sizes.tail_fill - 1; }

  int run(bool brings) {
    const hkv_step step{of.queries.keys().data, of.sizes.dtype, HKV_F32, of.sizes.tail_fill, 0.5f,
                        0.0f, nullptr, 0, got.ids.data(), got.out.data(), got.lse.data(),
                        brings ? keys.data() : nullptr, values.data(), key_step, value_step, 77};
    return hkv_attend_step(nullptr, &of.layer, &step, &got.report);
  }

  LayerCase of;
  int64_t key_step, value_step;
  std::vector<float> keys, values;
  std::vector<int64_t> positions;
  hkv_pages pages;
  Given got;
};

CLAIM(a_step_stores_its_token_before_it_attends) {
  for (const int64_t chosen : {3, 5}) {
    Sizes sizes;
    sizes.dtype = HKV_F32;
    sizes.num_chosen = chosen;
    WithToken one(sizes), apart(sizes);
    CHECK_OK(one.run(true));
    CHECK_OK(hkv_append(&apart.pages, apart.keys.data(), apart.key_step, apart.values.data(),
                        apart.value_step, apart.of.slots.back(), sizes.tail_fill - 1, 77));
    CHECK_OK(apart.run(false));
    CHECK(one.got.out == apart.got.out && one.got.lse == apart.got.lse);
    CHECK(one.positions == apart.positions);
    CHECK(one.positions[static_cast<size_t>(one.place())] == 77);
    CHECK(one.of.lows == apart.of.lows && one.of.highs == apart.of.highs);
    const auto rows = static_cast<size_t>(sizes.heads * one.of.num_slots * sizes.page_size);
    CHECK(std::memcmp(one.pages.keys, apart.pages.keys, 4 * rows * sizes.dim) == 0);
    CHECK(std::memcmp(one.pages.values, apart.pages.values, 4 * rows * sizes.value_dim) == 0);
  }
}

CLAIM(a_step_that_fails_stores_no_token) {
  Sizes sizes;
  sizes.dtype = HKV_F32;
  WithToken with(sizes);
  const std::vector<int64_t> none = with.positions;
  const LayerCase before(sizes);
  const auto is_untouched = [&] {
    const auto rows = static_cast<size_t>(sizes.heads * with.of.num_slots * sizes.page_size);
    return with.positions == none &&
           std::memcmp(with.pages.keys, before.page_keys.keys().data, 4 * rows * sizes.dim) == 0;
  };
  for (const float bad : {std::nanf(""), -std::numeric_limits<float>::infinity()}) {
    float &last = with.keys[static_cast<size_t>(with.key_step + sizes.dim - 1)];
    const float good = last;
    last = bad;
    CHECK(with.run(true) == HKV_NOT_FINITE && is_untouched());
    last = good;
  }
  with.pages.slots -= 1;
  CHECK_REFUSED(with.run(true), "sizes of those that are attended");
  with.pages.slots += 1;
  with.of.searches[0].num_ranked = -1;  // found out when the token lies there already
  CHECK_REFUSED(with.run(true), "rerank");
  CHECK(with.positions == none);
  with.of.searches[0].num_ranked = 0;
  with.of.layer.pages = nullptr;
  CHECK_REFUSED(with.run(true), "must not be NULL");
  with.of.layer.pages = &with.pages;
  CHECK_OK(with.run(true));
}

CLAIM(a_step_attends_what_it_does_not_find_by_its_moments) {
  Sizes sizes;
  sizes.dtype = HKV_F32;
  // Of width 300 nothing is left; and of a pool of 300 entries a row's own may be fewer.
  const std::vector<std::vector<int64_t>> cases{{1, 0}, {9, 0}, {300, 0}, {1, 200}, {300, 200}};
  for (const auto &one : cases) {
    const int64_t width = one[0], entries = one[1];
    sizes.width = width;
    sizes.num_queries = width == 1 ? 3 : 5;  // four of them share a pass over the moments
    LayerCase of(sizes);
    const auto heads = static_cast<size_t>(sizes.heads), dim = static_cast<size_t>(sizes.dim);
    const auto row = static_cast<size_t>(sizes.value_dim);
    const std::vector<float> shares(heads, 1.0f), keys(heads * dim, 0.0f);
    const std::vector<float> values(random_floats(heads * row, 21));
    std::vector<float> key_key(heads * dim * dim, 0.0f), key_value(heads * dim * row, 0.0f);
    for (size_t at = 0; at < heads; ++at)  // a logit is normal around 0, and values hang on it
      for (size_t d = 0; d < dim; ++d) {
        key_key[(at * dim + d) * dim + d] = 0.01f;
        for (size_t e = 0; e < row; ++e) key_value[(at * dim + d) * row + e] = d == e ? 0.02f : 0.0f;
      }
    Given plain(sizes), got(sizes);
    CHECK_OK(plain.run(nullptr, of));
    of.extent.tail = {shares.data(),  keys.data(),      values.data(),
                      key_key.data(), key_value.data(), 1, 0, entries};
    CHECK_OK(got.run(nullptr, of));
    CHECK(got.ids == plain.ids);
    const int64_t all = entries > 0 ? entries : sizes.num_cold;
    const double left = static_cast<double>(std::max<int64_t>(0, all - width));
    for (size_t at = 0; at < plain.lse.size(); ++at) {
      const size_t head = at / static_cast<size_t>(sizes.num_queries);
      double variance = 0.0;  // no limit is near: what was found lies far above these logits
      for (int32_t d = 0; d < sizes.dim; ++d) {
        const double part = 0.5 * of.queries.at(static_cast<int64_t>(at), d);
        variance += 0.01 * part * part;
      }
      const double estimate = std::log(left) + variance / 2;
      const double lse = width == 300 ? plain.lse[at] : std::log(std::exp(plain.lse[at]) +
                                                                 std::exp(estimate));
      CHECK(std::fabs(got.lse[at] - lse) < (width == 9 ? 0.02 : 1e-3));
      const double share = std::exp(plain.lse[at] - lse), anchored = std::exp(-variance / 2);
      for (size_t e = 0; e < row; ++e) {
        const double part = 0.5 * of.queries.at(static_cast<int64_t>(at), static_cast<int32_t>(e));
        double sum = 0.0;  // of the values that were found, which leave the mean of the others
        for (size_t i = 0; i < static_cast<size_t>(width); ++i) {
          const int64_t id = plain.ids[at * static_cast<size_t>(width) + i];
          sum += of.cold_values.at(static_cast<int64_t>(head) * sizes.num_cold + id,
                                   static_cast<int32_t>(e));
        }
        const double mean = values[head * row + e];
        const double unread = left > 0.0 ? (static_cast<double>(width) * mean - sum) / left : 0.0;
        const double estimated = mean + anchored * unread + 0.02 * part;
        const double out = share * plain.out[at * row + e] + (1.0 - share) * estimated;
        CHECK(std::fabs(got.out[at * row + e] - out) < (width == 9 ? 0.02 : 1e-3));
      }
    }
  }
}

/// What a layer gives by the best `count` of the entries that `from` found, named in the place of a search.
Given of_best(LayerCase &of, const Given &from, int64_t count, float softcap) {
  Sizes sizes = of.sizes;
  sizes.width = std::max<int64_t>(1, count);
  std::vector<int64_t> named;
  for (size_t at = 0; at < from.lse.size(); ++at)
    for (int64_t i = 0; i < sizes.width; ++i)
      named.push_back(count == 0 ? -1 : from.ids[at * static_cast<size_t>(of.sizes.width) +
                                                 static_cast<size_t>(i)]);
  Given got(sizes);
  of.layer.cold.width = sizes.width;
  CHECK_OK(got.run(nullptr, of, softcap, named));
  of.layer.cold.width = of.sizes.width;
  return got;
}

CLAIM(a_step_tells_how_far_half_of_what_it_found_moves_it) {
  for (const int64_t width : {0, 1, 2, 9, 300})  // of 0: nothing is cold
    for (const int32_t dtype : {HKV_F32, HKV_BF16})
      for (const bool estimates : {false, true}) {
        Sizes sizes;
        sizes.dtype = dtype;
        sizes.width = std::max<int64_t>(1, width);
        if (width == 0) sizes.num_cold = 0;
        sizes.num_queries = width == 9 ? 5 : 3;
        const float softcap = width == 2 ? 2.0f : 0.0f;
        LayerCase of(sizes);
        const auto heads = static_cast<size_t>(sizes.heads), dim = static_cast<size_t>(sizes.dim);
        const auto row = static_cast<size_t>(sizes.value_dim);
        const size_t clusters = 19;  // not a whole number of vectors
        const std::vector<float> shares(heads * clusters, 1.0f / 19);
        const std::vector<float> keys(random_floats(heads * clusters * dim, 23));
        const std::vector<float> values(random_floats(heads * clusters * row, 21));
        std::vector<float> key_key(heads * dim * dim, 0.0f);
        const std::vector<float> key_value(random_floats(heads * dim * row, 22));
        for (size_t at = 0; at < heads * dim; ++at) key_key[at * dim + at % dim] = 0.3f;
        if (estimates && width > 0)
          of.extent.tail = {shares.data(),    keys.data(), values.data(), key_key.data(),
                            key_value.data(), clusters,    0};
        Given plain(sizes), got(sizes);
        CHECK_OK(plain.run(nullptr, of, softcap));
        std::vector<float> half(plain.lse.size(), 7.0f);
        got.half = half.data();
        CHECK_OK(got.run(nullptr, of, softcap));
        CHECK(got.ids == plain.ids && got.report.rows_read == plain.report.rows_read &&
              got.report.retrieved == plain.report.retrieved);
        for (size_t i = 0; i < plain.out.size(); ++i)
          CHECK(std::fabs(got.out[i] - plain.out[i]) < 1e-6);
        if (width == 0) {
          for (const float one : half) CHECK(one == 0.0f);
          continue;
        }
        const Given best = of_best(of, plain, width / 2, softcap);
        for (size_t at = 0; at < half.size(); ++at) {
          double moved = 0.0, size = 0.0;
          for (size_t i = at * row; i < (at + 1) * row; ++i) {
            moved += std::pow(plain.out[i] - best.out[i], 2);
            size += std::pow(plain.out[i], 2);
          }
          CHECK(half[at] > 1e-3 && std::fabs(half[at] - std::sqrt(moved / size)) < 2e-5);
        }
      }
}

CLAIM(several_steps_are_what_each_is_alone) {
  std::deque<LayerCase> cases;  // they stay where they are: layers point at them
  for (const int64_t width : {3, 9, 1, 5, 300}) {
    Sizes sizes;
    sizes.width = width;
    sizes.heads = 1 + static_cast<int32_t>(width % 3);
    cases.emplace_back(sizes);
  }
  const size_t bad = 3;
  for (const int32_t threads : {1, 2, 3, 8}) {
    ScopedPool pool(threads);
    std::vector<Given> alone, got;
    std::vector<hkv_step> steps;
    std::vector<hkv_one_step> calls;
    for (const LayerCase &of : cases) {
      alone.emplace_back(of.sizes);
      CHECK_OK(alone.back().run(pool.get(), of));
      got.emplace_back(of.sizes);
    }
    for (size_t at = 0; at < cases.size(); ++at) {
      steps.push_back({cases[at].queries.keys().data, cases[at].sizes.dtype, HKV_F32,
                       at == bad ? int64_t{0} : cases[at].sizes.tail_fill, 0.5f, 0.0f, nullptr, 0,
                       got[at].ids.data(), got[at].out.data(), got[at].lse.data()});
    }
    for (size_t at = 0; at < cases.size(); ++at)
      calls.push_back({&cases[at].layer, &steps[at], &got[at].report, -1});
    CHECK_OK(hkv_attend_steps(pool.get(), static_cast<int64_t>(calls.size()), calls.data()));
    for (size_t at = 0; at < cases.size(); ++at) {
      CHECK(calls[at].status == (at == bad ? HKV_INVALID : HKV_OK));
      if (at == bad) continue;
      CHECK(got[at].out == alone[at].out && got[at].lse == alone[at].lse);
      CHECK(got[at].ids == alone[at].ids);
      CHECK(got[at].report.scored == alone[at].report.scored);
    }
  }
  CHECK_OK(hkv_attend_steps(nullptr, 0, nullptr));
  CHECK_REFUSED(hkv_attend_steps(nullptr, 1, nullptr), "must not be NULL");
  CHECK_REFUSED(hkv_attend_steps(nullptr, -1, nullptr), "num_steps");
}

CLAIM(a_step_refuses_what_does_not_fit) {
  const Sizes sizes;
  LayerCase of(sizes);
  const LayerCase good(sizes);
  Given got(sizes);
  const auto refused = [&](const char *why) {
    CHECK_REFUSED(got.run(nullptr, of), why);
    of.layer = good.layer;
    of.layer.resident.slots = of.slots.data();
    of.layer.cold.extents = &of.extent;
    of.extent = good.extent;
    of.extent.searches = of.searches.data();
    of.searches[0] = good.searches[0];
  };
  CHECK_OK(got.run(nullptr, of));
  CHECK_REFUSED(hkv_attend_step(nullptr, nullptr, nullptr, nullptr), "must not be NULL");
  of.layer.heads = 0;
  refused("heads");
  of.layer.num_queries = 0;
  refused("queries");
  of.slots[0] = of.num_slots;
  refused("a page lies beyond the rows");
  of.slots[0] = good.slots[0];
  of.layer.resident.page_size = 3;
  refused("tail_fill");
  of.layer.resident.num_chosen = 2;
  refused("chosen pages");
  of.layer.resident.num_chosen = 3;
  refused("digest");
  of.extent.kv.values.dim = 4;
  of.extent.kv.keys.dim = 20;
  refused("agree in dim");
  of.layer.cold.width = 0;
  refused("width");
  of.searches[0].kind = 3;
  refused("a search must be flat");
  of.searches[0].first_row = -1;
  refused("first_row");
  of.extent.num_searches = 0;
  refused("an extent must have searches");
  of.layer.cold.extents = nullptr;
  refused("extents must not be NULL");
  of.extent.kv.keys.count = of.extent.kv.values.count = 0;
  refused("an extent must have entries");
  const float moment = 0.0f;
  of.extent.tail.keys = &moment;
  refused("all of its moments");
  of.extent.tail = {&moment, &moment, &moment, &moment, &moment, 0, 0};
  refused("must have clusters");
  for (const int64_t entries : {int64_t{-1}, good.extent.kv.keys.count + 1}) {
    of.extent.tail = {&moment, &moment, &moment, &moment, &moment, 1, 0, entries};
    refused("entries of its extent");
  }
  const int32_t heads[] = {0, 2};
  of.searches[0].heads = heads;
  refused("a head that the layer has not");
  of.searches[0].num_ranked = -1;  // what the search itself refuses
  refused("rerank");
  CHECK_OK(got.run(nullptr, of));
}
