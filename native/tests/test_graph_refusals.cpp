// What building and searching a graph refuse.
#include <limits>

#include "graph_case.h"

namespace {

constexpr int64_t kKeys = 40;

int cover(const hkv_projection &projection,
          std::vector<int32_t> list_of = std::vector<int32_t>(kKeys, -1)) {
  int64_t num_lists = 0;
  return hkv_graph_cover(&projection, list_of.data(), &num_lists);
}

}  // namespace

CLAIM(a_build_refuses_what_is_out_of_range) {
  const std::vector<int32_t> lists(60, 3);
  const hkv_projection good = projection_of(lists, 6, kKeys, 8);
  CHECK_OK(cover(good));
  hkv_projection bad = good;
  const auto refused = [&](const char *text) {
    CHECK_REFUSED(cover(bad), text);
    std::vector<int32_t> list_of(kKeys, -1), neighbours(8), entries(3);
    const std::vector<int16_t> points = random_points(1, 1);
    list_of[3] = 0;
    CHECK_REFUSED(hkv_graph_project(nullptr, &bad, list_of.data(), 1, 0, points.data(),
                                    neighbours.data(), entries.data()),
                  text);
    bad = good;
  };
  for (const int64_t keys : {int64_t{-1}, int64_t{INT32_MAX}, INT64_MAX})
    bad.num_keys = keys, refused("num_keys");
  for (const int64_t queries : {int64_t{-1}, INT64_MIN})
    bad.num_queries = queries, refused("at least 0");
  bad.num_queries = INT64_MAX, refused("fewer than 2^32");
  bad.list_length = -1, refused("at least 0");
  bad.list_length = 65536, refused("65535");
  bad.extra_length = -1, refused("at least 0");
  bad.lists = nullptr, refused("lists must not be NULL");
  bad.extra_length = 1, refused("extra must not be NULL");
  for (const int32_t degree : {0, -1, 257})
    bad.degree = degree, refused("max_degree must be 1..256");
  for (const int32_t cap : {1, 0, -1, 255}) bad.cap = cap, refused("cap must be 2..254");
  for (const int32_t candidates : {0, -1, 1 << 24})
    bad.candidates = candidates, refused("candidates");
  for (const int32_t entries : {0, -1}) bad.num_entries = entries, refused("num_entries");
  for (const float alpha : {0.0f, -1.0f, std::nanf("")}) bad.alpha = alpha, refused("alpha");
}

CLAIM(a_build_of_no_keys_needs_no_arrays) {
  hkv_projection projection = projection_of({}, 0, 0, 8);
  projection.lists = nullptr;
  projection.extra_length = 2;
  Graph graph;
  CHECK_OK(build(nullptr, projection, graph));
}

CLAIM(a_build_refuses_keys_and_lists_that_do_not_exist) {
  for (const int32_t id : {-2, static_cast<int32_t>(kKeys), INT32_MAX, INT32_MIN}) {
    std::vector<int32_t> lists(60, 3);
    lists[17] = id;
    CHECK_REFUSED(cover(projection_of(lists, 6, kKeys, 8)), "a key that does not exist");
    const std::vector<int32_t> fine(60, 3);
    std::vector<int32_t> extra(kKeys, -1);
    extra[kKeys - 1] = id;
    hkv_projection projection = projection_of(fine, 6, kKeys, 8);
    projection.extra = extra.data();
    projection.extra_length = 1;
    CHECK_REFUSED(cover(projection), "a key that does not exist");
  }
  const std::vector<int32_t> lists(60, 3);
  std::vector<int32_t> list_of(kKeys, -1);
  for (const int32_t list : {0, -2}) {
    list_of[5] = list;
    CHECK_REFUSED(cover(projection_of(lists, 6, kKeys, 8), list_of), "list_of");
  }
}

CLAIM(a_projection_checks_what_it_is_given_by_itself) {
  const std::vector<int32_t> lists(60, 3);
  const hkv_projection projection = projection_of(lists, 6, kKeys, 8);
  std::vector<int32_t> list_of(kKeys, -1), neighbours(2 * 8, -1), entries(3);
  std::vector<int16_t> points = random_points(2, 1);
  list_of[3] = 0;
  list_of[4] = 1;
  const auto project = [&](const hkv_projection &what, int64_t first = 0) {
    return hkv_graph_project(nullptr, &what, list_of.data(), 2, first, points.data(),
                             neighbours.data(), entries.data());
  };
  CHECK_OK(project(projection));
  std::vector<int32_t> bad = lists;
  for (const int32_t id : {-2, static_cast<int32_t>(kKeys), INT32_MAX}) {
    bad[7] = id;
    CHECK_REFUSED(project(projection_of(bad, 6, kKeys, 8)), "a key that does not exist");
  }
  bad[7] = 5;
  CHECK_REFUSED(project(projection_of(bad, 6, kKeys, 8)), "a key that has no list");
  for (const int32_t list : {-2, 2}) {
    list_of[9] = list;
    CHECK_REFUSED(project(projection), "list_of names no list");
  }
  list_of[9] = -1;
  for (const int32_t neighbour : {-2, 2}) {
    neighbours[0] = neighbour;
    CHECK_REFUSED(project(projection, 1), "does not exist");
  }
  neighbours[0] = -1;
  for (const int value : {4096, -4096, INT16_MAX, INT16_MIN}) {
    points[63] = static_cast<int16_t>(value);
    CHECK_REFUSED(project(projection), "points must be");
  }
}

CLAIM(packing_refuses_what_does_not_fit) {
  std::vector<int32_t> neighbours(3 * 4, -1);
  std::vector<uint8_t> lists(static_cast<size_t>(3 * hkv_graph_list_bytes(4, 3)));
  CHECK_OK(hkv_graph_pack(nullptr, 4, 3, neighbours.data(), lists.data()));
  for (const int32_t node : {-2, 3, INT32_MAX}) {
    neighbours[11] = node;
    CHECK_REFUSED(hkv_graph_pack(nullptr, 4, 3, neighbours.data(), lists.data()), "does not exist");
  }
  for (const int32_t degree : {0, -1, 257, INT32_MAX, INT32_MIN}) {
    CHECK_REFUSED(hkv_graph_pack(nullptr, degree, 3, neighbours.data(), lists.data()),
                  "max_degree");
    CHECK_REFUSED(hkv_graph_unpack(nullptr, degree, 3, lists.data(), neighbours.data()),
                  "max_degree");
    CHECK(hkv_graph_list_bytes(degree, 3) == 0);
  }
  for (const int64_t nodes : {int64_t{-1}, int64_t{INT32_MAX}, INT64_MAX, INT64_MIN}) {
    CHECK_REFUSED(hkv_graph_pack(nullptr, 4, nodes, neighbours.data(), lists.data()), "num_nodes");
    CHECK_REFUSED(hkv_graph_unpack(nullptr, 4, nodes, lists.data(), neighbours.data()),
                  "num_nodes");
    CHECK(hkv_graph_list_bytes(4, nodes) == 0);
  }
  CHECK_REFUSED(hkv_graph_pack(nullptr, 4, 3, nullptr, lists.data()), "NULL");
  CHECK_REFUSED(hkv_graph_pack(nullptr, 4, 3, neighbours.data(), nullptr), "NULL");
  CHECK_REFUSED(hkv_graph_unpack(nullptr, 4, 3, nullptr, neighbours.data()), "NULL");
  CHECK_REFUSED(hkv_graph_unpack(nullptr, 4, 3, lists.data(), nullptr), "NULL");
  CHECK_OK(hkv_graph_pack(nullptr, 4, 0, nullptr, nullptr));
}

CLAIM(a_build_refuses_missing_arrays) {
  const std::vector<int32_t> lists(60, 3);
  const hkv_projection good = projection_of(lists, 6, kKeys, 8);
  std::vector<int32_t> list_of(kKeys, -1), neighbours(8), entries(3);
  std::vector<int16_t> points(HKV_POINT_DIMS);
  int64_t num_lists = 0;
  CHECK_REFUSED(hkv_graph_cover(nullptr, list_of.data(), &num_lists), "NULL");
  CHECK_REFUSED(hkv_graph_cover(&good, nullptr, &num_lists), "NULL");
  CHECK_REFUSED(hkv_graph_cover(&good, list_of.data(), nullptr), "NULL");
  CHECK_OK(hkv_graph_cover(&good, list_of.data(), &num_lists));
  CHECK(num_lists == 1);
  for (const int64_t wrong : {int64_t{-1}, kKeys + 1, INT64_MAX}) {
    num_lists = wrong;
    CHECK_REFUSED(hkv_graph_cover(&good, list_of.data(), &num_lists), "num_lists");
  }
  const auto project = [&](const hkv_projection *projection, const int32_t *lists_of, int64_t num,
                           int64_t first, const int16_t *at, int32_t *to) {
    return hkv_graph_project(nullptr, projection, lists_of, num, first, at, to, entries.data());
  };
  CHECK_REFUSED(project(nullptr, list_of.data(), 1, 0, points.data(), neighbours.data()), "NULL");
  CHECK_REFUSED(project(&good, nullptr, 1, 0, points.data(), neighbours.data()), "NULL");
  CHECK_REFUSED(project(&good, list_of.data(), 1, 0, nullptr, neighbours.data()), "NULL");
  CHECK_REFUSED(project(&good, list_of.data(), 1, 0, points.data(), nullptr), "NULL");
  for (const int64_t first : {-1, 2})
    CHECK_REFUSED(project(&good, list_of.data(), 1, first, points.data(), neighbours.data()),
                  "first_list");
  CHECK_REFUSED(project(&good, list_of.data(), INT64_MAX, 0, points.data(), neighbours.data()),
                "num_lists");
}

CLAIM(a_search_refuses_what_does_not_fit) {
  const Rows rows(random_floats(kKeys * 8, 1), 8);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(30 * 8, 2), 9);
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 9, kKeys, 8), graph));
  const std::vector<float> queries = random_floats(8, 3);
  const hkv_graph_query fine{beams_of(10), 1, 5, 10, 4, 0,
                             std::numeric_limits<float>::infinity(), nullptr};
  GraphResult found;
  const GraphCase owner(rows, graph);
  hkv_graph_head head = owner.head();
  const hkv_graph_head good = head;
  hkv_graph_query query = fine;
  const auto refused = [&](const char *text) {
    hkv_graph_query allocated = fine;  // room for a valid search, whatever is asked for
    CHECK_OK(search(nullptr, {good}, allocated, queries, {}, found));
    CHECK_REFUSED(
        hkv_graph_search(nullptr, 1, &head, &query, queries.data(), nullptr, found.ids.data(),
                         found.scores.data(), found.rows.data(), found.dots.data()),
        text);
    head = good;
    query = fine;
  };
  query.queries = -1, refused("queries");
  for (const int32_t top_k : {0, -1, INT32_MIN}) query.top_k = top_k, refused("top_k");
  for (const int32_t size : {4, 0, -1, INT32_MAX}) query.pool_size = size, refused("pool_size");
  for (const int32_t beam : {0, -1, (1 << 20) + 1, INT32_MAX})
    query.beams = beams_of(beam), refused("beam must be");
  query.beams = nullptr, refused("beams must not be NULL");
  for (const int32_t walks : {0, -1, (1 << 20) + 1, INT32_MAX})
    query.walks = &walks, refused("walks must be");
  for (const int32_t width : {0, -1, 1025, INT32_MAX}) query.width = width, refused("width");
  for (const int32_t warm : {-1, INT32_MAX}) query.num_warm = warm, refused("num_warm");
  query.num_warm = 1, refused("warm must not be NULL");
  for (const float beta : {-1.0f, std::nanf("")}) query.beta = beta, refused("beta");
  head.keys.dim = 7, refused("agree in dim");
  head.keys.data = nullptr, refused("NULL");
  head.keys.count = kKeys + 1, refused("must be quantised");
  head.rows.count = head.num_nodes - 1, refused("all nodes must be quantised");
  head.rows.rows = nullptr, refused("rows and scale_codes come together");
  head.rows.rows = nullptr, head.rows.scale_codes = nullptr, refused("in rows");
  head.tail.dim = 7, refused("agree in dim");
  head.tail.mean = nullptr, refused("statistics must not be NULL");
  head.linked = head.num_nodes, head.keys.count = head.linked + 3, head.tail.count = 3,
  head.tail.capacity = 3, refused("in blocks");
  head.num_nodes = kKeys + 1, refused("num_nodes");
  head.num_nodes = -1, refused("num_nodes");
  head.lists = nullptr, refused("a graph must not be NULL");
  for (const int64_t linked : {int64_t{-1}, kKeys + 1, INT64_MAX})
    head.linked = linked, refused("linked");
  for (const int32_t degree : {0, -1, 257}) head.degree = degree, refused("max_degree");
  head.num_entries = -1, refused("at least 0");
  head.entries = nullptr, refused("entries must not be NULL");
  const auto call = [&](int32_t heads, const hkv_graph_head *one, const hkv_graph_query *what,
                        const float *q, int64_t *ids) {
    return hkv_graph_search(nullptr, heads, one, what, q, nullptr, ids, found.scores.data(),
                            found.rows.data(), found.dots.data());
  };
  CHECK_REFUSED(call(-1, &good, &fine, queries.data(), found.ids.data()), "heads");
  CHECK_REFUSED(call(1, nullptr, &fine, queries.data(), found.ids.data()), "NULL");
  CHECK_REFUSED(call(1, &good, nullptr, queries.data(), found.ids.data()), "NULL");
  CHECK_REFUSED(call(1, &good, &fine, nullptr, found.ids.data()), "NULL");
  CHECK_REFUSED(call(1, &good, &fine, queries.data(), nullptr), "NULL");
  CHECK_OK(call(0, nullptr, &fine, nullptr, nullptr));
}
