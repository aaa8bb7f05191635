// PinnedRows: the live lists of a table, and which rows they protect from eviction.
//
// A call that takes rows away first stamps the rows of its own batch and those of other live
// batches; from then on the stamp of a row tells who holds it.
//
// Thread safety: Add and Remove may be called by any thread at any time. The table's lock guards
// the rest: const methods, and Hold of different rows, may run together.
//
// Invariants, between Begin or BeginBatch and the end of the call
//  1. stamp == stamp_      <=>  the running call holds the row.
//  2. stamp == stamp_ - 1   =>  another live batch holds it, and the running call does not.
#pragma once

#include <cassert>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <span>
#include <vector>

#include "embstore/memory.h"
#include "embstore/slot_list.h"
#include "embstore/types.h"

namespace embstore {

class PinnedRows {
 public:
  void Add(SlotList* list);
  void Remove(SlotList* list);

  // A new call, which holds no rows and knows of none that others hold. Rows are below `capacity`.
  void Begin(int64_t capacity);
  // A new call that holds the rows of the list whose rows() are `own`, beside other live batches.
  void BeginBatch(const Row* own, int64_t capacity);
  void Hold(Row row) {
    assert(row >= 0 && static_cast<size_t>(row) < stamps_.size());
    stamps()[row] = stamp_;
  }
  bool IsHeldByCall(Row row) const { return stamps()[row] == stamp_; }
  bool IsHeldByOthers(Row row) const { return stamps()[row] == stamp_ - 1; }
  bool IsHeld(Row row) const { return stamps()[row] >= stamp_ - 1; }
  void Prefetch(Row row) const { __builtin_prefetch(stamps() + row, 1); }

  // The rows that this call holds become kMissingRow in all lists but the one whose rows() are
  // `own`.
  void TakeFromLists(const Row* own);
  void TakeAllFromLists();
  // Rows have moved: what was row r is number[r].
  void Renumber(std::span<const Row> number);

  template <typename Visit>
  void VisitLists(const Visit& visit) const {
    std::lock_guard guard(mutex_);
    for (const SlotList* list : lists_) visit(*list);
  }

  void Clear() { stamps_ = HugeBuffer(); }
  std::mutex& mutex() { return mutex_; }  // for fork(), which holds it
  void RenewAfterFork();                  // where another thread held it

 private:
  uint8_t* stamps() const {
    return const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(stamps_.data()));
  }

  // Never held while waiting for anything else: a thread that must not wait for the table may drop
  // a list.
  mutable std::mutex mutex_;
  std::vector<SlotList*> lists_;
  HugeBuffer stamps_;  // a byte for each row
  uint8_t stamp_ = 0;
};

}  // namespace embstore
