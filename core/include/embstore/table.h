// Table: rows by key, with one dimension, optimizer, initializer and score strategy.
//
// A row is [embedding (dim of dtype) | optimizer state (float32)], contiguous, 16-byte aligned.
//
// Thread safety: every public method locks for itself; methods marked const may run together, one
// other method runs alone. The batch operations over several tables (lookup.h, gradient.h) lock
// their tables in a fixed order.
//
// Invariants
//  1. A row is initialised (or assigned) in the call that inserts its key.
//  2. Slots held by a SlotList are never given to another key: eviction passes them by, growth moves
//     them, erasing turns them into kNoSlot.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embstore/initializer.h"
#include "embstore/kernels.h"
#include "embstore/key_index.h"
#include "embstore/memory.h"
#include "embstore/optimizer.h"
#include "embstore/rw_lock.h"
#include "embstore/types.h"

namespace embstore {

enum class EvictionLog : uint8_t { kOff = 0, kKeys = 1, kRows = 2 };

struct TableOptions {
  std::string name;
  int64_t dim = 0;
  DType dtype = DType::kFloat32;
  KeyIndexOptions index;
  OptimizerOptions optimizer;
  InitializerOptions initializer;
  ScoreStrategy score_strategy = ScoreStrategy::kTimestamp;
  uint64_t seed = 0;
  EvictionLog eviction_log = EvictionLog::kOff;
  int64_t eviction_log_capacity = 1 << 20;  // the oldest entries give way, and are counted
};

struct TableStats {
  int64_t size = 0, capacity = 0, max_capacity = 0;
  int64_t hits = 0, inserts = 0, evictions = 0, refusals = 0;
  int64_t log_dropped = 0;  // evictions that the log had no room for
  int64_t bytes = 0;        // mapped for index and rows
};

// Rows in plain arrays. values is (n, dim), states (n, state width), both float32.
struct RowBlock {
  std::vector<int64_t> keys;
  std::vector<float> values;
  std::vector<float> states;
  std::vector<uint64_t> scores;
};

class Table;

// The slots of a batch, kept for its backward pass. While it lives its rows are pinned.
class SlotList {
 public:
  SlotList(std::shared_ptr<Table> table, int64_t n);
  ~SlotList();
  SlotList(const SlotList&) = delete;
  SlotList& operator=(const SlotList&) = delete;

  Table& table() const { return *table_; }
  Slot* data() const { return buffer_.as<Slot>(); }
  int64_t size() const { return n_; }

 private:
  std::shared_ptr<Table> table_;
  PooledBuffer buffer_;
  int64_t n_;
};

class Table : public std::enable_shared_from_this<Table> {
 public:
  // Throws InvalidArgument naming the field, or OutOfMemory.
  static std::shared_ptr<Table> Create(const TableOptions& options);

  const TableOptions& options() const { return options_; }
  int64_t dim() const { return options_.dim; }
  int64_t state_width() const { return state_width_; }
  int64_t row_bytes() const { return row_stride_; }
  const Initializer& initializer() const { return initializer_; }

  TableStats stats() const;
  int64_t size() const;
  int64_t capacity() const;

  // The score that the next training batch will get (0 for kLfu, and for kCustomized before any
  // was set). Never larger than a later score, always larger than an earlier one (kTimestamp, kStep).
  uint64_t current_score();
  void set_custom_score(uint64_t score);  // kCustomized only, not 0
  void set_step(uint64_t step);           // kStep only: after a load

  void Contains(std::span<const int64_t> keys, uint8_t* found) const;
  // Rows of the keys; where a key is missing the row is zeros and found[i] == 0.
  // values (n, dim), states (n, state width) and scores (n) may be null.
  void Read(std::span<const int64_t> keys, float* values, float* states, uint64_t* scores,
            uint8_t* found) const;
  // Writes rows, inserting missing keys (evicting if need be). Of duplicates the last one counts.
  // states null: a new row gets fresh state, an old one keeps its own. scores null: the batch score.
  // Returns how many distinct keys were refused.
  int64_t Assign(std::span<const int64_t> keys, const float* values, const float* states,
                 const uint64_t* scores);
  int64_t Erase(std::span<const int64_t> keys);  // returns how many were there
  void Clear();
  void Reserve(int64_t rows);  // grows (up to max_capacity) so that `rows` fit the load factor

  // Rows with score >= min_score from `cursor` on, at most about max_rows; the cursor moves on and is
  // -1 after the last. Throws InvalidState when the table was grown or cleared in between.
  struct Cursor {
    int64_t next = 0;
    uint64_t layout = 0;
    bool started = false;
  };
  RowBlock Export(Cursor& cursor, int64_t max_rows, uint64_t min_score, bool with_values,
                  bool with_states) const;

  // Takes what was evicted since the last call. values and states only if rows are logged.
  RowBlock DrainEvictions();
  // What the log keeps from now on. Empties it, since its entries have one form.
  void set_eviction_log(EvictionLog log);

  // Frees the memory; afterwards every method but stats() throws InvalidState.
  void Close();

  // ---- for the batch operations; the caller holds lock() ----
  RwLock& lock() const { return lock_; }
  void RequireOpen() const;
  RowsView rows() const;
  IndexView index() const { return index_->view(); }
  int64_t locked_capacity() const { return index_->capacity(); }
  // The score for a training batch, and what a hit does with it. Advances the step.
  struct BatchScore {
    ScoreUpdate update;
    uint64_t score;
  };
  BatchScore NextBatchScore();
  void RequireScore() const;  // throws InvalidState when kCustomized has none
  void CountHits(int64_t hits) { stats_.hits += hits; }
  // Inserts keys[i] for every i of `missing` (ascending, duplicates allowed) and sets slots[i].
  // `slots` belongs to a SlotList of this table. Returns the number of distinct refused keys.
  int64_t InsertMissing(const int64_t* keys, Slot* slots, std::span<const uint32_t> missing,
                        uint64_t score);
  // Without a score of its own for a new key: new rows of kLfu begin at one occurrence.
  bool counts_occurrences() const { return options_.score_strategy == ScoreStrategy::kLfu; }

 private:
  friend class SlotList;
  struct Evicted {
    int64_t key;
    uint64_t score;
    Slot slot;
  };
  struct InsertPass;  // what one pass over missing keys yields

  explicit Table(const TableOptions& options);
  void Grow();
  void GrowFor(const int64_t* keys, std::span<const uint32_t> missing);
  InsertPass Insert(const int64_t* keys, Slot* slots, std::span<const uint32_t> missing,
                    uint64_t score, bool evict);
  void StampPinned();
  void LogEvictions(std::span<const Evicted> evicted);
  void InitRow(Slot slot, int64_t key);
  std::byte* row(Slot slot) const;
  float* state(Slot slot) const;
  bool IsStamped(Slot slot) const { return stamps_[static_cast<size_t>(slot)] == stamp_; }
  void Stamp(Slot slot) { stamps_[static_cast<size_t>(slot)] = stamp_; }
  void NextStamp();

  TableOptions options_;
  int64_t state_width_, state_offset_, row_stride_;
  Initializer initializer_;
  mutable RwLock lock_;
  std::optional<KeyIndex> index_;  // empty once closed
  mutable HugeBuffer rows_;
  uint64_t layout_ = 0;  // changes when slots do
  uint64_t last_timestamp_ = 0, step_ = 1, custom_score_ = 0;
  TableStats stats_;
  RowBlock log_;

  // Registered lists. A mutex of its own, never held while anything else is waited for: a list may be
  // dropped by a thread that must not wait for the table.
  std::mutex lists_mutex_;
  std::vector<SlotList*> lists_;
  // stamps_[slot] == stamp_ marks a slot as pinned for the running call.
  std::vector<uint8_t> stamps_;
  uint8_t stamp_ = 0;
};

}  // namespace embstore
