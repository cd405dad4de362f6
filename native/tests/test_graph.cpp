// The graph: building it and searching it.
#include <limits>
#include <set>
#include <thread>

#include "graph_case.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kNoLimit = std::numeric_limits<float>::infinity();

hkv_graph_query query_of(int32_t queries, int32_t top_k, int32_t beam) {
  return {beams_of(beam), queries, top_k, std::max(beam, top_k), 3, 0, kNoLimit, nullptr};
}

/// Each id once, in falling order of exact scores, -1 behind the end.
void check_results(const Rows &rows, const float *query, const int64_t *ids, const float *scores,
                   int64_t top_k) {
  std::set<int64_t> seen;
  for (int64_t i = 0; i < top_k; ++i) {
    if (ids[i] < 0) {
      CHECK(ids[i] == -1 && scores[i] == kNone);
      continue;
    }
    CHECK(ids[i] < rows.count() && seen.insert(ids[i]).second);
    CHECK(static_cast<int64_t>(seen.size()) == i + 1);
    CHECK(std::fabs(static_cast<double>(scores[i]) - rows.dot(ids[i], query)) < 1e-4);
    if (i > 0)
      CHECK(scores[i] < scores[i - 1] || (scores[i] == scores[i - 1] && ids[i] > ids[i - 1]));
  }
}

void check_case(int64_t count, int32_t dim, int32_t dtype, int32_t num_queries, int32_t top_k,
                int32_t degree, hkv_pool *pool = nullptr) {
  const Rows rows(random_floats(count * dim, 1), dim, dtype, 2);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(40 * dim, 2), 9);
  Graph graph;
  CHECK_OK(build(pool, projection_of(lists, 9, count, degree), graph));
  const std::vector<float> queries = random_floats(num_queries * dim, 3);
  GraphResult found;
  CHECK_OK(search(pool, {GraphCase(rows, graph).head()}, query_of(num_queries, top_k, 30), queries,
                  {}, found));
  for (int32_t query = 0; query < num_queries; ++query)
    check_results(rows, queries.data() + query * dim, found.ids.data() + query * top_k,
                  found.scores.data() + query * top_k, top_k);
  CHECK(found.rows[0] <= count * ((num_queries + 15) / 16));
}

}  // namespace

CLAIM(graphs_are_built_and_searched_at_every_width_and_dtype) {
  for (const int32_t dim : kDims)
    for (const int32_t dtype : {HKV_F32, HKV_F16, HKV_BF16}) check_case(61, dim, dtype, 3, 7, 8);
}

CLAIM(graphs_of_every_size_are_built_and_searched) {
  ScopedPool pool(3);
  for (const int64_t count : {0, 1, 2, 3, 16, 17, 33, 257})
    check_case(count, 36, HKV_BF16, 2, 9, 5);
  for (const int32_t queries : {1, 4, 5, 15, 16, 17, 40})
    check_case(61, 20, HKV_F16, queries, 5, 16);
  for (const int32_t degree : {1, 2, 15, 16, 17, 64, 255, 256})
    check_case(300, 12, HKV_F32, 2, 12, degree, pool.get());
}

CLAIM(a_wide_search_of_a_connected_graph_finds_the_best) {
  const int32_t dim = 24;
  const Rows rows(random_floats(200 * dim, 1), dim);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(400 * dim, 2), 12);
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 12, 200, 32), graph));
  const std::vector<float> queries = random_floats(5 * dim, 3);
  GraphResult found;
  CHECK_OK(
      search(nullptr, {GraphCase(rows, graph).head()}, query_of(5, 3, 200), queries, {}, found));
  const std::vector<int32_t> best = best_keys(rows, queries, 3);
  for (size_t i = 0; i < best.size(); ++i) CHECK(found.ids[i] == best[i]);
}

CLAIM(packed_lists_come_back_as_they_were) {
  ScopedPool pool(2);
  for (const int64_t nodes : {1, 2, 17, 5000, 70000, 300000})
    for (const int32_t degree : {1, 15, 16, 17, 33}) {
      if (nodes > 5000 && degree != 17) continue;
      std::vector<int32_t> neighbours(static_cast<size_t>(nodes * degree)), back(neighbours.size());
      Random random(9);
      for (int64_t node = 0; node < nodes; ++node)
        for (int32_t i = 0; i < degree; ++i) {
          const int64_t other = random.below(nodes);
          neighbours[static_cast<size_t>(node * degree + i)] =
              other == node ? -1 : static_cast<int32_t>(other);
        }
      std::vector<uint8_t> lists(static_cast<size_t>(nodes * hkv_graph_list_bytes(degree, nodes)));
      CHECK_OK(hkv_graph_pack(pool.get(), degree, nodes, neighbours.data(), lists.data()));
      CHECK_OK(hkv_graph_unpack(pool.get(), degree, nodes, lists.data(), back.data()));
      CHECK(back == neighbours);
    }
}

CLAIM(keys_behind_the_graph_are_scored_one_and_all) {
  const int32_t dim = 12;
  const Rows rows(random_floats(2100 * dim, 1), dim);
  const std::vector<float> queries = random_floats(3 * dim, 3);
  const GraphCase owner(rows, Graph());
  const hkv_graph_head head = owner.head();
  GraphResult found;
  CHECK_OK(search(nullptr, {head}, query_of(3, 10, 40), queries, {}, found));
  const std::vector<int32_t> best = best_keys(rows, queries, 10);
  for (size_t i = 0; i < best.size(); ++i) CHECK(found.ids[i] == best[i]);
  CHECK(found.rows[0] == 2100);
}

CLAIM(threads_share_the_keys_behind_a_graph_and_find_the_same) {
  const int32_t dim = 12;
  const Rows rows(random_floats(20037 * dim, 1), dim, HKV_BF16);
  std::vector<float> first;
  for (int64_t key = 0; key < 500; ++key)
    for (int32_t d = 0; d < dim; ++d) first.push_back(rows.at(key, d));
  const std::vector<int32_t> lists =
      best_keys(Rows(first, dim), random_floats(80 * dim, 2), 12);
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 12, 500, 16), graph));
  const GraphCase mixed(rows, graph), scanned(rows, Graph());
  const std::vector<hkv_graph_head> heads = {mixed.head(), scanned.head(), mixed.head()};
  const std::vector<float> queries = random_floats(3 * 18 * dim, 3);
  GraphResult expected;
  CHECK_OK(search(nullptr, heads, query_of(18, 8, 30), queries, {}, expected));
  CHECK(expected.rows[1] == 2 * 20037 && expected.dots[1] == 18 * (20037 + 30));
  for (const int threads : {2, 5}) {
    ScopedPool pool(threads);
    GraphResult found;
    CHECK_OK(search(pool.get(), heads, query_of(18, 8, 30), queries, {}, found));
    CHECK(found.ids == expected.ids && found.scores == expected.scores);
    CHECK(found.rows == expected.rows && found.dots == expected.dots);
  }
}

CLAIM(two_walks_share_the_queries_of_a_head_whatever_the_threads_are) {
  const int32_t dim = 36;
  const Rows rows(random_floats(900 * dim, 1), dim);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(300 * dim, 2), 12);
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 12, 900, 16), graph));
  const GraphCase owner(rows, graph);
  const std::vector<float> queries = random_floats(5 * dim, 3);
  hkv_graph_query query = query_of(5, 8, 30);
  const int32_t joint[] = {1, 1}, two[] = {1, 2}, more[] = {9, 9};
  const std::vector<hkv_graph_head> both = {owner.head(), owner.head()};
  std::vector<float> twice = queries;
  twice.insert(twice.end(), queries.begin(), queries.end());
  GraphResult together, shared, alone;
  CHECK_OK(search(nullptr, both, query, twice, {}, together));
  ScopedPool pool(4);
  for (hkv_pool *threads : {static_cast<hkv_pool *>(nullptr), pool.get()}) {
    query.walks = joint;
    CHECK_OK(search(threads, both, query, twice, {}, shared));
    CHECK(shared.ids == together.ids && shared.rows == together.rows);
    query.walks = more;
    CHECK_OK(search(threads, both, query, twice, {}, alone));
    query.walks = two;
    CHECK_OK(search(threads, both, query, twice, {}, shared));
  }
  CHECK(shared.rows[0] == together.rows[0] && shared.rows[1] > shared.rows[0]);
  CHECK(alone.rows[0] == alone.rows[1] && alone.rows[1] > shared.rows[1]);
  GraphResult halves[2];
  int64_t rows_read = 0;
  std::vector<int64_t> ids;
  for (int half = 0; half < 2; ++half) {
    query.queries = half == 0 ? 3 : 2;
    query.walks = nullptr;
    const auto first = queries.begin() + half * 3 * dim;
    CHECK_OK(search(nullptr, {owner.head()}, query,
                    std::vector<float>(first, first + query.queries * dim), {}, halves[half]));
    ids.insert(ids.end(), halves[half].ids.begin(), halves[half].ids.end());
    rows_read += halves[half].rows[0];
  }
  const auto middle = shared.ids.begin() + 5 * 8;
  CHECK(std::equal(shared.ids.begin(), middle, together.ids.begin()));
  CHECK(std::equal(middle, shared.ids.end(), ids.begin(), ids.end()));
  CHECK(shared.rows[1] == rows_read);
}

CLAIM(searches_start_where_they_are_told_to) {
  const Rows rows(random_floats(50 * 8, 1), 8);
  Graph graph;
  graph.degree = 4;
  graph.num_lists = 49;
  for (int32_t key = 0; key < 50; ++key) graph.list_of.push_back(key == 7 ? -1 : key - (key > 7));
  graph.neighbours.assign(49 * 4, -1);  // nothing is linked to anything
  CHECK_OK(pack(graph));
  hkv_graph_query query = query_of(2, 4, 10);
  query.num_warm = 5;
  const std::vector<int64_t> warm = {3, 3, -1, 49, 50, 7, INT64_MAX, INT64_MIN, 6, 0};
  const std::vector<float> queries = random_floats(2 * 8, 2);
  GraphResult found;
  CHECK_OK(search(nullptr, {GraphCase(rows, graph).head()}, query, queries, warm, found));
  CHECK(found.rows[0] == 4);  // 7 has no node
  for (int64_t query_idx = 0; query_idx < 2; ++query_idx) {
    std::vector<int64_t> ids(found.ids.begin() + 4 * query_idx,
                             found.ids.begin() + 4 * query_idx + 4);
    std::sort(ids.begin(), ids.end());
    CHECK((ids == std::vector<int64_t>{0, 3, 6, 49}));
  }
}

CLAIM(beta_leaves_out_what_scores_much_below_the_best) {
  const Rows rows({9.0f, 8.0f, 7.5f, 1.0f, -3.0f}, 1);
  const GraphCase owner(rows, Graph());
  const hkv_graph_head head = owner.head();
  hkv_graph_query query = query_of(1, 5, 5);
  query.beta = 1.5f;
  GraphResult found;
  CHECK_OK(search(nullptr, {head}, query, {1.0f}, {}, found));
  CHECK((found.ids == std::vector<int64_t>{0, 1, 2, -1, -1}));
}

CLAIM(equal_and_duplicate_keys_are_found_once) {
  const Rows rows(std::vector<float>(90 * 4, 0.5f), 4);
  std::vector<int32_t> lists;
  for (int32_t i = 0; i < 400; ++i) lists.push_back(i / 3 % 90);  // every key three times in a row
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 20, 90, 7), graph));
  GraphResult found;
  CHECK_OK(search(nullptr, {GraphCase(rows, graph).head()}, query_of(1, 90, 90), {1, 2, 3, 4}, {},
                  found));
  const std::vector<float> query = {1, 2, 3, 4};
  check_results(rows, query.data(), found.ids.data(), found.scores.data(), 90);
}

CLAIM(any_number_of_threads_builds_the_same_graph) {
  const Rows rows(random_floats(700 * 16, 1), 16);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(90 * 16, 2), 15);
  Graph alone, shared;
  CHECK_OK(build(nullptr, projection_of(lists, 15, 700, 12), alone));
  ScopedPool pool(4);
  CHECK_OK(build(pool.get(), projection_of(lists, 15, 700, 12), shared));
  CHECK(alone.neighbours == shared.neighbours && alone.entries == shared.entries);
}

CLAIM(threads_search_one_graph_at_the_same_time) {
  const int32_t dim = 36;
  const Rows rows(random_floats(600 * dim, 1), dim, HKV_BF16);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(80 * dim, 2), 12);
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 12, 600, 16), graph));
  const GraphCase owner(rows, graph);
  const std::vector<hkv_graph_head> heads(3, owner.head());
  const std::vector<float> queries = random_floats(3 * 20 * dim, 3);
  GraphResult expected;
  CHECK_OK(search(nullptr, heads, query_of(20, 8, 30), queries, {}, expected));
  ScopedPool pool(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 5; ++round) {
        GraphResult found;
        CHECK_OK(search(caller % 2 == 0 ? nullptr : pool.get(), heads, query_of(20, 8, 30), queries,
                        {}, found));
        CHECK(found.ids == expected.ids && found.scores == expected.scores);
        CHECK(found.rows == expected.rows && found.dots == expected.dots);
      }
    });
  for (std::thread &caller : callers) caller.join();
}

CLAIM(queries_that_are_not_finite_do_not_crash_a_search) {
  const Rows rows(random_floats(100 * 8, 1), 8);
  const std::vector<int32_t> lists = best_keys(rows, random_floats(30 * 8, 2), 9);
  Graph graph;
  CHECK_OK(build(nullptr, projection_of(lists, 9, 100, 8), graph));
  for (const float strange : {kNoLimit, kNone, std::nanf(""), 3e38f}) {
    std::vector<float> queries = random_floats(2 * 8, 3);
    queries[3] = strange;
    GraphResult found;
    CHECK_OK(
        search(nullptr, {GraphCase(rows, graph).head()}, query_of(2, 5, 20), queries, {}, found));
  }
}
