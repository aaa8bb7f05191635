// How a key is looked for: its bucket, its home group there and its digest. Shared by the index and
// by the batch probe that is compiled for each instruction set.
//
// A group is the three slots of one cache line. Most keys lie in their home group, where they are
// found without their digest.
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

inline constexpr int64_t kGroup = IndexGroup::kSlots;
inline constexpr uint8_t kFreeDigest = 0;
// Fills the last line of buckets whose capacity is no multiple of 64: neither free nor a key.
inline constexpr uint8_t kPadDigest = 1;

// Internal linkage on purpose: each instruction set gets its own copy.
namespace {

inline Home HomeOf(uint64_t hash, const IndexView& index) {
  const uint64_t high = hash >> 32;
  const uint64_t base = (high * index.base_buckets) >> 32;
  const auto eight_bits = static_cast<uint32_t>(hash >> 24) & 0xff;
  // From bits that choose neither base bucket nor split but in the very largest tables.
  const auto twelve_bits = static_cast<uint32_t>((high & 0xff) << 4 | ((hash >> 20) & 0xf));
  // The last group may be a part of one, and is nobody's home.
  const uint32_t groups = index.bucket_capacity / kGroup;
  return {static_cast<int64_t>(base + index.base_buckets * (hash & index.split_mask)),
          (twelve_bits * groups) >> 12, static_cast<uint8_t>(2 + ((eight_bits * 254) >> 8))};
}

// Which slot of the group has the key, or -1. Says -1 for key 0 as well: the key of a free slot is
// 0.
inline int64_t FindInGroup(const IndexGroup& group, int64_t key) {
  if (key == 0) return -1;
  // Threads renew scores meanwhile. Of what the vector compares only the keys count, but the thread
  // sanitizer cannot know.
#if defined(__AVX2__) && !defined(__SANITIZE_THREAD__)
  const __m256i keys = _mm256_load_si256(reinterpret_cast<const __m256i*>(&group));
  const __m256i equal = _mm256_cmpeq_epi64(keys, _mm256_set1_epi64x(key));
  const auto mask = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) & 0b111u;
  return mask ? std::countr_zero(mask) : -1;
#else
  int64_t at = 0;
  while (group.keys[at] != key) {
    if (++at == kGroup) return -1;
  }
  return at;
#endif
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

// The free position nearest after the home group in its line, or else in the following lines; -1 in
// a full bucket.
inline int64_t FirstFree(const uint8_t* bucket_digests, uint32_t lines, const Home& home) {
  uint32_t line = home.line();
  for (uint32_t seen = 0; seen < lines; ++seen) {
    const int from = home.position() % kLine;
    const uint64_t free = std::rotr(MatchLine(bucket_digests + line * kLine, kFreeDigest), from);
    if (free) return line * kLine + (from + std::countr_zero(free)) % kLine;
    if (++line == lines) line = 0;
  }
  return -1;
}

}  // namespace
}  // namespace embstore
