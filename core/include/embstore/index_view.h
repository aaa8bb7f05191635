// How a KeyIndex lies in memory, as the probe kernels read it. Internal to KeyIndex and the probe;
// key_index.h explains the parts.
#pragma once

#include <cstdint>

#include "embstore/hash.h"
#include "embstore/types.h"

namespace embstore {

// A cache line of the index: slots 3 g, 3 g + 1 and 3 g + 2. See key_index.h.
struct alignas(64) IndexGroup {
  static constexpr int64_t kSlots = 3;
  static constexpr uint32_t kBlocks = 24, kElsewhere = 1u << kBlocks;
  int64_t keys[kSlots];     // 0 where the slot is free
  uint64_t scores[kSlots];  // 0: the slot is free
  Row rows[kSlots];
  // Of the keys that are looked for here first and are not here: bit i is set when one lies in
  // block i of the bucket, the upper byte counts those outside of the bucket (255: or more).
  uint32_t away;
};
static_assert(sizeof(IndexGroup) == 64);

// Stripes of the index that are alike: there are 2^stripe_bits of them, chosen by the first bits of
// the hash.
struct IndexLayout {
  uint64_t buckets = 1;  // of all stripes
  uint32_t stripe_buckets = 1, stripe_bits = 0;
};

// A key that found no place in its stripe.
struct OverflowEntry {
  int64_t key;
  uint64_t score;  // 0: free
  Row row;
};

// Slots from here on are numbers of overflow entries.
inline constexpr Slot kFirstOverflowSlot = 0x7f000000;

// The tables of KeyIndex as the probe needs them (see key_index.h).
struct IndexView {
  IndexGroup* groups = nullptr;
  HashSecret secret;
  uint64_t grown_from = 0;  // the first hash of the stripes that have grown
  IndexLayout before, grown;
  uint32_t bucket_groups = 1, block_bits = 0;  // of a bucket, and of a block of 2^block_bits groups
  OverflowEntry* overflow = nullptr;           // a power of two of places, or none
  uint64_t overflow_mask = 0;
  HashSecret overflow_secret;

  uint64_t& score(Slot slot) const {
    if (slot >= kFirstOverflowSlot) return overflow[slot - kFirstOverflowSlot].score;
    return groups[slot / IndexGroup::kSlots].scores[slot % IndexGroup::kSlots];
  }
};

}  // namespace embstore
