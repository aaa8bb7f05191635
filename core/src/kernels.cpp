#include "embstore/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <string>

namespace embstore {

namespace plain {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

const Kernels& Choose() {
  const std::vector<const Kernels*> available = AvailableKernels();
  const char* const wanted = std::getenv("EMBSTORE_ISA");
  if (wanted == nullptr || *wanted == '\0') return *available.front();
  std::string names;
  for (const Kernels* kernels : available) {
    if (std::string_view(wanted) == kernels->name) return *kernels;
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  throw InvalidArgument("EMBSTORE_ISA should be one that this machine supports (" + names +
                        ") but is: " + wanted);
}

}  // namespace

std::vector<const Kernels*> AvailableKernels() {
  std::vector<const Kernels*> available;
#if defined(__x86_64__)
  unsigned a, b, features = 0, d;  // __builtin_cpu_supports of Clang 14 does not know F16C
  const bool has_f16c = __get_cpuid(1, &a, &b, &features, &d) && (features & bit_F16C);
  const bool has_avx2 = has_f16c && __builtin_cpu_supports("avx2") &&
                        __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512) available.push_back(&avx512::kKernels);
  if (has_avx2) available.push_back(&avx2::kKernels);
#endif
  available.push_back(&plain::kKernels);
  return available;
}

const Kernels& ActiveKernels() {
  // Whoever comes first chooses. A child that is forked while a thread initializes a static waits
  // for that thread, which it does not have.
  static constinit std::atomic<const Kernels*> active{nullptr};
  const Kernels* kernels = active.load(std::memory_order_relaxed);
  if (!kernels) active.store(kernels = &Choose(), std::memory_order_relaxed);
  return *kernels;
}

}  // namespace embstore
