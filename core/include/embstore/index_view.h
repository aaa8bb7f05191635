// The memory layout of a KeyIndex, as the probe kernels read it. Internal to KeyIndex and the
// probe; key_index.h explains the parts.
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
  // Where the keys are whose home is this group but that are not in it: bit i is set when block i
  // of the bucket has one, the upper byte counts those outside of the bucket (255: or more).
  uint32_t away;
};
static_assert(sizeof(IndexGroup) == 64);

// Entries of the index, column by column.
struct EntryColumns {
  int64_t* keys;
  uint64_t* scores;
  Row* rows;
};

// 2^stripe_bits stripes of equal width. The leading bits of the hash choose the stripe.
struct IndexLayout {
  uint64_t buckets = 1;  // of all stripes
  uint32_t stripe_buckets = 1, stripe_bits = 0;
};

// A key whose stripe had no room.
struct OverflowEntry {
  int64_t key;
  uint64_t score;
  Row row;
};

// Slots from here on number the overflow entries.
inline constexpr Slot kFirstOverflowSlot = 0x7f000000;
inline constexpr int64_t kMostOverflowEntries = int64_t{1} << 24;

// Some of the keys that a probe found, but not in their home group.
struct AwayHits {
  static constexpr int kMost = 4;
  int most = kMost;
  int count = 0;
  int64_t keys[kMost];
};

// What the probe needs of a KeyIndex.
struct IndexView {
  IndexGroup* groups = nullptr;
  HashSecret secret;
  uint64_t grown_from = 0;  // the first hash of the stripes that have grown
  IndexLayout before, grown;
  uint32_t bucket_groups = 1, block_bits = 0;  // groups a bucket; 2^block_bits groups a block
  OverflowEntry* overflow = nullptr;
  const uint32_t* overflow_places = nullptr;  // number + 1, 0 is free; a power of two, or null
  uint64_t overflow_mask = 0;
  HashSecret overflow_secret;
  AwayHits* away_hits = nullptr;  // null: nobody asks

  uint64_t& score(Slot slot) const {
    if (slot >= kFirstOverflowSlot) return overflow[slot - kFirstOverflowSlot].score;
    return groups[slot / IndexGroup::kSlots].scores[slot % IndexGroup::kSlots];
  }
};

}  // namespace embstore
