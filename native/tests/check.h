// A few lines in place of a test framework: claims that register themselves, and CHECK.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "hybrid_kv.h"

struct Claim {
  const char *name;
  void (*run)();
};

/// All claims of the program, in the order of its files.
inline std::vector<Claim> &claims() {
  static std::vector<Claim> all;
  return all;
}

struct Register {
  Register(const char *name, void (*run)()) { claims().push_back({name, run}); }
};

/// CLAIM(it_holds) { CHECK(...); }
#define CLAIM(name)                                   \
  static void name();                                 \
  static const Register register_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      std::fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
                   hkv_last_error());                                                      \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

/// The call is refused as HKV_INVALID with a sentence that holds `text`.
#define CHECK_REFUSED(call, text)                            \
  do {                                                       \
    CHECK((call) == HKV_INVALID);                            \
    CHECK(std::strstr(hkv_last_error(), (text)) != nullptr); \
  } while (false)

#define CHECK_OK(call) CHECK((call) == HKV_OK)
