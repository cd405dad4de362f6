// What the library says about itself: version, instruction set, last error.
#include <cstring>

#include "error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hkv {
namespace {

#if defined(__x86_64__)

/// Not all compilers know these two by name.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool has_avxvnni() {
  constexpr unsigned kBit = 1u << 4;
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || a < 1) return false;  // a: the last part
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kBit) != 0;
}

/// The names that setup.py gives to sets of flags, each where every flag's instructions are there.
const char *find_isas() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && has_f16c();
  const bool avxvnni = avx2 && has_avxvnni();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  if (avx512) return avxvnni ? "baseline avx2 avxvnni avx512" : "baseline avx2 avx512";
  if (avxvnni) return "baseline avx2 avxvnni";
  return avx2 ? "baseline avx2" : "baseline";
}

#else

const char *find_isas() { return "baseline"; }

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

const char *hkv_runnable_isas(void) { return hkv::find_isas(); }

const char *hkv_last_error(void) { return hkv::last_error; }

}  // extern "C"
