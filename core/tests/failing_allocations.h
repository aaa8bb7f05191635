// Allocations that fail. One file of a program may include it: it replaces operator new.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

// Allocations until one fails; negative: none does.
inline std::atomic<int64_t> allocations_left{-1};

[[gnu::noinline]] void* operator new(size_t bytes) {
  if (allocations_left.load() >= 0 && allocations_left.fetch_sub(1) == 0) throw std::bad_alloc();
  if (void* data = std::malloc(bytes ? bytes : 1)) return data;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace embstore {

// Calls `work` with the first, the second, ... allocation failing until none does. Returns how
// often it failed.
template <typename Work, typename Verify>
int64_t FailEachAllocation(const Work& work, const Verify& verify) {
  for (int64_t failures = 0;; ++failures) {
    bool failed = false;
    allocations_left = failures;
    try {
      work();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    if (!failed) return failures;
    verify();
  }
}

}  // namespace embstore
