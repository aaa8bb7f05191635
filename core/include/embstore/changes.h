// ChangeSet: which rows of a table changed, and which keys left it, since it was last taken by a
// Snapshot.
//
// Thread safety: the table's lock guards it. Several threads may Mark; the rest needs exclusive
// access.
//
// Invariants
//  1. A row is marked if it changed, or was inserted, since the set was taken.
//  2. removed() holds every key that left the table since then.
#pragma once

#include <atomic>
#include <cassert>
#include <cstdint>
#include <memory>
#include <utility>

#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

class KeyList;

class ChangeSet {
 public:
  // Takes over `marks`, which are all 0, for so many rows.
  ChangeSet(HugeBuffer marks, int64_t rows);
  ~ChangeSet();

  void Mark(Row row) { Store(row, 1); }
  void Unmark(Row row) { Store(row, 0); }
  bool IsMarked(Row row) const {
    assert(row >= 0 && static_cast<size_t>(row) < marks_.size());
    return reinterpret_cast<const uint8_t*>(marks_.data())[row] != 0;
  }
  void Grow(int64_t rows) { marks_.Grow(static_cast<size_t>(rows)); }
  void UnmarkAll() { marks_.Clear(); }

  // Keys that were evicted or erased; some may have come back since, as changed rows.
  void Remove(int64_t key);

  // What a snapshot takes over. Marks are one byte a row, 1 where it changed.
  HugeBuffer TakeMarks() { return std::move(marks_); }
  std::unique_ptr<KeyList> TakeRemoved();

 private:
  void Store(Row row, uint8_t value) {
    assert(row >= 0 && static_cast<size_t>(row) < marks_.size());
    // Several threads may mark the same row, always with the same value.
    std::atomic_ref<uint8_t>(reinterpret_cast<uint8_t*>(marks_.data())[row])
        .store(value, std::memory_order_relaxed);
  }

  HugeBuffer marks_;
  std::unique_ptr<KeyList> removed_;
};

}  // namespace embstore
