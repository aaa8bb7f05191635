// Snapshot: a consistent view of a table, and of the store below it, at one moment. It is read
// while the table is trained.
//
// Copy on write: a call that is about to change a row that was not read yet saves the row first,
// once. So taking a snapshot copies nothing, and training pays only for the rows it touches.
//
//     hashes  0 ........ next ............ 2^64
//             read       not read yet: whoever changes a row saves it (key, score, vector, state)
//
// Rows that are only below are listed by key and then read in chunks, both without the table's
// lock. When such a row comes up or is erased, it is saved as it was below, and its key is marked;
// so is the key of an evicted row. A key that is neither marked nor in the table still has the row
// it had at that moment.
//
// A snapshot of changes has only the rows that changed since the one before it, and the keys that
// were gone. It takes the marks and the keys of the table's ChangeSet, so taking it costs no copy
// either; rows that did not change count as read. Of the keys that left the table, those that are
// back are among its rows; the others are looked for below, and gone where there is no row.
//
// Saved rows take up to memory_bytes; the rest goes to a temporary file (see saved_rows.h). A
// snapshot that cannot save a row fails: Read and rows() throw the error; training continues.
//
// Thread safety: several threads may call rows and Read; each row goes to one of them. Preserve is
// called by several threads of a call that holds the table's lock; the other methods for Table need
// the exclusive lock.
//
// Invariants
//  1. mark(row) is settled  <=>  the row is saved, read, younger than the snapshot, or not among
//     the changes. A key keeps its row number, so marks stay where they are when the index moves
//     its slot.
//  2. Every row is given out once, rows() in all, whatever happens to the table.
//  3. The walk follows the order of the hash (KeyIndex::Walk), so it misses no row when the table
//     grows.
//  4. A key is marked in below_ if its row was saved from below, read, or has been in the table
//     since the snapshot and left it. In a snapshot of changes also when it was in the table at
//     that moment (once listed), or nowhere.
//  5. In a snapshot of changes mark(row) != 0  <=>  the row is one of its rows.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "embstore/key_index.h"
#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

struct FetchedRow;
class FetchedRows;
class KeyList;
class SavedRows;
class Table;
struct RowBlock;

class Snapshot {
 public:
  static constexpr int64_t kMemoryBytes = int64_t{256} << 20;

  enum class Of : uint8_t { kTable, kChanges };

  // A table may have several. kChanges takes the changes away: throws InvalidState unless they are
  // tracked.
  explicit Snapshot(std::shared_ptr<Table> table, int64_t memory_bytes = kMemoryBytes,
                    Of of = Of::kTable);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  Table& table() const { return *table_; }
  // How many rows there are in all. Over a store, and of changes, the first call lists keys.
  int64_t rows();
  // Of changes: the keys that were gone, sorted.
  std::vector<int64_t> removed();

  // Lets go of the table: nothing can be read any more, and training saves no more rows.
  void Detach();
  // Puts back the changes that were taken and could not be used: they are part of the next snapshot
  // of changes. Detaches. Rows that took the place of others count as changed too.
  void Restore();

  // The shared rows at that moment, by number.
  const RowBlock& shared() const { return *shared_; }

  // Up to max_rows further rows whose score is at least min_score; values (n, dim) and states (n,
  // state width) are float32 and may be null, and so may uses (n): how often keys were used, where
  // the table counts that beside their scores, and 0 for rows of the store. Returns how many; 0
  // when no row is left for this thread. Holds the lock of the table for short whiles only. Throws
  // InvalidState when the table was closed, and what the store throws.
  int64_t Read(int64_t max_rows, uint64_t min_score, int64_t* keys, float* values, float* states,
               uint64_t* scores, uint32_t* uses = nullptr);

  // ---- for Table, which calls the newest snapshot; each call reaches the older ones too ----
  void Preserve(const IndexEntry& entry);  // as the index has it now
  // The same for the rows at these slots, some of which may be kNoSlot or repeat.
  // REQUIRES: rows[i] is the row at slots[i].
  void Preserve(std::span<const Slot> slots, const Row* rows);
  bool IsSettled(Row row) const {  // nobody would save it
    const Snapshot* at = this;
    while (at && at->IsSettledMark(at->ReadMark(row))) at = at->older_;
    return at == nullptr;
  }
  // keys[i] for i of `absent` are about to come up or to be erased; `below` has the rows of those
  // that are below, with scores.
  void PreserveBelow(const int64_t* keys, std::span<const uint32_t> absent,
                     const FetchedRows& below);
  void PreserveBelow(std::span<const int64_t> keys, const FetchedRows& below);  // all of them
  void PreserveStore();  // everything below is about to be removed
  void Leave(int64_t key);
  void FailAll();  // with the current exception
  void Prefetch(Row row) const {
    if (row >= 0) __builtin_prefetch(marks_.data() + row, 1);
  }
  void Skip(Row row);
  void Grow(int64_t rows);

 private:
  // Keys listed, or read from the store, under one hold of the lock.
  static constexpr int64_t kKeysPerHold = 1024;
  // Rows looked at under one hold: the least of them even if a training step waits, which takes it
  // about 0.1 ms, since a table that is always in use should get its dump, too.
  static constexpr int64_t kRowsPerPiece = 256, kLeastRowsPerHold = 1024, kRowsPerHold = 4096;

  // Marks of a ChangeSet serve as they are: its 0 and 1 are settled and unread in a snapshot of
  // changes.
  enum : uint8_t { kChanged = 1, kSettled = 2, kSaving = 3 };
  struct Output;
  struct Rest;

  std::atomic_ref<uint8_t> mark(Row row) {
    return std::atomic_ref<uint8_t>(reinterpret_cast<uint8_t*>(marks_.data())[row]);
  }
  uint8_t ReadMark(Row row) const {
    auto& byte = reinterpret_cast<uint8_t&>(const_cast<std::byte*>(marks_.data())[row]);
    return std::atomic_ref<uint8_t>(byte).load(std::memory_order_acquire);
  }
  bool IsSettledMark(uint8_t mark) const { return mark != unread_ && mark != kSaving; }
  enum class Claimed : uint8_t { kNow, kBefore, kNobody };
  Claimed Claim(Row row);  // who saves the row: this call, an earlier one, or none
  void SaveAll(std::span<const Slot> slots, const Row* rows);
  void SaveClaimed(std::span<const IndexEntry> entries);
  void AwaitSaved(Row row);
  void SaveBelow(int64_t key, const FetchedRow& row);
  void PreserveChangeBelow(int64_t key, int64_t place, const FetchedRows& below);
  void CountMarks();
  void ListChanges();
  void Fail();
  void List();
  void RethrowFailure();
  [[noreturn]] void ThrowLost(int64_t key) const;
  void RequireReadable() const;
  std::span<const IndexEntry> NextEntries(std::span<IndexEntry> room);
  bool Walk(Output& out, int64_t room);
  bool ReadBelow(Output& out, int64_t room);
  void Emit(int64_t key, uint64_t score, uint32_t uses, const std::byte* row, Output& out) const;

  const pid_t process_;
  const Of of_;
  const uint8_t unread_;  // what a mark says before the row was saved or read
  std::shared_ptr<Table> table_;
  Snapshot* older_ = nullptr;  // of the same table
  int64_t resident_rows_ = 0;
  std::unique_ptr<RowBlock> shared_;  // few, so they are copied at once
  HugeBuffer marks_;                  // one byte a row
  std::mutex walk_mutex_;
  KeyIndex::Walk walk_;
  std::vector<IndexEntry> met_;  // of the stripe before walk_, read up to met_next_
  size_t met_next_ = 0;
  std::unique_ptr<SavedRows> saved_;
  std::mutex rest_mutex_;
  std::unique_ptr<Rest> rest_;  // a saved block that did not fit the last output

  // Keys that are, or were, below. Guarded by the table's lock, plus below_mutex_ where that is
  // shared.
  std::mutex below_mutex_;
  std::unique_ptr<KeyList> below_;
  int64_t below_rows_ = 0, next_below_ = 0;
  bool all_preserved_ = false;  // by PreserveStore; guarded by the table's lock
  std::mutex list_mutex_;  // held by the thread that lists, which may wait for the table's lock
  bool listed_ = false;
  int64_t listed_keys_ = 0;    // of changes: places of below_ before it are counted
  std::vector<int64_t> gone_;  // of changes; guarded like below_
  bool detached_ = false;      // guarded by the table's lock

  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;  // until it was thrown
  std::string reason_;
};

}  // namespace embstore
