// Errors inside the engine are exceptions; `guarded` turns them into a status at the C door.
#pragma once

#include <new>
#include <stdexcept>
#include <string>

#include "hybrid_kv.h"

namespace hkv {

/// An argument that the caller has to correct.
struct Invalid : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// NaN or infinity where it cannot be.
struct NotFinite : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

void set_last_error(const char *message) noexcept;

/// Runs `body`; no exception leaves it.
template <typename Body>
int guarded(Body &&body) noexcept {
  try {
    body();
    return HKV_OK;
  } catch (const Invalid &error) {
    set_last_error(error.what());
    return HKV_INVALID;
  } catch (const NotFinite &error) {
    set_last_error(error.what());
    return HKV_NOT_FINITE;
  } catch (const std::bad_alloc &) {
    set_last_error("out of memory");
    return HKV_NO_MEMORY;
  } catch (const std::exception &error) {
    set_last_error(error.what());
    return HKV_FAILED;
  } catch (...) {
    set_last_error("unknown failure");
    return HKV_FAILED;
  }
}

inline void require(bool condition, const char *message) {
  if (!condition) throw Invalid(message);
}

}  // namespace hkv
