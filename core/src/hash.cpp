#include "embstore/hash.h"

#include <bit>
#include <random>

namespace embstore {

namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

}  // namespace

// xxh64 of an input of exactly 8 bytes: no stripes, one 8-byte lane, the final avalanche.
// The key's value is its little-endian reading, so the result is the same on any machine.
uint64_t Xxh64OfKey(int64_t key, uint64_t seed) {
  const uint64_t lane = std::rotl(static_cast<uint64_t>(key) * kPrime2, 31) * kPrime1;
  uint64_t h = seed + kPrime5 + sizeof(key);
  h = std::rotl(h ^ lane, 27) * kPrime1 + kPrime4;
  h ^= h >> 33;
  h *= kPrime2;
  h ^= h >> 29;
  h *= kPrime3;
  h ^= h >> 32;
  return h;
}

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

}  // namespace embstore
