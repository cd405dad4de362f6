// Squares of 32-bit numbers, transposed in registers.
#pragma once

#include "convert.h"
#include "unrolled.h"

namespace hkv {

namespace detail {

/// Lanes of two vectors by number; those of `b` come after those of `a`.
template <int... Lanes>
HKV_INLINE inline Words picked(Words a, Words b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Lanes...);
#else
  return __builtin_shuffle(a, b, Words{Lanes...});
#endif
}

/// Of each two rows `kStep` apart, the upper one's right half of 2 * kStep columns and the lower
/// one's left half change places.
template <int kStep, int... Lanes>
HKV_INLINE inline void exchange(Words (&rows)[kLanes], std::integer_sequence<int, Lanes...>) {
  hkv::unrolled<kLanes>([&](auto row) {
    if constexpr ((row & kStep) == 0) {
      const Words upper = rows[row], lower = rows[row + kStep];
      rows[row] = picked<(Lanes & kStep) ? kLanes + Lanes - kStep : Lanes...>(upper, lower);
      rows[row + kStep] = picked<(Lanes & kStep) ? kLanes + Lanes : Lanes + kStep...>(upper, lower);
    }
  });
}

}  // namespace detail

/// Number j of row i becomes number i of row j.
HKV_INLINE inline void transpose(Words (&rows)[kLanes]) {
  constexpr std::make_integer_sequence<int, kLanes> lanes;
  if constexpr (kLanes >= 16) detail::exchange<8>(rows, lanes);
  if constexpr (kLanes >= 8) detail::exchange<4>(rows, lanes);
  detail::exchange<2>(rows, lanes);
  detail::exchange<1>(rows, lanes);
}

}  // namespace hkv
