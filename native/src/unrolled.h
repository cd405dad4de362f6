// Loops of a constant length without a loop.
#pragma once

#include <type_traits>
#include <utility>

#include "convert.h"

namespace hkv {

namespace detail {

template <typename Body, int... Indices>
HKV_INLINE inline void unrolled(const Body &body, std::integer_sequence<int, Indices...>) {
  (body(std::integral_constant<int, Indices>()), ...);
}

}  // namespace detail

/// Calls body(0) .. body(Count - 1) with constants: what is indexed by them stays in registers, which
/// GCC 12 does not grant to loops.
template <int Count, typename Body>
HKV_INLINE inline void unrolled(const Body &body) {
  detail::unrolled(body, std::make_integer_sequence<int, Count>());
}

}  // namespace hkv
