// Store: something that keeps rows by key. A table over a store is a write-back cache of it.
//
// A stored row is [embedding (dim of the table's dtype) | optimizer state (float32)], the first
// Table::stored_row_bytes() bytes of the row in memory, and comes with its score. All operations
// take batches: one call for the misses of a training step, one for its victims.
//
// Thread safety: every method may be called from any thread and does its own locking. A method may
// take the GIL (a store written in Python does). So no caller may hold a lock that another thread
// waits for with the GIL held: the mutex of PinnedRows is such a lock; the table's lock is not,
// since every call of the binding releases the GIL first.
//
// Failures are exceptions. Invariants, without which rows would be lost:
//  1. Get, Contains, Scan and ScanKeys change nothing.
//  2. A Put that throws may have stored some of its rows, but loses none that was there before.
//  3. In this process, Get finds what Put has stored until it is erased.
//  4. If the store outlives a process, whoever opens it next finds what was there at the last
//  Flush.
//     LoadCheckpoint(name) restores what was there at SaveCheckpoint(name).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embstore/types.h"

namespace embstore {

// Rows in plain arrays: rows is (n, row_bytes).
struct StoredRows {
  std::vector<int64_t> keys;
  std::vector<std::byte> rows;
  std::vector<uint64_t> scores;
};

// A walk over the rows of a store. Not thread safe; must not outlive its store.
class StoreScanner {
 public:
  virtual ~StoreScanner() = default;
  // Replaces `block` with the next rows, at most about max_rows; an empty block ends the walk. Rows
  // that nobody puts or erases during the walk come exactly once, even if the store moves them.
  virtual void Next(int64_t max_rows, StoredRows& block) = 0;
};

// A walk over the keys alone.
class KeyScanner {
 public:
  virtual ~KeyScanner() = default;
  // Replaces `keys` with the next ones, at most about max_keys; no keys end the walk. Keys that
  // nobody puts or erases during the walk come at least once.
  virtual void Next(int64_t max_keys, std::vector<int64_t>& keys) = 0;
};

class Store {
 public:
  virtual ~Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // For messages, such as "ssd store /data/user".
  virtual std::string Describe() const = 0;
  int64_t row_bytes() const { return row_bytes_; }
  virtual int64_t size() const = 0;  // keys

  // Sets rows + i * row_bytes and scores[i] where found[i] becomes 1; they are undefined elsewhere.
  // scores may be null: request them only when needed, since they may cost a read of their own.
  // Keys may repeat.
  virtual void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
                   uint8_t* found) const = 0;
  virtual void Contains(std::span<const int64_t> keys, uint8_t* found) const = 0;
  // The last of duplicate keys wins.
  virtual void Put(std::span<const int64_t> keys, const std::byte* rows,
                   const uint64_t* scores) = 0;
  // The same for rows that are not contiguous: rows[i] points to the row of keys[i]. The default
  // copies them into one array.
  virtual void PutScattered(std::span<const int64_t> keys, const std::byte* const* rows,
                            const uint64_t* scores);
  virtual void Erase(std::span<const int64_t> keys) = 0;
  virtual void Clear() = 0;
  virtual void Flush() {}
  virtual std::unique_ptr<StoreScanner> Scan() const = 0;
  // In an order that makes Get fast. The default is Scan without the rows.
  virtual std::unique_ptr<KeyScanner> ScanKeys() const;

  // Named copies of the contents. Python and the files call them snapshots, as OneEmbedding does. A
  // name is one path component. The defaults throw InvalidState: the store keeps none.
  virtual void SaveCheckpoint(const std::string& name);
  // Replaces the contents, or throws and leaves them as they were.
  virtual void LoadCheckpoint(const std::string& name);

  // A store serves one table (or one tier above it): two would hide each other's rows.
  void Attach();  // throws InvalidState when it is attached already
  void Detach() noexcept { attached_.store(false); }

 protected:
  // Throws InvalidArgument unless row_bytes is positive.
  explicit Store(int64_t row_bytes);
  // Throws InvalidState unless `size` rows and one for each different key of `fresh` fit.
  void RequireCapacity(int64_t capacity_rows, int64_t size, std::vector<int64_t> fresh) const;

 private:
  int64_t row_bytes_;
  std::atomic<bool> attached_{false};
};

// Rows in host memory. Grows as needed; a Put beyond `capacity_rows` (0: no limit) throws
// InvalidState and stores nothing.
std::shared_ptr<Store> MakeMemoryStore(int64_t row_bytes, int64_t capacity_rows);

// Stores nothing and finds nothing: a table over it behaves like one without a store.
std::shared_ptr<Store> MakeNullStore(int64_t row_bytes);

// Two tiers as one store: rows go to `upper`, and move down to `lower` when there are more than
// about `upper_rows` of them. Flush and checkpoints reach the lower. Throws InvalidArgument when
// their row sizes differ.
std::shared_ptr<Store> MakeTieredStore(std::shared_ptr<Store> upper, std::shared_ptr<Store> lower,
                                       int64_t upper_rows);

}  // namespace embstore
