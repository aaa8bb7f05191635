// KeyIndex maps keys to slots and keeps a score for each.
//
// A bucket is `bucket_capacity` slots. Its one-byte digests fill whole cache lines that are
// compared with SIMD. Key and score of a slot share 16 bytes, and the four entries of a cache line
// are a group: a key goes to its home group while that has room, so most hits touch one line only,
// and the digests are for the others.
//
//     hash(key) = [ 63..32: base bucket | 31..24: digest | 23..0: which split of the base bucket ]
//                   [ 39..32 and 23..20: home group in the bucket ]
//
//     buckets = B0 * 2^k      growing doubles k: a key of bucket b stays or goes to b + B0 * 2^k,
//                             at the same position in the bucket
//
// Thread safety: const methods may run together; any other method needs exclusive access.
// Does not own rows: it only says where they are.
//
// Invariants
//  1. A key lives in exactly one bucket, chosen by its hash.
//  2. digest == 0  <=>  the slot is free;  score == 0  =>  the slot is free.
//  3. Slot s is position s % bucket_capacity of bucket s / bucket_capacity.
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

class KeyIndex {
 public:
  // Throws InvalidArgument naming the field. max_capacity is rounded up to whole buckets (and by at
  // most a sixteenth to something that doubling can reach); the first capacity is near
  // init_capacity.
  explicit KeyIndex(const KeyIndexOptions& options);

  int64_t size() const { return size_; }
  int64_t capacity() const { return capacity_; }
  int64_t max_capacity() const { return max_capacity_; }
  int64_t bucket_capacity() const { return bucket_capacity_; }
  double max_load_factor() const { return max_load_factor_; }
  bool CanGrow() const { return capacity_ < max_capacity_; }
  size_t bytes() const { return digests_.size() + entries_.size(); }
  // What the next Grow() adds.
  size_t bytes_to_grow() const { return bytes(); }

  IndexView view() const;
  int64_t BucketOf(int64_t key) const;

  bool IsUsed(Slot slot) const { return digest(slot) != 0; }
  const IndexEntry& entry(Slot slot) const { return entries()[slot]; }
  void set_score(Slot slot, uint64_t score) { entries()[slot].score = score; }

  // The slot of the key or kNoSlot.
  Slot Find(int64_t key) const;

  // Fetches what Find and FindOrInsert will read of the key's bucket, and with `entries` what
  // Victim will read.
  void Prefetch(int64_t key, bool entries) const;

  // The slot of the key, or else the free slot of its bucket that is nearest to its home group,
  // which the key then takes. kNoSlot when the bucket is full. Does not count: call AddSize
  // afterwards, so that threads may insert into different buckets together.
  struct Insertion {
    Slot slot;
    bool inserted;
  };
  Insertion FindOrInsert(int64_t key, uint64_t score);

  // The slot of the bucket with the smallest score that `is_protected` lets go (ties: the smallest
  // hash, so the choice does not depend on the order of arrival), or kNoSlot.
  template <typename IsProtected>
  Slot Victim(int64_t bucket, const IsProtected& is_protected) const;

  // Gives the slot of a victim to another key of the same bucket.
  void Replace(Slot slot, int64_t key, uint64_t score);

  void Erase(Slot slot);  // does not count either
  void AddSize(int64_t delta) { size_ += delta; }

  // Doubles the capacity. Calls moved(from, to) for every slot that moves, from several threads;
  // the caller has made room for the new slots. Throws OutOfMemory and changes nothing.
  void Grow(const std::function<void(Slot from, Slot to)>& moved);

  void Clear();

 private:
  uint8_t* digest_of(Slot slot);
  uint8_t digest(Slot slot) const;
  IndexEntry* entries() { return reinterpret_cast<IndexEntry*>(entries_.data()); }
  const IndexEntry* entries() const { return reinterpret_cast<const IndexEntry*>(entries_.data()); }
  void Put(Slot slot, int64_t key, uint64_t score);
  void CountAway(Slot slot, uint32_t home_position, int64_t delta);
  void PadDigests(int64_t first_bucket, int64_t last_bucket);

  int64_t bucket_capacity_, lines_per_bucket_, base_buckets_;
  int64_t splits_ = 0;  // k
  int64_t capacity_, max_capacity_;
  double max_load_factor_;
  int64_t size_ = 0, away_ = 0;  // keys, and those that are not in their home group
  HugeBuffer digests_, entries_;
};

template <typename IsProtected>
Slot KeyIndex::Victim(int64_t bucket, const IsProtected& is_protected) const {
  const int64_t first = bucket * bucket_capacity_;
  const IndexEntry* entry = entries() + first;
  int64_t best = -1;
  uint64_t best_score = UINT64_MAX, best_hash = UINT64_MAX;
  for (int64_t i = 0; i < bucket_capacity_; ++i) {
    if (entry[i].score > best_score || !IsUsed(static_cast<Slot>(first + i))) continue;
    if (is_protected(static_cast<Slot>(first + i))) continue;
    const uint64_t hash = HashKey(entry[i].key);
    if (best >= 0 && entry[i].score == best_score && hash > best_hash) continue;
    best = i;
    best_score = entry[i].score;
    best_hash = hash;
  }
  return best < 0 ? kNoSlot : static_cast<Slot>(first + best);
}

}  // namespace embstore
