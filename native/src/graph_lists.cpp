// Packing and unpacking whole graphs.
#include "graph_lists.h"

#include <algorithm>

#include "error.h"
#include "hybrid_kv_graph.h"
#include "pool.h"

namespace hkv {
namespace {

constexpr int64_t kItemLists = 4096;  // of one piece of parallel work

void check_sizes(int32_t degree, int64_t num_nodes) {
  require(degree >= 1 && degree <= HKV_MAX_DEGREE, "max_degree must be 1..256");
  require(num_nodes >= 0 && num_nodes < INT32_MAX, "num_nodes must be 0..2^31 - 2");
}

/// neighbours: [degree], -1 for none.
void pack(int32_t node, int degree, int64_t num_nodes, const int32_t *neighbours,
          const ListLayout &layout, uint8_t *list) {
  std::memset(list, 0, layout.bytes);
  for (int first = 0; first < layout.slots; first += kSlots) {
    int32_t nodes[kSlots];
    for (int i = 0; i < kSlots; ++i) {
      const int32_t other = first + i < degree ? neighbours[first + i] : -1;
      require(other >= -1 && other < num_nodes, "a list names a node that does not exist");
      nodes[i] = other < 0 ? node : other;
    }
    pack_sixteen(nodes, layout, first, list);
  }
}

void unpack(int32_t node, int degree, const uint8_t *list, const ListLayout &layout,
            int32_t *neighbours) {
  for (int first = 0; first < degree; first += kSlots) {
    int32_t nodes[kSlots];
    unpack_sixteen(list, layout, first, nodes);
    for (int i = 0; i < std::min(kSlots, degree - first); ++i)
      neighbours[first + i] = nodes[i] == node ? -1 : nodes[i];
  }
}

template <typename Body>
void for_lists(Pool *pool, int64_t num_nodes, const Body &body) {
  parallel_for(pool, (num_nodes + kItemLists - 1) / kItemLists, [&](int64_t item, int) {
    const int64_t last = std::min(num_nodes, (item + 1) * kItemLists);
    for (int64_t node = item * kItemLists; node < last; ++node) body(static_cast<int32_t>(node));
  });
}

}  // namespace
}  // namespace hkv

extern "C" {

int64_t hkv_graph_list_bytes(int32_t degree, int64_t num_nodes) {
  const bool fits = degree >= 1 && degree <= HKV_MAX_DEGREE && num_nodes >= 0;
  return fits && num_nodes < INT32_MAX ? hkv::ListLayout(degree, num_nodes).bytes : 0;
}

int hkv_graph_pack(hkv_pool *pool, int32_t degree, int64_t num_nodes, const int32_t *neighbours,
                   uint8_t *lists) {
  return hkv::guarded([&] {
    hkv::check_sizes(degree, num_nodes);
    hkv::require(num_nodes == 0 || (neighbours && lists), "arguments must not be NULL");
    const hkv::ListLayout layout(degree, num_nodes);
    hkv::for_lists(pool, num_nodes, [&](int32_t node) {
      hkv::pack(node, degree, num_nodes, neighbours + int64_t{node} * degree, layout,
                lists + node * layout.bytes);
    });
  });
}

int hkv_graph_unpack(hkv_pool *pool, int32_t degree, int64_t num_nodes, const uint8_t *lists,
                     int32_t *neighbours) {
  return hkv::guarded([&] {
    hkv::check_sizes(degree, num_nodes);
    hkv::require(num_nodes == 0 || (neighbours && lists), "arguments must not be NULL");
    const hkv::ListLayout layout(degree, num_nodes);
    hkv::for_lists(pool, num_nodes, [&](int32_t node) {
      hkv::unpack(node, degree, lists + node * layout.bytes, layout,
                  neighbours + int64_t{node} * degree);
    });
  });
}

}  // extern "C"
