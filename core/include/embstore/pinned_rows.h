// PinnedRows: the live lists of a table, and which rows they protect from eviction.
//
// A call that takes rows away first stamps the rows of other live batches; from then on the stamp
// of a row tells who holds it. The rows of its own batch are many, and scores tell most others
// apart from them: they are stamped when the first row is asked for whose score does not.
//
// Thread safety: Add and Remove may be called by any thread at any time. The table's lock guards
// the rest: const methods, IsHeld..., and Hold of different rows, may run together.
//
// Invariants, between Begin or BeginBatch and the end of the call
//  1. stamp == stamp_      <=>  the running call holds the row, and it has been stamped.
//  2. stamp == stamp_ - 1   =>  another live batch holds it, and 1. does not apply.
//  3. The score of a row of the own batch that has not been stamped is at least least_own_score_.
#pragma once

#include <atomic>
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
  // The scores of the own rows are at least `least_score`.
  void BeginBatch(const Row* own, int64_t capacity, uint64_t least_score);
  void Hold(Row row) {
    assert(row >= 0 && static_cast<size_t>(row) < stamps_.size());
    stamps()[row] = stamp_;
  }
  // Of a row and the score of its key.
  bool IsHeld(Row row, uint64_t score) {
    StampOwn(score);
    return stamps()[row] >= stamp_ - 1;
  }
  bool IsHeldByCall(Row row, uint64_t score) {
    StampOwn(score);
    return stamps()[row] == stamp_;
  }
  // REQUIRES: the running call does not hold it.
  bool IsHeldByOthers(Row row) const { return stamps()[row] == stamp_ - 1; }
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
  // Stamps the own rows, once, unless none of them has this score.
  void StampOwn(uint64_t score) {
    if (score >= least_own_score_ && !own_stamped_.load(std::memory_order_acquire)) StampOwnRows();
  }
  void StampOwnRows();
  void Stamp(const SlotList& list, uint8_t value);

  // Never held while waiting for anything else: a thread that must not wait for the table may drop
  // a list.
  mutable std::mutex mutex_;
  std::vector<SlotList*> lists_;
  HugeBuffer stamps_;  // a byte for each row
  uint8_t stamp_ = 0;
  const SlotList* own_ = nullptr;  // the list of the running call, or null
  uint64_t least_own_score_ = 0;
  std::mutex stamping_;
  std::atomic<bool> own_stamped_{true};
};

}  // namespace embstore
