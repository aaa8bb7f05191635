// KeyIndex maps keys to slots, and keeps a score and the number of a row for each.
//
// A bucket is `bucket_capacity` slots. Its one-byte digests fill whole cache lines that are
// compared with SIMD. Keys, scores and row numbers of three slots share a cache line, a group: a
// key goes to its home group while that has room, so most hits touch one line only. A group counts
// those keys that had to go elsewhere, so most misses touch one line as well. The digests are for
// the others.
//
//     hash(key) = [ 63..32: base bucket | 31..24: digest | 23..0: which split of the base bucket ]
//                   [ 39..32 and 23..20: home group in the bucket ]
//
//     buckets = B0 * 2^k      growing doubles k: a key of bucket b stays or goes to b + B0 * 2^k,
//                             at the same position in the bucket
//
// Thread safety: const methods may run together; any other method needs exclusive access.
// Does not own rows: it only keeps the numbers that the caller gives.
//
// Invariants
//  1. A key lives in exactly one bucket, chosen by its hash.
//  2. digest == 0  <=>  score == 0  <=>  the slot is free.
//  3. Slot s is s % 3 of group s / 3. A bucket is whole groups, so up to two slots at its end are
//     never used.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "embstore/hash.h"
#include "embstore/kernels.h"
#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

struct KeyIndexOptions {
  int64_t init_capacity = 1 << 14;
  int64_t max_capacity = 1 << 30;
  int64_t bucket_capacity = 128;  // a multiple of 16
  double max_load_factor = 0.75;  // grows beyond it while capacity < max_capacity
};

struct IndexEntry {
  int64_t key;
  uint64_t score;
  Row row;
};

class KeyIndex {
 public:
  // Throws InvalidArgument naming the field. max_capacity is rounded up to whole buckets (and by at
  // most a sixteenth to something that doubling can reach); the first capacity is near
  // init_capacity.
  explicit KeyIndex(const KeyIndexOptions& options);

  int64_t size() const { return size_; }
  int64_t capacity() const { return capacity_; }
  int64_t slots() const { return buckets() * bucket_groups_ * IndexGroup::kSlots; }  // numbers
  int64_t max_capacity() const { return max_capacity_; }
  int64_t bucket_capacity() const { return bucket_capacity_; }
  double max_load_factor() const { return max_load_factor_; }
  bool CanGrow() const { return capacity_ < max_capacity_; }
  size_t bytes() const { return digests_.size() + groups_.size(); }
  // What the next Grow() adds.
  size_t bytes_to_grow() const { return bytes(); }

  IndexView view() const;
  int64_t BucketOf(int64_t key) const;

  bool IsUsed(Slot slot) const { return score(slot) != 0; }
  int64_t key(Slot slot) const { return group(slot).keys[slot % IndexGroup::kSlots]; }
  uint64_t score(Slot slot) const { return group(slot).scores[slot % IndexGroup::kSlots]; }
  Row row(Slot slot) const { return group(slot).rows[slot % IndexGroup::kSlots]; }
  IndexEntry entry(Slot slot) const { return {key(slot), score(slot), row(slot)}; }
  void set_score(Slot slot, uint64_t score) {
    group(slot).scores[slot % IndexGroup::kSlots] = score;
  }
  void set_row(Slot slot, Row row) { group(slot).rows[slot % IndexGroup::kSlots] = row; }

  void PrefetchSlot(Slot slot) const { __builtin_prefetch(&group(slot), 1); }

  // Calls visit(slot, entry) for the slots of [begin, end) whose score is wanted(score), ascending.
  template <typename Wanted, typename Visit>
  void VisitScores(Slot begin, Slot end, const Wanted& wanted, const Visit& visit) const;
  // The same for all used slots.
  template <typename Visit>
  void VisitUsed(Slot begin, Slot end, const Visit& visit) const {
    VisitScores(begin, end, [](uint64_t score) { return score != 0; }, visit);
  }

  // The slot of the key or kNoSlot.
  Slot Find(int64_t key) const;

  // Fetches what Find and FindOrInsert will read of the key's bucket, and with `whole` what Victim
  // will read.
  void Prefetch(int64_t key, bool whole) const;

  // The slot of the key, or else the free slot of its bucket that is nearest to its home group,
  // which the key then takes; give it a row with set_row. kNoSlot when the bucket is full. Does not
  // count: call AddSize afterwards, so that threads may insert into different buckets together.
  struct Insertion {
    Slot slot;
    bool inserted;
  };
  Insertion FindOrInsert(int64_t key, uint64_t score);

  // The slot of the bucket with the smallest score that `is_protected` lets go (ties: the smallest
  // hash, so the choice does not depend on the order of arrival), or kNoSlot.
  template <typename IsProtected>
  Slot Victim(int64_t bucket, const IsProtected& is_protected) const;

  // Gives slot and row of a victim to another key of the same bucket.
  void Replace(Slot slot, int64_t key, uint64_t score);

  void Erase(Slot slot);  // does not count either
  void AddSize(int64_t delta) { size_ += delta; }

  // Doubles the capacity. Calls moved(from, to) for every slot that moves, from several threads;
  // the caller has made room for the new slots. Throws OutOfMemory and changes nothing.
  void Grow(const std::function<void(Slot from, Slot to)>& moved);

  void Clear();

 private:
  int64_t buckets() const { return capacity_ / bucket_capacity_; }
  int64_t PositionOf(int64_t key, const Home& home) const;  // in its bucket, or -1
  uint8_t* digests_of(int64_t bucket) const {
    return reinterpret_cast<uint8_t*>(digests_.data()) + bucket * digest_lines_ * kLine;
  }
  IndexGroup* groups() { return reinterpret_cast<IndexGroup*>(groups_.data()); }
  const IndexGroup* groups() const { return reinterpret_cast<const IndexGroup*>(groups_.data()); }
  IndexGroup& group(Slot slot) { return groups()[slot / IndexGroup::kSlots]; }
  const IndexGroup& group(Slot slot) const { return groups()[slot / IndexGroup::kSlots]; }
  void Put(Slot slot, int64_t key, uint64_t score, Row row);
  void CountAway(Slot slot, const Home& home, int32_t delta);
  void PadDigests(int64_t first_bucket, int64_t last_bucket);

  int64_t bucket_capacity_, digest_lines_, bucket_groups_, base_buckets_;
  int64_t splits_ = 0;  // k
  int64_t capacity_, max_capacity_;
  double max_load_factor_;
  int64_t size_ = 0, away_ = 0;  // keys, and those that are not in their home group
  mutable HugeBuffer digests_;
  HugeBuffer groups_;
};

template <typename Wanted, typename Visit>
void KeyIndex::VisitScores(Slot begin, Slot end, const Wanted& wanted, const Visit& visit) const {
  const IndexGroup* group = groups() + begin / IndexGroup::kSlots;
  int64_t at = begin % IndexGroup::kSlots;
  for (Slot slot = begin; slot < end; ++slot) {
    if (wanted(group->scores[at])) {
      visit(slot, IndexEntry{group->keys[at], group->scores[at], group->rows[at]});
    }
    if (++at == IndexGroup::kSlots) {
      at = 0;
      ++group;
    }
  }
}

template <typename IsProtected>
Slot KeyIndex::Victim(int64_t bucket, const IsProtected& is_protected) const {
  const int64_t bucket_slots = bucket_groups_ * IndexGroup::kSlots;
  const auto first = static_cast<Slot>(bucket * bucket_slots);
  Slot best = kNoSlot;
  uint64_t best_score = UINT64_MAX, best_hash = UINT64_MAX;
  VisitUsed(first, static_cast<Slot>(first + bucket_slots), [&](Slot slot, const IndexEntry& e) {
    if (e.score > best_score || is_protected(slot)) return;
    const uint64_t hash = HashKey(e.key);
    if (best != kNoSlot && e.score == best_score && hash > best_hash) return;
    best = slot;
    best_score = e.score;
    best_hash = hash;
  });
  return best;
}

}  // namespace embstore
