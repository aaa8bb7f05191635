// How a key is looked for: its bucket, its home line and its digest. Shared by the index and by the
// batch probe that is compiled for each instruction set.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "embstore/hash.h"
#include "embstore/kernels.h"

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace embstore {

inline constexpr int64_t kLine = 64;
inline constexpr uint8_t kFreeDigest = 0;
// Fills the last line of buckets whose capacity is no multiple of 64: neither free nor a key.
inline constexpr uint8_t kPadDigest = 1;

// Internal linkage on purpose: each instruction set gets its own copy.
namespace {

struct Home {
  int64_t bucket;
  uint32_t line;
  uint8_t digest;
};

inline Home HomeOf(uint64_t hash, uint64_t base_buckets, uint64_t split_mask,
                   uint32_t lines_per_bucket) {
  const uint64_t high = hash >> 32;
  const uint64_t base = (high * base_buckets) >> 32;
  const auto eight_bits = static_cast<uint32_t>(hash >> 24) & 0xff;
  return {static_cast<int64_t>(base + base_buckets * (hash & split_mask)),
          (static_cast<uint32_t>(high & 0xff) * lines_per_bucket) >> 8,
          static_cast<uint8_t>(2 + ((eight_bits * 254) >> 8))};
}

// Bit i is set where line[i] == digest.
inline uint64_t MatchLine(const uint8_t* line, uint8_t digest) {
#if defined(__AVX512BW__)
  return _mm512_cmpeq_epi8_mask(_mm512_load_si512(line),
                                _mm512_set1_epi8(static_cast<char>(digest)));
#elif defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi8(static_cast<char>(digest));
  const auto* half = reinterpret_cast<const __m256i*>(line);
  const auto low = static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_load_si256(half), wanted)));
  const auto high = static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_load_si256(half + 1), wanted)));
  return low | (static_cast<uint64_t>(high) << 32);
#elif defined(__SSE2__)
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(digest));
  uint64_t mask = 0;
  for (int i = 0; i < 4; ++i) {
    const __m128i part = _mm_load_si128(reinterpret_cast<const __m128i*>(line) + i);
    const auto bits = static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(part, wanted)));
    mask |= static_cast<uint64_t>(bits) << (16 * i);
  }
  return mask;
#else
  uint64_t mask = 0;
  for (int i = 0; i < kLine; ++i) mask |= static_cast<uint64_t>(line[i] == digest) << i;
  return mask;
#endif
}

// Walks the lines of a bucket from `home` on; calls visit(position) for every slot whose digest
// matches until it returns true. Returns that position or -1.
template <typename Visit>
inline int64_t VisitMatches(const uint8_t* bucket_digests, uint32_t lines, uint32_t home,
                            uint8_t digest, const Visit& visit) {
  uint32_t line = home;
  for (uint32_t seen = 0; seen < lines; ++seen) {
    for (uint64_t mask = MatchLine(bucket_digests + line * kLine, digest); mask; mask &= mask - 1) {
      const int64_t position = line * kLine + std::countr_zero(mask);
      if (visit(position)) return position;
    }
    if (++line == lines) line = 0;
  }
  return -1;
}

}  // namespace
}  // namespace embstore
