// Products of tiles of bfloat16 by AMX, summed in float32. The library for AVX-512 has them and runs on
// CPUs without them too: ask `has_amx` first. Under HKV_EMULATED_AMX, which tests define, tiles lie in
// memory and plain loops multiply them, on every CPU with AVX2.
#pragma once

#include <algorithm>

#include "convert.h"

#if (defined(HKV_EMULATED_AMX) && defined(__AVX2__)) || \
    (defined(__AVX512F__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11))
#define HKV_HAS_AMX 1
#else
#define HKV_HAS_AMX 0
#endif

#if HKV_HAS_AMX && !defined(HKV_EMULATED_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hkv {

constexpr int kAmxRows = 16;       // of a tile; as many columns of float32, and of pairs
constexpr int kAmxBytes = 64;      // of a tile's row
constexpr int64_t kAmxPairs = 16;  // of bfloat16, in a row: what one product sums up, twice

#if !HKV_HAS_AMX

inline bool has_amx() { return false; }

#elif defined(HKV_EMULATED_AMX)

inline bool has_amx() { return true; }

/// The eight tiles, while one of these lives.
class AmxTiles {
 public:
  template <int Tile>
  static void zero() {
    std::memset(tiles_[Tile], 0, sizeof tiles_[Tile]);
  }
  template <int Tile>
  static void load(const void *from, int64_t stride) {
    for (int row = 0; row < kAmxRows; ++row)
      std::memcpy(tiles_[Tile][row], static_cast<const uint8_t *>(from) + row * stride, kAmxBytes);
  }
  template <int Tile>
  static void store(void *to, int64_t stride) {
    for (int row = 0; row < kAmxRows; ++row)
      std::memcpy(static_cast<uint8_t *>(to) + row * stride, tiles_[Tile][row], kAmxBytes);
  }
  /// Adds rows of pairs [row, pair] times columns of pairs [pair, column].
  template <int Sums, int Rows, int Columns>
  static void add_products() {
    for (int row = 0; row < kAmxRows; ++row)
      for (int column = 0; column < kAmxRows; ++column) {
        float sum = bits_to_float(tiles_[Sums][row][column]);
        for (int pair = 0; pair < kAmxPairs; ++pair) {
          const uint32_t a = tiles_[Rows][row][pair], b = tiles_[Columns][pair][column];
          sum += bits_to_float(a << 16) * bits_to_float(b << 16);
          sum += bits_to_float(a & 0xffff0000u) * bits_to_float(b & 0xffff0000u);
        }
        std::memcpy(&tiles_[Sums][row][column], &sum, sizeof sum);
      }
  }

 private:
  inline static thread_local uint32_t tiles_[8][kAmxRows][kAmxPairs];
};

#else

/// Whether this CPU has tiles of bfloat16 and the kernel lets this process use them, for which it has to
/// be asked once.
inline bool has_amx() {
  static const bool has = [] {
    constexpr unsigned kBfloat = 1u << 22, kTile = 1u << 24;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
    return (d & kBfloat) != 0 && (d & kTile) != 0 && __builtin_cpu_supports("avx512bf16") != 0 &&
           syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return has;
}

/// The eight tiles, while one of these lives. How they were configured before is kept and comes back:
/// torch's libraries configure them for several calls. Written as instructions: an intrinsic would need
/// all that it is inlined into compiled for it.
class AmxTiles {
 public:
  AmxTiles() {
    struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } own;
    static_assert(sizeof own == 64, "what the instruction reads");
    std::fill_n(own.row_bytes, 8, uint16_t{kAmxBytes});
    std::fill_n(own.rows, 8, uint8_t{kAmxRows});
    asm volatile("sttilecfg %0" : "=m"(before_));
    asm volatile("ldtilecfg %0" : : "m"(own));
  }
  ~AmxTiles() { asm volatile("ldtilecfg %0" : : "m"(before_)); }
  AmxTiles(const AmxTiles &) = delete;
  AmxTiles &operator=(const AmxTiles &) = delete;

  template <int Tile>
  HKV_INLINE static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
  }
  template <int Tile>
  HKV_INLINE static void load(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  HKV_INLINE static void store(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  /// Adds rows of pairs [row, pair] times columns of pairs [pair, column].
  template <int Sums, int Rows, int Columns>
  HKV_INLINE static void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(Rows), "i"(Columns));
  }

 private:
  struct {
    uint8_t bytes[64];
  } before_;
};

#endif

}  // namespace hkv
