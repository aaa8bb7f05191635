// SsdIndex: the place of each key's row in the files, and the checksum of the row.
//
// 256 partitions by a keyed hash, each an open-addressing table with linear probing that grows by a
// quarter when it is 85 % full. So an entry of 16 bytes costs at most 24 a key, and growing copies
// one partition at a time.
//
// Thread safety: const methods may run together; any other method needs exclusive access.
//
// Invariants
//  1. A key is in the partition of its hash, at its home or after a run of used places.
//  2. row == kNoRow  <=>  the place is free.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "embstore/hash.h"

namespace embstore {

inline constexpr uint32_t kNoRow = UINT32_MAX;

class SsdIndex {
 public:
  struct Entry {
    int64_t key = 0;
    uint32_t row = kNoRow;  // kNoRow: the place is free
    uint32_t checksum = 0;
  };

  int64_t size() const { return size_; }
  size_t bytes() const {
    size_t total = 0;
    for (const auto& partition : partitions_) total += partition.places.capacity() * sizeof(Entry);
    return total;
  }

  // The entry of the key, or null.
  const Entry* Find(int64_t key) const {
    const uint64_t hash = Hash(key);
    const Partition& partition = partitions_[hash & 0xff];
    if (partition.places.empty()) return nullptr;
    const size_t n = partition.places.size();
    for (size_t at = Home(hash, n);; at = at + 1 == n ? 0 : at + 1) {
      const Entry& entry = partition.places[at];
      if (entry.row == kNoRow) return nullptr;
      if (entry.key == key) return &entry;
    }
  }
  Entry* Find(int64_t key) { return const_cast<Entry*>(std::as_const(*this).Find(key)); }

  void Prefetch(int64_t key) const {
    const uint64_t hash = Hash(key);
    const Partition& partition = partitions_[hash & 0xff];
    if (partition.places.empty()) return;
    // Two lines: most searches reach the second.
    const auto* home =
        reinterpret_cast<const std::byte*>(&partition.places[Home(hash, partition.places.size())]);
    __builtin_prefetch(home);
    __builtin_prefetch(home + 64);
  }

  // Adds a key that is not there; the caller sets the row of the returned entry.
  Entry& Insert(int64_t key);
  // Removes the key if it is there.
  void Erase(int64_t key);

  // A key never changes its partition.
  static constexpr size_t kPartitions = 256;
  template <typename Visit>
  void ForEach(size_t partition, const Visit& visit) const {
    for (const Entry& entry : partitions_[partition].places) {
      if (entry.row != kNoRow) visit(entry);
    }
  }
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (size_t partition = 0; partition < kPartitions; ++partition) ForEach(partition, visit);
  }

 private:
  struct Partition {
    std::vector<Entry> places;
    size_t used = 0;
  };

  static size_t Home(uint64_t hash, size_t n) {
    return static_cast<size_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
  }
  uint64_t Hash(int64_t key) const { return KeyedHash(key, secret_); }
  Entry& FreePlace(Partition& partition, int64_t key) const;
  void GrowPartition(Partition& partition) const;

  HashSecret secret_ = ProcessSecret();  // so that nobody can choose keys that collide

  std::array<Partition, kPartitions> partitions_;
  int64_t size_ = 0;
};

}  // namespace embstore
