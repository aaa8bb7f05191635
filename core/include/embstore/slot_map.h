// SlotMap assigns dense slots 0 .. slots-1 to keys: a small table's window on a large set of keys.
//
//     Find      which keys have a slot; lists each missing key once
//     Victims   the worst evictable keys, when there are fewer free slots than missing keys
//     Drop      frees the slots of these victims (the caller has pushed their rows away)
//     Admit     gives the missing keys the lowest free slots, in the order of first occurrence
//
// A key's record is the score of its index entry, so a hit touches nothing else:
//
//     [ 63..59: frequency | 58..32: time of the last use | 31..0: slot + 1 ]
//
// The frequency is a Morris counter: it starts at min_used_freq_power, and a use raises it with
// probability 2^-frequency. Records compare by frequency, then by time; the smallest is evicted
// first. Times are batch numbers. A key is pinned while its last use is not before `pinned_from`:
// batches are trained in order, so this one number protects all batches in flight.
//
// Victims scans one stretch of the index at a time. The index is ordered by hash, so a stretch is a
// random sample of the keys: its worst are the worst of the table up to sampling error, and a step
// costs the same however large the table is.
//
// Thread safety: none; the owner guards it.
//
// Invariants
//  1. A slot is free or belongs to exactly one key.
//  2. Victims and Find change no slot; a failed push or pull in between leaves the map usable.
//  3. The result depends on the calls only (no clock, no random device), so ranks that make the
//  same
//     calls hold the same map.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "embstore/distinct_keys.h"
#include "embstore/key_index.h"
#include "embstore/types.h"

namespace embstore {

struct SlotMapOptions {
  int64_t slots = 0;            // at least 1, below 2^29
  int min_used_freq_power = 5;  // 0 .. 31
  uint64_t seed = 0;            // of the hash; ranks that share a map share it
};

struct KeySlot {
  int64_t key;
  int64_t slot;
};

class SlotMap {
 public:
  // Throws InvalidArgument naming the field, or OutOfMemory.
  explicit SlotMap(const SlotMapOptions& options);

  int64_t slots() const { return slots_; }
  int64_t size() const { return index_.size(); }
  int64_t free_slots() const { return slots_ - size(); }
  int64_t last_time() const { return last_time_; }
  size_t bytes() const;

  // Renews the keys that have a slot. out[i] = slot of keys[i], or -1 until Admit gives it one.
  // Returns how many distinct keys are missing. `out` must stay valid until Admit or the next Find.
  // Throws InvalidArgument when `time` is below that of an earlier call.
  int64_t Find(std::span<const int64_t> keys, int64_t time, int64_t* out);
  std::span<const int64_t> missing() const {
    return std::span(missing_.keys()).subspan(admitted_keys_);
  }

  // Chooses at least `count` unpinned keys plus a margin of about an eighth of the stretches it
  // scanned, so that not every batch has to choose. Fewer if there are not enough.
  std::span<const KeySlot> Victims(int64_t count, int64_t pinned_from);
  void Drop();  // frees the slots of the last Victims

  // Gives slots to the missing keys of the last Find while any are free, and completes its `out`.
  // Returns the new pairs; keys without a slot stay missing.
  std::span<const KeySlot> Admit();

  // Frees the slots of these keys; skips keys that have none.
  void Forget(std::span<const int64_t> keys);

  // Up to `count` keys, the worst first, pinned or not.
  std::vector<KeySlot> Worst(int64_t count) const;
  // The keys whose last use is not before `since`, in the order of their slots.
  std::vector<KeySlot> UsedSince(int64_t since) const;

  // For tests: walks over the whole map, and throws std::logic_error naming what does not hold.
  void CheckInvariants() const;

 private:
  uint64_t Record(uint64_t frequency, int64_t time, int64_t slot) const;
  void Advance(int64_t time);
  void Free(Slot at);
  int64_t TakeLowestFree();
  void VictimsOfStretch(Slot begin, Slot end, double share, uint64_t pinned_record_time);
  template <typename Visit>
  void VisitUsed(const Visit& visit) const;

  int64_t slots_;
  uint64_t first_frequency_;
  KeyIndex index_;
  std::vector<uint64_t> free_;  // a bit for each free slot
  size_t first_free_word_ = 0;  // no bit is set below it
  int64_t time_base_ = 0;       // records keep time - time_base_
  int64_t last_time_ = 0;
  uint64_t random_ = 0x9e3779b97f4a7c15ULL;

  // Of the last Find.
  struct Occurrence {
    uint32_t position, missing;
  };
  int64_t* out_ = nullptr;
  DistinctKeys missing_;
  size_t admitted_keys_ = 0;  // the first of missing_, which have slots by now
  std::vector<Occurrence> missing_at_;
  std::vector<KeySlot> admitted_;

  // Of the last Victims.
  Slot hand_ = 0;
  std::vector<KeySlot> victims_;
  std::vector<Slot> victims_at_;
  std::vector<uint64_t> sample_;
};

}  // namespace embstore
