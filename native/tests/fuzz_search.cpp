// Searches of random heads, all of them valid and many of them strange: no sanitizer may speak, and
// what is found must exist.
#include <chrono>
#include <limits>

#include "graph_case.h"
#include "hybrid_kv_attend.h"
#include "hybrid_kv_flat.h"

namespace {

/// Mostly ordinary numbers, at times repeated, huge, tiny or not finite.
std::vector<float> strange_floats(int64_t count, Random &random) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float specials[] = {0.0f,   -0.0f,    1.0f,      1e-42f,       3e38f,
                            -3e38f, infinity, -infinity, std::nanf("")};
  const int64_t strange = random.below(4) == 0 ? 1 + random.below(20) : 0;  // of 100
  const bool coarse = random.below(3) == 0;
  std::vector<float> values(static_cast<size_t>(count));
  for (float &value : values) {
    value = random.uniform();
    if (coarse) value = std::round(value * 2.0f);
    if (random.below(100) < strange) value = specials[random.below(9)];
  }
  return values;
}

void check_ids(const std::vector<int64_t> &ids, int64_t count) {
  for (const int64_t id : ids) CHECK(id >= -1 && id < count);
}

Graph random_graph(int64_t linked, Random &random) {
  Graph graph;
  graph.degree = static_cast<int32_t>(1 + random.below(random.below(8) == 0 ? 256 : 40));
  for (int64_t key = 0; key < linked; ++key)
    graph.list_of.push_back(random.below(4) == 0 ? -1 : static_cast<int32_t>(graph.num_lists++));
  const int64_t end = 1 + random.below(graph.degree + 1);
  for (int64_t place = 0; place < graph.num_lists * graph.degree; ++place)
    graph.neighbours.push_back(place % graph.degree >= end
                                   ? -1
                                   : static_cast<int32_t>(random.below(graph.num_lists + 1) - 1));
  for (int64_t i = random.below(20); i > 0; --i)
    graph.entries.push_back(static_cast<int32_t>(random.below(graph.num_lists + 1) - 1));
  CHECK_OK(pack(graph));
  return graph;
}

void search_graph(const Rows &rows, const std::vector<float> &queries, int32_t num_queries,
                  Random &random) {
  const Graph graph = random_graph(random.below(rows.count() + 1), random);
  const GraphCase owner(rows, graph);
  hkv_graph_query query{};
  query.queries = num_queries;
  query.top_k = static_cast<int32_t>(1 + random.below(50));
  query.pool_size = query.top_k + static_cast<int32_t>(random.below(50));
  query.beams = beams_of(static_cast<int32_t>(1 + random.below(2 * query.pool_size)));
  query.width = static_cast<int32_t>(1 + random.below(random.below(10) == 0 ? 1024 : 8));
  query.num_warm = static_cast<int32_t>(random.below(8));
  query.beta = random.below(2) == 0 ? std::numeric_limits<float>::infinity() : 0.5f;
  const int32_t walks = static_cast<int32_t>(1 + random.below(4));
  query.walks = random.below(2) == 0 ? nullptr : &walks;
  std::vector<int64_t> warm;
  for (int64_t i = 0; i < int64_t{num_queries} * query.num_warm; ++i)
    warm.push_back(random.below(rows.count() + 20) - 10);
  GraphResult found;
  CHECK_OK(search(nullptr, {owner.head()}, query, queries, warm, found));
  check_ids(found.ids, rows.count());
}

void search_flat(const Rows &rows, const std::vector<float> &queries, int32_t num_queries,
                 Random &random, hkv_pool *pool) {
  Quantised quantised(rows, true, true, random.below(20));
  const hkv_flat_head head{rows.keys(), random.below(2) == 0 ? nullptr : &quantised.head()};
  const int64_t top_k = 1 + random.below(random.below(8) == 0 ? 600 : 60);
  std::vector<int64_t> ids(static_cast<size_t>(num_queries * top_k));
  CHECK_OK(hkv_flat_search(pool, 1, &head, queries.data(), num_queries, top_k, random.below(100),
                           HKV_IDS_INT64, ids.data(), nullptr, nullptr));
  check_ids(ids, rows.count());
}

void attend(const Rows &rows, const std::vector<float> &queries, int32_t num_queries,
            Random &random) {
  const int32_t value_dim = static_cast<int32_t>(1 + random.below(140));
  const Rows values(strange_floats(rows.count() * value_dim, random), value_dim, rows.keys().dtype);
  const hkv_kv head = kv_of(rows, values);
  const int64_t num_ids = random.below(60);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < num_queries * num_ids; ++i)
    ids.push_back(random.below(rows.count() + 1) - 1);
  std::vector<float> out(static_cast<size_t>(num_queries * value_dim)),
      lse(static_cast<size_t>(num_queries));
  CHECK_OK(hkv_attend(nullptr, 1, &head, queries.data(), HKV_F32, num_queries, ids.data(), num_ids, nullptr,
                      0.3f, random.below(2) == 0 ? 0.0f : 5.0f, out.data(), lse.data()));
}

void build_graph(const Rows &rows, Random &random, hkv_pool *pool) {
  const int32_t length = static_cast<int32_t>(random.below(20));
  std::vector<int32_t> lists;
  for (int64_t i = random.below(60) * length; i > 0; --i)
    lists.push_back(static_cast<int32_t>(random.below(rows.count() + 1) - 1));
  hkv_projection projection =
      projection_of(lists, length, rows.count(), static_cast<int32_t>(1 + random.below(40)));
  const int32_t extra_length = static_cast<int32_t>(random.below(3));
  std::vector<int32_t> extra;
  for (int64_t i = 0; i < rows.count() * extra_length; ++i)
    extra.push_back(static_cast<int32_t>(random.below(rows.count() + 1) - 1));
  projection.extra = extra.data();
  projection.extra_length = extra_length;
  projection.cap = static_cast<int32_t>(2 + random.below(253));
  projection.candidates = static_cast<int32_t>(1 + random.below(100));
  projection.num_entries = static_cast<int32_t>(1 + random.below(40));
  Graph graph;
  CHECK_OK(build(pool, projection, graph));
  for (const int32_t node : graph.neighbours) CHECK(node >= -1 && node < graph.num_lists);
  for (const int32_t node : graph.entries) CHECK(node >= -1 && node < graph.num_lists);
}

void run(uint64_t seed) {
  static ScopedPool pool(2);
  Random random(seed);
  const int32_t dim = static_cast<int32_t>(1 + random.below(140));
  const int64_t count = random.below(random.below(10) == 0 ? 6000 : 300);
  const Rows rows(strange_floats(count * dim, random), dim, static_cast<int32_t>(random.below(3)),
                  random.below(5));
  const int32_t num_queries = static_cast<int32_t>(1 + random.below(40));
  const std::vector<float> queries = strange_floats(num_queries * dim, random);
  switch (random.below(4)) {
    case 0: return search_graph(rows, queries, num_queries, random);
    case 1:
      return search_flat(rows, queries, num_queries, random,
                         random.below(4) == 0 ? pool.get() : nullptr);
    case 2: return attend(rows, queries, num_queries, random);
    default: return build_graph(rows, random, random.below(4) == 0 ? pool.get() : nullptr);
  }
}

}  // namespace

/// fuzz_search SECONDS [FIRST_SEED]
int main(int count, char **arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 10.0;
  const uint64_t first = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 0;
  const auto start = std::chrono::steady_clock::now();
  uint64_t seed = first;
  const bool verbose =
      std::getenv("HKV_TEST_VERBOSE") != nullptr;  // the last line names the culprit
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
         seconds) {
    if (verbose) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    run(seed++);
  }
  std::printf("%s: %llu random searches\n", hkv_isa(),
              static_cast<unsigned long long>(seed - first));
}
