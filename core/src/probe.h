// How a key is searched. Shared by the index and by the batch probe, which is compiled for each
// instruction set; key_index.h explains the parts.
#pragma once

#include <bit>
#include <cstdint>

#include "embstore/hash.h"
#include "embstore/index_view.h"
#include "embstore/score_clock.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace embstore {

inline constexpr int64_t kGroup = IndexGroup::kSlots;

// Internal linkage on purpose: each instruction set needs its own copy.
namespace {

// Where the search for a key starts.
struct Anchor {
  int64_t bucket;
  uint32_t group;  // in the bucket
};

inline uint64_t HighProduct(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// The hash, read as a fraction, is the position in the index: buckets and groups are in its order.
inline Anchor AnchorOf(uint64_t hash, uint64_t buckets, uint32_t groups) {
  const unsigned __int128 at = static_cast<unsigned __int128>(hash) * buckets;
  return {static_cast<int64_t>(at >> 64),
          static_cast<uint32_t>(HighProduct(static_cast<uint64_t>(at), groups))};
}

inline uint64_t StripeOf(uint64_t hash, const IndexLayout& layout) {
  return layout.stripe_bits ? hash >> (64 - layout.stripe_bits) : 0;
}

inline const IndexLayout& LayoutOf(uint64_t hash, const IndexView& index) {
  return hash >= index.grown_from ? index.grown : index.before;
}

inline Anchor HomeOf(uint64_t hash, const IndexView& index) {
  return AnchorOf(hash, hash >= index.grown_from ? index.grown.buckets : index.before.buckets,
                  index.bucket_groups);
}

// The second bucket: another one of the same stripe, or the home bucket if there is no other.
inline Anchor SecondOf(uint64_t hash, const IndexLayout& layout, uint32_t groups) {
  const uint64_t mixed = (hash ^ (hash >> 32)) * 0xd6e8feb86659fd93ULL;
  const auto home = static_cast<int64_t>(HighProduct(hash, layout.buckets));
  const auto first = static_cast<int64_t>(StripeOf(hash, layout) * layout.stripe_buckets);
  const Anchor step = AnchorOf(mixed, layout.stripe_buckets - 1, groups);
  int64_t in_stripe = home - first + 1 + step.bucket;
  if (in_stripe >= layout.stripe_buckets) in_stripe -= layout.stripe_buckets;
  return {first + in_stripe, step.group};
}

// Which slot of the group has the key, or -1.
inline int64_t FindInGroup(const IndexGroup& group, int64_t key) {
  // The vector load also reads a score, which other threads may be renewing. Only the keys are
  // used, but the thread sanitizer cannot know that.
#if defined(__AVX2__) && !defined(__SANITIZE_THREAD__)
  const __m256i keys = _mm256_load_si256(reinterpret_cast<const __m256i*>(&group));
  const __m256i equal = _mm256_cmpeq_epi64(keys, _mm256_set1_epi64x(key));
  auto mask = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal))) & 0b111u;
#else
  uint32_t mask = 0;
  for (int at = 0; at < kGroup; ++at) mask |= static_cast<uint32_t>(group.keys[at] == key) << at;
#endif
  if (key == 0) [[unlikely]] {  // free slots hold it too
    for (int at = 0; at < kGroup; ++at) {
      if (std::atomic_ref(const_cast<uint64_t&>(group.scores[at]))
              .load(std::memory_order_relaxed) == 0) {
        mask &= ~(1u << at);
      }
    }
  }
  return mask ? std::countr_zero(mask) : -1;
}

// The slot of the key in the blocks of the bucket that its anchor names, or kNoSlot.
inline Slot FindInBlocks(const IndexView& index, const Anchor& anchor, uint32_t away, int64_t key) {
  const int64_t first = anchor.bucket * index.bucket_groups;
  for (uint32_t blocks = away & (IndexGroup::kElsewhere - 1); blocks; blocks &= blocks - 1) {
    uint32_t group = static_cast<uint32_t>(std::countr_zero(blocks)) << index.block_bits;
    const uint32_t end = std::min(group + (1u << index.block_bits), index.bucket_groups);
    for (; group < end; ++group) {
      const int64_t at = FindInGroup(index.groups[first + group], key);
      if (at >= 0) return static_cast<Slot>((first + group) * kGroup + at);
    }
  }
  return kNoSlot;
}

inline Slot FindInOverflow(const IndexView& index, int64_t key) {
  if (!index.overflow_places) return kNoSlot;
  uint64_t at = KeyedHash(key, index.overflow_secret) & index.overflow_mask;
  for (;; at = (at + 1) & index.overflow_mask) {
    const uint32_t number = index.overflow_places[at];
    if (number == 0) return kNoSlot;
    if (index.overflow[number - 1].key == key) {
      return kFirstOverflowSlot + static_cast<Slot>(number - 1);
    }
  }
}

// The slot of a key that is not in its home bucket, or kNoSlot.
inline Slot FindElsewhere(const IndexView& index, uint64_t hash, int64_t key) {
  const IndexLayout& layout = LayoutOf(hash, index);
  if (layout.stripe_buckets > 1) {
    const Anchor second = SecondOf(hash, layout, index.bucket_groups);
    const int64_t group = second.bucket * index.bucket_groups + second.group;
    const int64_t at = FindInGroup(index.groups[group], key);
    if (at >= 0) return static_cast<Slot>(group * kGroup + at);
    const Slot slot = FindInBlocks(index, second, index.groups[group].away, key);
    if (slot != kNoSlot) return slot;
  }
  return FindInOverflow(index, key);
}

}  // namespace
}  // namespace embstore
