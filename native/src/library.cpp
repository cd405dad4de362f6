// What the library says about itself: version, instruction set, last error.
#include <cstring>

#include "error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hkv {
namespace {

#if defined(__x86_64__)

/// Not all compilers know it by name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

#endif

thread_local char last_error[512] = "";

}  // namespace

void set_last_error(const char *message) noexcept {
  std::strncpy(last_error, message, sizeof(last_error) - 1);
  last_error[sizeof(last_error) - 1] = '\0';
}

}  // namespace hkv

extern "C" {

int hkv_abi_version(void) { return HKV_ABI_VERSION; }

const char *hkv_isa(void) { return HKV_ISA_NAME; }

const char *hkv_best_isa(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2") && hkv::has_f16c();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  if (avx2 && avx512) return "avx512";
  if (avx2) return "avx2";
#endif
  return "baseline";
}

const char *hkv_last_error(void) { return hkv::last_error; }

}  // extern "C"
