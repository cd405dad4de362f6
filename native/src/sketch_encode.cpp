// Codes of keys: projected, rounded and laid into blocks, one pass over the keys.
#include <atomic>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "error.h"
#include "pool.h"
#include "sketch.h"

namespace hkv {
namespace {

constexpr int64_t kPieceKeys = 2048;  // of one piece of parallel work; whole blocks

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

struct Scratch {
  std::vector<float> rows, values;  // [16, dim], [16, room]
  std::vector<float> tops;          // [room], the largest code of each dim
  std::vector<uint8_t> codes;       // [16, room]
};

Scratch &scratch() {
  thread_local Scratch own;
  return own;
}

template <typename Value>
void grow(std::vector<Value> &values, int64_t size) {
  if (static_cast<int64_t>(values.size()) < size) values.resize(size);
}

/// codes [room] = values, rounded to 0 .. top of each dim.
void round_codes(const float *values, const float *tops, int room, uint8_t *codes) {
  for (int i = 0; i < room; i += kLanes) {
    Floats value = load_floats(values + i);
    const Floats top = load_floats(tops + i);
    value = value > 0.0f ? value : Floats{};
    value = value < top ? value : top;
    value = (value + kRoundWhole) - kRoundWhole;
    const Bytes narrow = __builtin_convertvector(__builtin_convertvector(value, Ints), Bytes);
    std::memcpy(codes + i, &narrow, sizeof narrow);
  }
}

/// Writes the bytes of one key: quads of `codes` side by side in lines of `Bits`.
template <int Bits>
void put_lines(const uint8_t *&codes, int lines, uint8_t *&slot) {
  for (int line = 0; line < lines; ++line, slot += kLineBytes) {
    uint32_t joined = 0;
    for (int part = 0; part < 8 / Bits; ++part, codes += kQuadChannels) {
      uint32_t quad;
      std::memcpy(&quad, codes, sizeof quad);
      joined |= quad << (Bits * part);
    }
    std::memcpy(slot, &joined, sizeof joined);
  }
}

void fill_tops(const SketchLines &lines, float *tops) {
  const int end_of_8 = 4 * lines.of_8, end_of_4 = end_of_8 + 8 * lines.of_4;
  std::fill_n(tops, lines.room(), 0.0f);
  std::fill(tops, tops + end_of_8, 255.0f);
  std::fill(tops + end_of_8, tops + end_of_4, 15.0f);
  std::fill(tops + end_of_4, tops + lines.dims(), 3.0f);
}

struct Encoding {
  const hkv_sketch_map *map;
  const hkv_keys *keys;
  const int32_t *rows;
  int64_t num_rows, first;
  uint8_t *blocks;

  void run(hkv_pool *pool);

 private:
  void encode_piece(int64_t piece);
  template <typename Element>
  int64_t encode_block(Scratch &own, int64_t begin, int64_t end);
  void pack(Scratch &own, int64_t place, int64_t count) const;

  std::atomic<int64_t> bad_{std::numeric_limits<int64_t>::max()};  // lowest index into rows
};

void Encoding::run(hkv_pool *pool) {
  // Pieces end where blocks do, so that no two threads write to the same one.
  const int64_t last = first + num_rows;
  const int64_t pieces = num_rows == 0 ? 0 : (last - 1) / kPieceKeys - first / kPieceKeys + 1;
  parallel_for(pool, pieces, [this](int64_t piece, int) { encode_piece(piece); });
  const int64_t bad = bad_.load();
  if (bad < num_rows)
    throw NotFinite("row " + std::to_string(rows[bad]) +
                    " of the keys holds NaN or infinity; check the model's weights and dtype");
}

void Encoding::encode_piece(int64_t piece) {
  Scratch &own = scratch();
  const SketchLines lines(*map);
  grow(own.rows, int64_t{HKV_BLOCK_KEYS} * map->dim);
  grow(own.values, int64_t{HKV_BLOCK_KEYS} * lines.room());
  grow(own.codes, int64_t{HKV_BLOCK_KEYS} * lines.room());
  grow(own.tops, lines.room());
  fill_tops(lines, own.tops.data());
  const int64_t begin = std::max(first, (first / kPieceKeys + piece) * kPieceKeys);
  const int64_t end = std::min(first + num_rows, (first / kPieceKeys + piece + 1) * kPieceKeys);
  with_dtype(keys->dtype, [&](auto *element) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    for (int64_t place = begin; place < end;) {
      const int64_t next = std::min(end, (place / HKV_BLOCK_KEYS + 1) * HKV_BLOCK_KEYS);
      const int64_t bad = encode_block<Element>(own, place, next);
      if (bad >= 0) {
        int64_t lowest = bad_.load();
        while (bad < lowest && !bad_.compare_exchange_weak(lowest, bad)) {
        }
        return;
      }
      place = next;
    }
  });
}

/// Places begin .. end - 1 of one block; the first row index that is not finite, or -1.
template <typename Element>
int64_t Encoding::encode_block(Scratch &own, int64_t begin, int64_t end) {
  const SketchLines lines(*map);
  const Element *base = static_cast<const Element *>(keys->data);
  const int64_t count = end - begin;
  for (int64_t i = 0; i < count; ++i)
    convert(base + rows[begin - first + i] * keys->stride, map->dim, &own.rows[i * map->dim]);
  project(own.rows.data(), count, map->dim, map->key_columns, lines.room(), map->start,
          own.values.data());
  if (!all_finite(own.values.data(), count * lines.room()))
    for (int64_t i = 0; i < count; ++i)
      if (!all_finite(&own.values[i * lines.room()], lines.room())) return begin - first + i;
  pack(own, begin, count);
  return -1;
}

void Encoding::pack(Scratch &own, int64_t place, int64_t count) const {
  const SketchLines lines(*map);
  uint8_t *block = blocks + place / HKV_BLOCK_KEYS * lines.block_bytes();
  for (int64_t i = 0; i < count; ++i) {
    const float *values = &own.values[i * lines.room()];
    uint8_t *codes = &own.codes[i * lines.room()];
    round_codes(values, own.tops.data(), lines.room(), codes);
    const uint8_t *from = codes;
    uint8_t *slot = block + kQuadChannels * ((place + i) % HKV_BLOCK_KEYS);
    put_lines<8>(from, lines.of_8, slot);
    put_lines<4>(from, lines.of_4, slot);
    put_lines<2>(from, lines.of_2, slot);
  }
}

void check_rows(const hkv_keys &keys, const int32_t *rows, int64_t num_rows) {
  require(num_rows >= 0, "the number of rows must be at least 0");
  require(num_rows == 0 || rows != nullptr, "rows must not be NULL");
  for (int64_t i = 0; i < num_rows; ++i)
    require(rows[i] >= 0 && rows[i] < keys.count, "rows must lie within the keys");
}

/// Codes of keys in pages: a piece is what a head has in one page.
struct PageEncoding {
  const hkv_sketch_tier *tiers;
  const hkv_keys *keys;
  int64_t first;

  void run(hkv_pool *pool, int32_t heads) const {
    const int64_t pages = num_pages();
    parallel_for(pool, heads * pages, [this, pages](int64_t item, int) {
      encode(static_cast<int32_t>(item / pages), item % pages);
    });
  }

 private:
  int64_t first_token() const { return tiers->first + first; }
  int64_t num_pages() const {
    if (first >= tiers->count) return 0;
    const int64_t last = tiers->first + tiers->count - 1;
    return last / tiers->page_keys - first_token() / tiers->page_keys + 1;
  }
  void encode(int32_t head, int64_t number) const;
};

void PageEncoding::encode(int32_t head, int64_t number) const {
  const hkv_sketch_tier &tier = tiers[head];
  const int64_t page = first_token() / tier.page_keys + number, start = page * tier.page_keys;
  const int64_t begin = std::max(first_token(), start) - start;
  const int64_t end = std::min<int64_t>(tier.page_keys, tier.first + tier.count - start);
  thread_local std::vector<int32_t> rows;
  grow(rows, end - begin);
  for (int64_t slot = begin; slot < end; ++slot)
    rows[slot - begin] = static_cast<int32_t>(
        row_of(tier, static_cast<uint32_t>(start + slot - tier.first)));
  Encoding own{};
  own.map = tier.map;
  own.keys = &keys[head];
  own.rows = rows.data();
  own.num_rows = end - begin;
  own.first = begin;
  // Only what a search is given is constant; whoever encodes lends the same memory to be written.
  own.blocks = const_cast<uint8_t *>(tier.blocks) + tier.pages[page] * tier.page_bytes;
  own.run(nullptr);
}

}  // namespace

void check_sketch_pages(const hkv_sketch_tier &tier, const hkv_keys &keys) {
  if (tier.pages == nullptr) return;
  require(tier.ids == nullptr, "a tier in pages must have no ids");
  require(tier.page_keys >= HKV_BLOCK_KEYS && tier.page_keys % HKV_BLOCK_KEYS == 0 &&
              tier.first >= 0 && tier.first % HKV_BLOCK_KEYS == 0,
          "page_keys and first must be multiples of 16");
  require(tier.page_rows >= 0 && tier.page_bytes >= 0 && tier.first_row >= 0 &&
              tier.page_bytes % kLineBytes == 0,
          "steps between pages must be at least 0, and bytes a multiple of 64");
  const int64_t end = tier.count == 0 ? 0 : (tier.first + tier.count - 1) / tier.page_keys + 1;
  for (int64_t page = 0; page < end; ++page)
    require(tier.pages[page] >= 0 &&
                tier.first_row + tier.pages[page] * tier.page_rows + tier.page_keys <= keys.count,
            "the rows of all pages must lie within the keys");
}

void check_sketch_map(const hkv_sketch_map &map) {
  require(map.dim >= 1 && map.dim <= HKV_MAX_DIM, "dim must be 1..4096");
  require(hkv_sketch_block_bytes(&map) > 0, "a sketch must have 4..256 dims");
  require(map.key_columns != nullptr && map.query_columns != nullptr && map.start != nullptr,
          "the arrays of a map must not be NULL");
}

}  // namespace hkv

extern "C" {

int64_t hkv_sketch_block_bytes(const hkv_sketch_map *map) {
  const auto usable = [](int32_t lines) { return lines >= 0 && lines <= HKV_SKETCH_DIMS; };
  if (!usable(map->lines_of_8) || !usable(map->lines_of_4) || !usable(map->lines_of_2)) return 0;
  const hkv::SketchLines lines(*map);
  return lines.dims() <= HKV_SKETCH_DIMS ? lines.block_bytes() : 0;
}

int hkv_sketch_encode(hkv_pool *pool, const hkv_sketch_map *map, const hkv_keys *keys,
                      const int32_t *rows, int64_t num_rows, int64_t first, uint8_t *blocks) {
  return hkv::guarded([&] {
    hkv::require(map != nullptr && keys != nullptr, "map and keys must not be NULL");
    hkv::check_sketch_map(*map);
    hkv::check_keys(*keys);
    hkv::require(keys->dim == map->dim, "keys must have the dim of the map");
    hkv::check_rows(*keys, rows, num_rows);
    hkv::require(first >= 0, "first must be at least 0");
    hkv::require(num_rows == 0 || blocks != nullptr, "blocks must not be NULL");
    hkv::Encoding encoding{};
    encoding.map = map;
    encoding.keys = keys;
    encoding.rows = rows;
    encoding.num_rows = num_rows;
    encoding.first = first;
    encoding.blocks = blocks;
    encoding.run(pool);
  });
}

int hkv_sketch_encode_pages(hkv_pool *pool, int32_t heads, const hkv_sketch_tier *tiers,
                            const hkv_keys *keys, int64_t first) {
  return hkv::guarded([&] {
    hkv::require(heads >= 0 && (heads == 0 || (tiers != nullptr && keys != nullptr)),
                 "tiers and keys must not be NULL");
    hkv::require(first >= 0, "first must be at least 0");
    for (int32_t head = 0; head < heads; ++head) {
      const hkv_sketch_tier &tier = tiers[head];
      hkv::require(tier.map != nullptr && tier.pages != nullptr && tier.blocks != nullptr,
                   "a tier must have a map, pages and blocks");
      hkv::check_sketch_map(*tier.map);
      hkv::check_keys(keys[head]);
      hkv::require(keys[head].dim == tier.map->dim, "keys must have the dim of the map");
      hkv::check_sketch_pages(tier, keys[head]);
      hkv::require(tier.count == tiers->count && tier.first == tiers->first &&
                       tier.page_keys == tiers->page_keys,
                   "all tiers must have as many keys in pages of one size");
    }
    if (heads == 0) return;
    hkv::PageEncoding encoding{tiers, keys, first};
    encoding.run(pool, heads);
  });
}

}  // extern "C"
