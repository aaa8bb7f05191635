// Snapshot: the rows of a table as they were at one moment, read while the table is trained on.
//
// Copy before write: a call that is about to change a row which nobody has read yet saves the row
// first, once. So taking a snapshot costs no copy, and training pays for the rows it touches only.
//
//     hashes  0 ........ next ............ 2^64
//             read       not read yet: whoever changes a row saves it (key, score, vector, state)
//
// Thread safety: Read may be called by several threads; each row is given to one of them. Preserve
// is called by whoever holds the table's lock, from several of its threads.
//
// Invariants
//  1. mark(row) == kSettled  <=>  the row is saved, read, or younger than the snapshot. A key keeps
//     its row number, so marks stay where they are when the index moves its slot.
//  2. Every row is given out once; all of them are rows() in number, whatever happens to the table.
//  3. The walk goes in the order of the hash (KeyIndex::Walk), so growth does not make it miss a
//  row.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "embstore/key_index.h"
#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

class Table;

class Snapshot {
 public:
  // One at a time for a table: throws InvalidState while another lives.
  explicit Snapshot(std::shared_ptr<Table> table);
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  Table& table() const { return *table_; }
  int64_t rows() const { return rows_; }

  // Up to max_rows further rows; values (n, dim) and states (n, state width) are float32 and may be
  // null. Returns how many; 0 when no row is left for this thread. Holds the lock of the table for
  // short whiles only. Throws InvalidState when the table was closed.
  int64_t Read(int64_t max_rows, int64_t* keys, float* values, float* states, uint64_t* scores);

  // ---- for Table; the caller holds its lock ----
  void Preserve(const IndexEntry& entry);  // as the index has it now
  bool IsSettled(Row row) const {
    return const_cast<Snapshot*>(this)->mark(row).load(std::memory_order_acquire) == kSettled;
  }
  void Prefetch(Row row) const {
    if (row >= 0) __builtin_prefetch(marks_.data() + row, 1);
  }
  void Skip(Row row) { mark(row).store(kSettled, std::memory_order_relaxed); }
  void Grow(int64_t rows) { marks_.Grow(static_cast<size_t>(rows)); }

 private:
  enum : uint8_t { kUnread = 0, kSaving = 1, kSettled = 2 };
  struct Saved {  // rows as they lie in memory, after their entries
    PooledBuffer buffer;
    int64_t count = 0;
  };
  struct Shard {
    std::mutex mutex;
    std::vector<Saved> blocks;
  };
  struct Output;
  static constexpr int64_t kShards = 8;

  std::atomic_ref<uint8_t> mark(Row row) {
    return std::atomic_ref<uint8_t>(reinterpret_cast<uint8_t*>(marks_.data())[row]);
  }
  bool TakeSaved(Saved& block, bool full_only);
  void Emit(const Saved& block, int64_t first, int64_t count, Output& out) const;
  bool Walk(Output& out, int64_t room);

  std::shared_ptr<Table> table_;
  int64_t rows_ = 0, rows_per_block_ = 0;
  HugeBuffer marks_;  // one byte a row
  std::mutex walk_mutex_;
  KeyIndex::Walk walk_;
  Shard shards_[kShards];
  std::mutex rest_mutex_;
  Saved rest_;  // a saved block that did not fit the last output
  int64_t rest_first_ = 0;
};

}  // namespace embstore
