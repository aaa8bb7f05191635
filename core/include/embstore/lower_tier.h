// LowerTier: the store below a table, which is a write-back cache of it.
//
//     Fetch       store -> FetchedRows    rows of the keys that the table does not hold
//     Install     FetchedRows -> table    copies a row to its place; it is clean
//     WriteBack   table -> store          rows that leave, if they are dirty; they are clean then
//
// A table without a store has no lower tier: exists() is false, Fetch finds nothing, and no row is
// dirty.
//
// Thread safety: the table's lock guards it. Const methods may run together, and so may MarkDirty,
// CountFetches, and Install of different rows. Fetch only reads the store and needs no lock.
//
// Invariants
//  1. A row is dirty if it is not below, or differs from what is below.
//  2. While a read ahead is under way (BeginReadAhead), HasChangedBelow(key) holds for every key
//     whose row below has changed since it began.
#pragma once

#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embstore/distinct_keys.h"
#include "embstore/key_index.h"
#include "embstore/memory.h"
#include "embstore/row_heap.h"
#include "embstore/store.h"
#include "embstore/types.h"

namespace embstore {

struct FetchedRow {
  const std::byte* data = nullptr;  // null: the key is not below
  uint64_t score = 0;               // 0 unless scores were requested
};

// The answer of a store to one batch of keys.
class FetchedRows {
 public:
  FetchedRows() = default;  // finds nothing
  // Gets keys[i] for every i of `wanted`, each key once. Throws what the store throws.
  FetchedRows(const Store& store, const int64_t* keys, std::span<const uint32_t> wanted,
              bool with_scores);

  FetchedRow Find(int64_t key) const;
  // The wanted keys without repetitions, and where in `wanted` they come first.
  std::span<const int64_t> keys() const { return keys_.keys(); }
  std::span<const uint32_t> first() const { return first_; }
  // numbers()[j] is the place of the j-th wanted key in keys().
  std::span<const uint32_t> numbers() const { return numbers_; }
  FetchedRow at(size_t number) const;  // of keys()[number]
  // The places in keys() of those that come first at these positions, in ascending order, all of
  // which are among first(). Empty if nothing was fetched.
  std::vector<uint32_t> NumbersOf(std::span<const uint32_t> first) const;
  bool empty() const { return keys_.empty(); }
  bool has_scores() const { return keys_.empty() || !scores_.empty(); }

 private:
  int64_t row_bytes_ = 0;
  DistinctKeys keys_;
  std::vector<uint32_t> first_, numbers_;
  RecycledBuffer rows_;
  std::vector<uint64_t> scores_;
  std::vector<uint8_t> found_;
};

class LowerTier {
 public:
  LowerTier() = default;  // none
  ~LowerTier() { Detach(); }
  LowerTier(const LowerTier&) = delete;
  LowerTier& operator=(const LowerTier&) = delete;

  // Null: stays none. Rows are below `capacity`. Throws InvalidState when the store is attached
  // elsewhere.
  void Attach(std::shared_ptr<Store> store, int64_t capacity);
  bool exists() const { return store_ != nullptr; }
  Store& store() const { return *store_; }  // REQUIRES exists()

  FetchedRows Fetch(const int64_t* keys, std::span<const uint32_t> wanted, bool with_scores) const;
  // All of the keys.
  FetchedRows Fetch(std::span<const int64_t> keys, bool with_scores) const;
  // Copies a fetched row to its place in the table. If the key is not below, returns false and
  // marks the row dirty.
  bool Install(const FetchedRow& fetched, Row row, const RowHeap& rows);
  // Counts rows that were installed. Not one by one: threads would wait for each other.
  void CountFetches(int64_t rows) {
    std::atomic_ref<int64_t>(fetches_).fetch_add(rows, std::memory_order_relaxed);
  }

  bool IsDirty(Row row) const { return dirty_[static_cast<size_t>(row)] != 0; }
  void MarkDirty(Row row) {
    assert(row >= 0 && row < std::ssize(dirty_));
    // Several threads may mark the same row.
    std::atomic_ref<uint8_t>(dirty_[static_cast<size_t>(row)]).store(1, std::memory_order_relaxed);
  }
  void Grow(int64_t capacity);      // rows are below it
  void MoveRow(Row from, Row to) {  // to another number
    dirty_[static_cast<size_t>(to)] = dirty_[static_cast<size_t>(from)];
    dirty_[static_cast<size_t>(from)] = 0;
  }
  // Writes the dirty ones of these rows. If the store throws, rows that were not written stay
  // dirty.
  void WriteBack(std::span<const IndexEntry> entries, const RowHeap& rows);
  // The same for all rows of the index.
  void WriteBackAll(const KeyIndex& index, const RowHeap& rows);

  void Erase(std::span<const int64_t> keys);
  // The distinct keys of these that are below.
  std::vector<int64_t> Present(std::vector<int64_t> keys) const;
  void AppendKeys(std::vector<int64_t>& keys) const;  // all that are below
  // Everything below was replaced, and the table holds no rows.
  void NoteReplaced();

  // A Prefetch reads the store without the table's lock, and asks afterwards what has changed.
  struct ReadAhead {
    uint64_t contents;
  };
  ReadAhead BeginReadAhead();
  bool HasChangedBelow(const ReadAhead& read, int64_t key) const {
    return read.contents != contents_ || changed_.Find(key) >= 0;
  }
  void EndReadAhead();

  void Close();           // detaches and frees memory
  void RenewAfterFork();  // threads that read ahead are in the parent

  // Invariant 1, for tests. Throws std::logic_error.
  void CheckInvariants(const KeyIndex& index, const RowHeap& rows) const;

  int64_t fetches() const { return fetches_; }          // rows that came up
  int64_t write_backs() const { return write_backs_; }  // rows that went down

 private:
  void Detach() noexcept;
  void NoteChanged(std::span<const int64_t> keys);

  std::shared_ptr<Store> store_;
  bool attached_ = false;
  std::vector<uint8_t> dirty_;  // one a row; empty without a store
  int64_t fetches_ = 0, write_backs_ = 0;
  int64_t reads_ahead_ = 0;
  DistinctKeys changed_;   // rows below that changed while there are reads ahead
  uint64_t contents_ = 0;  // changes when all rows below do
};

}  // namespace embstore
