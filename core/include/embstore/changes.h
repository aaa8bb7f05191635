// ChangeSet: which rows of a table changed, and which keys left it, since it was last taken.
//
// Thread safety: Mark may be called by several threads; the rest needs exclusive access. The table
// guards it.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

class ChangeSet {
 public:
  explicit ChangeSet(int64_t capacity) : marks_(static_cast<size_t>(capacity)) {}

  void Mark(Slot slot) { Store(slot, 1); }
  bool IsMarked(Slot slot) const {
    return reinterpret_cast<const uint8_t*>(marks_.data())[slot] != 0;
  }
  void Unmark(Slot slot) { Store(slot, 0); }
  void Grow(int64_t capacity) { marks_.Grow(static_cast<size_t>(capacity)); }
  void Move(Slot from, Slot to) {
    Store(to, IsMarked(from));
    Store(from, 0);
  }
  void UnmarkAll() { marks_.Clear(); }

  // Keys that were evicted or erased; some may have come back since. Kept distinct from time to
  // time, so that it is bounded by twice the number of different keys.
  void Remove(int64_t key);
  std::vector<int64_t>& removed() { return removed_; }

 private:
  void Store(Slot slot, uint8_t value) {
    // Several threads may mark the same row, always with the same value.
    std::atomic_ref<uint8_t>(reinterpret_cast<uint8_t*>(marks_.data())[slot])
        .store(value, std::memory_order_relaxed);
  }

  HugeBuffer marks_;  // one byte a slot
  std::vector<int64_t> removed_;
  size_t compact_at_ = 1 << 16;
};

}  // namespace embstore
