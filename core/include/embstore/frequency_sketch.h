// FrequencySketch: how often keys without a row were seen recently, in four bytes a key.
//
// A bucket is a cache line of 15 entries. An entry is a tag of the key and an aged sum in a 16-bit
// float. A bucket records the half-life in which it was last used and is aged at its next use, so
// nothing ever scans the whole sketch. In a full bucket a new key replaces the smallest sum. Keys
// of a bucket with equal tags share an entry: about one in 4,000.
//
// Thread safety: const methods may run together; any other method needs exclusive access.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "embstore/counter_changes.h"
#include "embstore/hash.h"
#include "embstore/memory.h"

namespace embstore {

class FrequencySketch {
 public:
  // Room for about this many keys.
  FrequencySketch(int64_t keys, uint64_t seed);

  // Adds to the sum of the key and returns it, both as of this half-life, which never falls.
  double Add(int64_t key, double amount, int64_t half_life) {
    return AddHash(Hash(key), amount, half_life);
  }
  // Removes the sum of the key and returns it.
  double Take(int64_t key, int64_t half_life) { return TakeHash(Hash(key), half_life); }

  // The same for callers that know the hash of the key.
  uint64_t Hash(int64_t key) const { return KeyedHash(key, secret_); }
  void Prefetch(uint64_t hash) const {
    __builtin_prefetch(buffer_.data() + BucketOf(hash) * sizeof(Bucket), 1);
  }
  double AddHash(uint64_t hash, double amount, int64_t half_life);
  double TakeHash(uint64_t hash, int64_t half_life);

  std::vector<uint16_t> Save() const;
  // Restores what Save returned. False, and nothing changes, if the sizes differ.
  bool Restore(std::span<const uint16_t> saved);

  // The bytes that Save copies, and which of them changed.
  std::span<std::byte> counters() { return {buffer_.data(), count_ * sizeof(Bucket)}; }
  CounterChanges& changes() { return changes_; }

  static int64_t BytesFor(int64_t keys);
  int64_t bytes() const { return static_cast<int64_t>(count_ * sizeof(Bucket)); }

 private:
  static constexpr int kEntries = 15;
  struct alignas(64) Bucket {
    uint32_t half_life;       // in which the sums are valid
    uint16_t tags[kEntries];  // of used entries
    uint16_t sums[kEntries];  // 0: free
  };
  static_assert(sizeof(Bucket) == 64);

  static size_t BucketsFor(int64_t keys);
  Bucket* buckets() { return reinterpret_cast<Bucket*>(buffer_.data()); }
  size_t BucketOf(uint64_t hash) const { return hash & (count_ - 1); }
  Bucket& Aged(uint64_t hash, int64_t half_life);
  static int Find(const Bucket& bucket, uint16_t tag);  // the entry, or -1

  HashSecret secret_;
  size_t count_;  // of buckets: a power of two
  HugeBuffer buffer_;
  CounterChanges changes_;
};

}  // namespace embstore
