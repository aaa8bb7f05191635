// AdmissionFilter: how often keys without a row were seen, in two bytes a key.
//
// A bucket has 16 entries; an entry is a fingerprint of the key and a count, together 16 bits. Two
// keys of a bucket share an entry when their fingerprints are equal, which admits the second one
// early: about one key in a thousand for thresholds up to 3, one in a hundred up to 31. In a full
// bucket a new key replaces the smallest count, so keys that are seen once do not stay. To be
// admitted, a key must come back before as many others have come as there is room for.
//
// Thread safety: none; the table guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "embstore/counter_changes.h"

namespace embstore {

class AdmissionFilter {
 public:
  static constexpr int64_t kMaxThreshold = 255;

  // Throws InvalidArgument unless 1 <= threshold <= kMaxThreshold.
  explicit AdmissionFilter(int64_t threshold);

  // Makes room to track about this many keys. Counts stay.
  void Reserve(int64_t keys);

  void Count(int64_t key);             // up to the threshold
  bool IsAdmitted(int64_t key) const;  // it was counted `threshold` times
  void Forget(int64_t key);

  // The threshold and all entries, in this order; what a dump keeps.
  std::vector<uint16_t> Save() const;
  // Restores what Save returned. False, and nothing changes, if it is for another threshold. Throws
  // InvalidArgument for anything that Save does not return.
  bool Restore(std::span<const uint16_t> saved);
  static void RequireForm(std::span<const uint16_t> saved);  // throws as Restore does

  // The entries as bytes, and which of them changed.
  std::span<std::byte> counters() { return std::as_writable_bytes(std::span(entries_)); }
  CounterChanges& changes() { return changes_; }
  // False, and nothing changes, where they are of another threshold or size.
  bool Apply(const TakenCounters& taken);
  uint16_t threshold() const { return static_cast<uint16_t>(threshold_); }

  // Of a filter with room for so many keys.
  static int64_t BytesFor(int64_t keys);
  int64_t bytes() const { return static_cast<int64_t>(entries_.size() * sizeof(uint16_t)); }

 private:
  uint16_t* Bucket(uint64_t hash);  // to be changed
  const uint16_t* Bucket(uint64_t hash) const;
  uint16_t Fingerprint(uint64_t hash) const;  // in the bits of an entry above the count
  int Find(const uint16_t* bucket, uint16_t fingerprint) const;  // -1: not there

  int64_t threshold_;
  int count_bits_;
  std::vector<uint16_t> entries_;  // buckets (a power of two) x 16; 0: free
  CounterChanges changes_;
};

}  // namespace embstore
