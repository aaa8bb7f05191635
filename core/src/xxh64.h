// xxh64 of bytes, as its specification says: https://github.com/Cyan4973/xxHash
// (doc/xxhash_spec.md).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace embstore {
namespace xxh64_internal {

static_assert(std::endian::native == std::endian::little,
              "lanes are read as little-endian numbers");

inline constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
inline constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
inline constexpr uint64_t kPrime3 = 0x165667B19E3779F9ULL;
inline constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
inline constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

template <class T>
T Load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline uint64_t Round(uint64_t accumulator, uint64_t lane) {
  return std::rotl(accumulator + lane * kPrime2, 31) * kPrime1;
}

}  // namespace xxh64_internal

inline uint64_t Xxh64(const void* bytes, size_t size, uint64_t seed) {
  using namespace xxh64_internal;
  const auto* at = static_cast<const uint8_t*>(bytes);
  size_t left = size;
  uint64_t h = seed + kPrime5;
  if (size >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= 32; left -= 32) {
      for (uint64_t& lane : lanes) {
        lane = Round(lane, Load<uint64_t>(at));
        at += 8;
      }
    }
    h = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
        std::rotl(lanes[3], 18);
    for (const uint64_t lane : lanes) h = (h ^ Round(0, lane)) * kPrime1 + kPrime4;
  }
  h += size;
  for (; left >= 8; left -= 8, at += 8) {
    h = std::rotl(h ^ Round(0, Load<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    h = std::rotl(h ^ (Load<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    left -= 4;
    at += 4;
  }
  for (; left > 0; --left, ++at) h = std::rotl(h ^ (*at * kPrime5), 11) * kPrime1;
  h ^= h >> 33;
  h *= kPrime2;
  h ^= h >> 29;
  h *= kPrime3;
  h ^= h >> 32;
  return h;
}

}  // namespace embstore
