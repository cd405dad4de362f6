// Runs every claim, or those whose name holds the first argument; --isas only names those that this CPU runs.
#include "check.h"

int main(int count, char **arguments) {
  if (count > 1 && std::strcmp(arguments[1], "--isas") == 0) {
    std::puts(hkv_runnable_isas());
    return 0;
  }
  int run = 0;
  for (const Claim &claim : claims()) {
    if (count > 1 && std::strstr(claim.name, arguments[1]) == nullptr) continue;
    if (std::getenv("HKV_TEST_VERBOSE") != nullptr) std::fprintf(stderr, "%s\n", claim.name);
    claim.run();
    ++run;
  }
  std::printf("%s: %d claims hold\n", hkv_isa(), run);
  return run == 0;
}
