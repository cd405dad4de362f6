// What a loop of the engine's pool costs after a pause as long as the rest of a layer.
//
//     g++ -std=c++17 -O2 -pthread -Inative/include -Inative/src -DHKV_ISA_NAME='"baseline"'
//         benchmarks/pool/pauses.cpp native/src/pool.cpp native/src/library.cpp -o build/pauses
//     build/pauses 2 550    # threads, microseconds
//
// A loop has two items of some 15 us per thread. Switches are those of all threads: a voluntary one
// is a worker that went to sleep, and so had to be woken.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pool.h"

namespace {

using Clock = std::chrono::steady_clock;
using Micros = std::chrono::duration<double, std::micro>;
constexpr int kLoops = 1500;

void pause_for(Micros pause) {
  for (const auto begin = Clock::now(); Clock::now() - begin < pause;) {
  }
}

}  // namespace

int main(int count, char **arguments) {
  if (count != 3) return std::fprintf(stderr, "usage: pauses THREADS MICROSECONDS\n"), 2;
  const int threads = std::atoi(arguments[1]);
  const Micros pause(std::atof(arguments[2]));
  hkv::Pool pool(threads, nullptr, 0);
  const hkv::Pool::Body body = [](int64_t, int) {
    volatile double sum = 0;
    for (int i = 0; i < 10000; ++i) sum = sum + i;
  };
  rusage before, after;
  std::vector<double> times;
  getrusage(RUSAGE_SELF, &before);
  for (int loop = 0; loop < kLoops; ++loop) {
    pause_for(pause);
    const auto begin = Clock::now();
    pool.run(2 * threads, body);
    times.push_back(Micros(Clock::now() - begin).count());
  }
  getrusage(RUSAGE_SELF, &after);
  std::sort(times.begin(), times.end());
  std::printf("%d threads, pause %.0f us: loop median %.1f us, p90 %.1f us; switches per loop: %.2f "
              "voluntary, %.2f involuntary\n",
              threads, pause.count(), times[kLoops / 2], times[kLoops * 9 / 10],
              static_cast<double>(after.ru_nvcsw - before.ru_nvcsw) / kLoops,
              static_cast<double>(after.ru_nivcsw - before.ru_nivcsw) / kLoops);
}
