// Hashing of keys, and the one function that says which rank owns a key.
//
// HashKey is public and the same everywhere: it decides ownership and ties. KeyedHash decides where
// a key is stored in memory.
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <cstdint>

#include "embstore/types.h"

namespace embstore {

// The murmur3 finalizer: a bijection, so different keys never share a hash.
inline uint64_t HashKey(int64_t key) {
  uint64_t h = static_cast<uint64_t>(key);
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  h ^= h >> 33;
  return h;
}

// Constants of a keyed hash; the factors are odd.
struct HashSecret {
  uint64_t mask = 0, first = 1, second = 1;
};
HashSecret SecretOf(uint64_t seed);

// A bijection. Without the seed nobody can choose keys that collide.
inline uint64_t KeyedHash(int64_t key, const HashSecret& secret) {
  uint64_t h = static_cast<uint64_t>(key) ^ secret.mask;
  h ^= h >> 32;
  h *= secret.first;
  h ^= h >> 29;
  h *= secret.second;
  h ^= h >> 32;
  return h;
}

// The keys with a keyed hash from `first` to `last`.
struct HashRange {
  HashSecret secret;
  uint64_t first, last;
};

// A secret that differs from process to process, for tables whose order is never visible outside.
const HashSecret& ProcessSecret();

enum class Ownership : uint8_t {
  kRoundRobin = 0,      // uint64(key) % world
  kHashRoundRobin = 1,  // HashKey(key) % world
  kXxh64 = 2,           // xxh64 of the key's 8 bytes, seed 1, % world (OneEmbedding)
  kContinuous = 3,  // keys below `rows` in equal blocks, one for each rank; others as kRoundRobin
  kOnRank = 4,      // all keys on rank `rows` % world
};

uint64_t Xxh64OfKey(int64_t key, uint64_t seed);

// rows: of kContinuous and kOnRank.
inline uint32_t Owner(int64_t key, uint32_t world, Ownership ownership, uint64_t rows = 0) {
  switch (ownership) {
    case Ownership::kRoundRobin:
      return static_cast<uint32_t>(static_cast<uint64_t>(key) % world);
    case Ownership::kHashRoundRobin:
      return static_cast<uint32_t>(HashKey(key) % world);
    case Ownership::kXxh64:
      return static_cast<uint32_t>(Xxh64OfKey(key, 1) % world);
    case Ownership::kContinuous: {
      const auto number = static_cast<uint64_t>(key);
      if (number >= rows) return static_cast<uint32_t>(number % world);
      return static_cast<uint32_t>(number / (rows / world + (rows % world != 0)));
    }
    case Ownership::kOnRank:
      return static_cast<uint32_t>(rows % world);
  }
  return 0;
}

}  // namespace embstore
