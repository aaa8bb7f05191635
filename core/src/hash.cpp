#include "embstore/hash.h"

#include <random>

#include "xxh64.h"

namespace embstore {

// The key's value is its little-endian reading, so the result is the same on any machine.
uint64_t Xxh64OfKey(int64_t key, uint64_t seed) { return Xxh64(&key, sizeof(key), seed); }

HashSecret SecretOf(uint64_t seed) {
  // splitmix64: neighbouring seeds give unrelated constants.
  const auto next = [&seed] {
    uint64_t z = seed += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  };
  const uint64_t mask = next(), first = next() | 1, second = next() | 1;
  return {mask, first, second};
}

const HashSecret& ProcessSecret() {
  static const HashSecret secret = [] {
    std::random_device device;
    return SecretOf(static_cast<uint64_t>(device()) << 32 | device());
  }();
  return secret;
}

// When the library is loaded, for the reason that ForkGuard::kRegistered has.
[[maybe_unused]] static const HashSecret& made_at_start = ProcessSecret();

}  // namespace embstore
