// Table: rows by key, with one dimension, optimizer, initializer and score strategy.
//
// A row is [embedding (dim of dtype) | optimizer state (float32)], contiguous, 16-byte aligned.
// Rows are numbered in the order in which their keys arrive. They are packed and never move: the
// index has free slots, but there are only as many rows as keys.
//
// Thread safety: every public method does its own locking; const methods may run together, any
// other method runs alone. The batch operations over several tables (lookup.h, gradient.h) lock
// their tables in a fixed order.
//
// Invariants
//  1. The call that inserts a key also initialises (or assigns) its row.
//  2. A row that a SlotList holds is not given to another key while any other row can go. If it is
//     erased, or evicted nevertheless, it becomes kMissingRow in the list, and its gradient is
//     dropped. Rows of the running batch are never evicted: if no other row is left for a key, the
//     key is refused.
//  3. A row in use belongs to exactly one used slot. Marks of a key (dirty, pinned, saved, changed)
//     are kept by row number, so the index may move its slots freely.
//  4. Over a store (store.h) the table is a write-back cache. A row that is new, or was updated or
//     assigned since it came up, is dirty and goes down before its slot is reused; a clean one is
//     dropped. A missing key is looked up below before it is initialised. max_capacity is then a
//     budget: if the pinned rows of a batch do not fit, the table grows beyond it instead of
//     refusing keys.
//  5. Where hits set scores, a watcher has heard of every row whose score is larger than
//     unannounced_through_.
//  6. Rows below options().shared_rows are shared: they have no key and no slot, are never freed or
//     evicted, and serve the keys that have no row of their own. Until a training batch uses one,
//     it counts as absent.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embstore/admission.h"
#include "embstore/away_keys.h"
#include "embstore/changes.h"
#include "embstore/frequency_sketch.h"
#include "embstore/initializer.h"
#include "embstore/kernels.h"
#include "embstore/key_index.h"
#include "embstore/lower_tier.h"
#include "embstore/miss_sampler.h"
#include "embstore/optimizer.h"
#include "embstore/pinned_rows.h"
#include "embstore/row_heap.h"
#include "embstore/rw_lock.h"
#include "embstore/score_clock.h"
#include "embstore/slot_list.h"
#include "embstore/store.h"
#include "embstore/table_options.h"
#include "embstore/types.h"
#include "embstore/victim_queues.h"

namespace embstore {

struct TableStats {
  int64_t size = 0, capacity = 0, max_capacity = 0;
  int64_t hits = 0, inserts = 0, evictions = 0, refusals = 0;
  int64_t dropped_gradients = 0;  // rows of live batches that were evicted before their update
  int64_t log_dropped = 0;        // evictions that the log had no room for
  int64_t unadmitted = 0;         // occurrences that were answered without a row
  int64_t bytes = 0;              // of the index, and of the rows in use so far
  int64_t fetches = 0, write_backs = 0;  // rows that came up from the store, and went down to it
  int64_t expired = 0;                   // rows that were not used for too long
};

// Rows in plain arrays. values is (n, dim), states (n, state width), both float32.
struct RowBlock {
  std::vector<int64_t> keys;
  std::vector<float> values;
  std::vector<float> states;
  std::vector<uint64_t> scores;
};

// Throws InvalidArgument for 2^31 keys or more: occurrences of a batch are counted in 32 bits.
void RequireBatchSize(size_t keys);

class Snapshot;

class Table : public std::enable_shared_from_this<Table> {
 public:
  // Throws InvalidArgument naming the field, or OutOfMemory.
  static std::shared_ptr<Table> Create(const TableOptions& options);
  ~Table();

  const TableOptions& options() const { return options_; }
  int64_t dim() const { return options_.dim; }
  int64_t state_width() const { return state_width_; }
  int64_t row_bytes() const { return row_stride_; }
  // What a newly inserted key reads: its initial vector, rounded to the table's dtype.
  void InitialVector(int64_t key, float* out) const;
  // Bytes of a table that holds max_capacity rows.
  static int64_t FullBytes(const TableOptions& options);
  int64_t stored_row_bytes() const { return state_offset_ + 4 * state_width_; }
  const Store* store() const { return options_.store.get(); }

  TableStats stats() const;
  int64_t size() const;
  int64_t capacity() const;

  // The score that the next training batch will get (0 for kLfu, and for kCustomized before one is
  // set). With kTimestamp and kStep it is larger than all earlier scores and not above later ones.
  uint64_t current_score();
  void set_custom_score(uint64_t score);  // kCustomized only, not 0
  void set_step(uint64_t step);           // kStep only: after a load
  // Later batches of a strategy with a clock get at least this score, so that ranks can agree on a
  // moment.
  void RaiseClock(uint64_t score);
  void set_seed(uint64_t seed);  // of future rows

  void Contains(std::span<const int64_t> keys, uint8_t* found) const;
  void Resident(std::span<const int64_t> keys, uint8_t* found) const;  // without the store
  // The rows of the keys. A missing key has a row of zeros and found[i] == 0.
  // values (n, dim), states (n, state width) and scores (n) may be null.
  void Read(std::span<const int64_t> keys, float* values, float* states, uint64_t* scores,
            uint8_t* found) const;
  // Writes rows, inserting missing keys (evicting if need be). The last of duplicates wins.
  // states null: a new row gets fresh state, an old one keeps its own. scores null: the batch
  // score. Later timestamps are larger than the scores given here.
  // Returns how many distinct keys were refused.
  int64_t Assign(std::span<const int64_t> keys, const float* values, const float* states,
                 const uint64_t* scores);
  // With evict_least_used: how often each of these keys was used, for those that are in memory.
  void SetUses(std::span<const int64_t> keys, const uint32_t* uses);
  int64_t Erase(std::span<const int64_t> keys);  // returns how many were there
  // Erases the rows whose score is smaller, here and in the store; returns how many there were.
  int64_t Expire(uint64_t min_score);
  void Clear();
  // Changes the rule from the next update on. Throws InvalidArgument unless its state is as wide as
  // the present one. Rows in memory whose state is still the initial one get the new initial state.
  void SetOptimizer(const OptimizerOptions& optimizer);
  // Starts (afresh) or stops to sample which keys would be missed by a table of another size.
  void SampleMisses(bool on);
  bool samples_misses() const;
  // Throws InvalidState unless misses are sampled.
  MissSampler::Sample MissSample() const;
  void AgeMissSample(double factor);
  // Another max_capacity. A smaller one evicts the smallest scores, but no rows of live batches,
  // and gives their memory back. Throws InvalidArgument for kNoEviction, which has no limit.
  void SetMaxCapacity(int64_t rows);
  void Reserve(int64_t rows);  // grows (up to max_capacity) so that `rows` fit the load factor

  // Rows with score >= min_score from `cursor` on, at most about max_rows. Advances the cursor,
  // whose `next` is -1 after the last row. The table may grow in between. Throws InvalidState if it
  // was cleared in between, or moved rows to its store.
  struct Cursor {
    int64_t next = 0;  // or -1
    KeyIndex::Walk walk;
    uint64_t layout = 0;
    bool started = false;
  };
  RowBlock Export(Cursor& cursor, int64_t max_rows, uint64_t min_score, bool with_values,
                  bool with_states) const;

  // Starts (from an empty set of changes) or stops to keep track of changed rows and removed keys,
  // which a Snapshot of changes takes.
  void TrackChanges(bool on);

  // The used shared rows, by number, and their replacement, after which all others count as unused.
  // Throws InvalidArgument when a number is not below shared_rows. states null: fresh states.
  RowBlock SharedRows() const;
  void AssignShared(std::span<const int64_t> numbers, const float* values, const float* states);

  // How often keys without a row were seen: AdmissionFilter::Save and Restore, or those of the
  // FrequencySketch with the moment of the clock before it. Nothing to save, and false, without an
  // admission_threshold or admit_by_frequency.
  std::vector<uint16_t> AdmissionCounters();
  bool RestoreAdmissionCounters(std::span<const uint16_t> counters);
  // Throws InvalidArgument where RestoreAdmissionCounters or, for changes, ApplyCounterChanges
  // would.
  void RequireCounters(std::span<const uint16_t> words, bool changes) const;
  // What changed of them since the last call (see CounterChanges); empty without counters. Throws
  // InvalidState unless changes are tracked.
  std::vector<uint16_t> TakeCounterChanges();
  // Makes what was taken part of the next changes.
  void ReturnCounterChanges(std::span<const uint16_t> taken);
  // Applies what another table took. False, and nothing changes, where its counters have another
  // form or size, or would take far more memory than those of a table like this one.
  bool ApplyCounterChanges(std::span<const uint16_t> changes);

  // Takes what was evicted since the last call. values and states only if rows are logged.
  RowBlock DrainEvictions();
  // Sets what the log keeps from now on. Empties it, since all its entries have one form.
  void set_eviction_log(EvictionLog log);

  // ---- over a store; without one these throw InvalidState ----

  // Brings up the rows of keys that are only below, and pins them while the list lives. Reads the
  // store without the table's lock, so that training continues.
  std::unique_ptr<SlotList> Prefetch(std::span<const int64_t> keys);
  // Writes every dirty row down and flushes the store.
  void Flush();
  // Flush, then a checkpoint of the store; no training step comes between.
  void SaveCheckpoint(const std::string& name);
  // Replaces the contents of table and store. Throws and leaves both as they were when the
  // checkpoint cannot be read.
  void LoadCheckpoint(const std::string& name);

  // For tests: checks the whole table, and throws std::logic_error that names what does not hold.
  void CheckInvariants() const;

  // Writes dirty rows down, then frees the memory; afterwards every method but stats() throws
  // InvalidState. If the store fails, nothing is freed.
  void Close();

  // ---- for the batch operations; the caller holds lock() ----
  RwLock& lock() const { return lock_; }
  void RequireOpen() const;
  RowsView rows() const;
  IndexView index() const { return index_->view(); }
  int64_t row_limit() const { return rows_.used(); }  // rows are below it
  BatchScore NextBatchScore(int64_t keys) {
    const BatchScore next = clock_.Next(keys);
    if (next.update == ScoreUpdate::kSet) NoteScore(next.score);
    return next;
  }
  // Finds the keys on several threads and renews the scores of those it finds, after announcing
  // them to watchers.
  void FindAll(std::span<const int64_t> keys, Row* rows, BatchScore score);
  // The same on this thread only. Returns how many are missing. alone: no other thread finds any of
  // these keys meanwhile.
  int64_t FindHere(std::span<const int64_t> keys, Row* rows, BatchScore score, bool alone);
  // Whether threads that share a batch should call FindAll instead of FindHere. Scores that add up
  // would else need atomic additions, and threads would wait for each other at the frequent keys.
  bool FindsDivided(BatchScore score) const;
  void BringHome() { away_keys_.BringHome(*index_); }  // after a training batch
  void RequireScore() const { clock_.RequireScore(); }
  MissSampler* miss_sampler() { return miss_sampler_.get(); }  // or null
  // Erases what has outlived options().ttl, from time to time. `now` is the score of the batch.
  void ExpireOld(uint64_t now);
  void CountHits(int64_t hits) { stats_.hits += hits; }
  // Counts the keys of `missing`; removes from it, and returns, those that are not to be stored
  // yet. admitted: the caller's verdict instead, one for each key of the batch, or null.
  std::vector<uint32_t> Admit(const int64_t* keys, std::vector<uint32_t>& missing,
                              const uint8_t* admitted = nullptr);
  // Inserts keys[i] for every i of `missing` (ascending, duplicates allowed) and sets rows[i].
  // `rows` belong to a SlotList of this table. Returns the number of distinct refused keys.
  // Over a store their rows are fetched first. If the store throws, no key stays inserted without
  // its row, and no victim is lost.
  // score: what new rows get, and what was done to the scores of the rows that were found.
  // initial (n, dim): the vectors of new rows, or null for the initializer.
  // Occurrences of keys that were not frequent enough are appended to `unadmitted`.
  int64_t InsertMissing(const int64_t* keys, Row* rows, std::span<const uint32_t> missing,
                        BatchScore score, const float* initial, std::vector<uint32_t>& unadmitted);
  bool has_shared_rows() const { return options_.shared_rows > 0; }
  // The shared row of a key, or kMissingRow until a training batch uses it.
  Row SharedRow(int64_t key) const;
  bool IsShared(Row row) const { return row < options_.shared_rows; }
  bool scores_gradients() const { return options_.score_strategy == ScoreStrategy::kImportance; }
  // kImportance: adds to the score of a key that has a row. Threads may do so for different keys.
  void AddToScore(int64_t key, double amount);
  // kImportance: the same for a key without a row, which may earn one.
  void AddToSketch(int64_t key, double amount);
  // Gives every occurrence without a row its shared row, which counts as used from now on.
  void UseShared(const int64_t* keys, Row* rows, std::span<const uint32_t> occurrences);
  // The rows of the missing keys that the store has (none without a store).
  FetchedRows Fetch(const int64_t* keys, std::span<const uint32_t> missing) const;
  // Finds the keys and brings up what is only below. `rows` as above.
  void BringUp(std::span<const int64_t> keys, Row* rows);
  // Call MarkDirty for rows that changed; threads may mark different rows at the same time.
  bool tracks_dirty() const { return below_.exists(); }
  void MarkDirty(Row row) { below_.MarkDirty(row); }
  // A snapshot or a set of changes must hear of changes before they happen.
  bool watched() const { return snapshot_ || changes_; }
  // REQUIRES watched(). Rows that have been announced may change until the lock is released.
  void BeforeChange(const IndexEntry& entry);
  // For callers that know no slot. The key is read only if the row has to be saved.
  void BeforeChange(const int64_t& key, Row row);
  void BeforeChange(std::span<const int64_t> keys, const Row* rows);  // skips kMissingRow
  // Announces the rows of these occurrences of the list, sorted by row, unless that was done when
  // they were found; marks them dirty.
  void BeforeUpdate(const SlotList& list, std::span<const Occurrence> sorted);
  // Under this hold of the lock, the keys of the list have been found, or will be, with this score.
  void NoteAnnounced(SlotList& list, BatchScore score) const {
    if (score.update != ScoreUpdate::kKeep) list.watchers_ = watchers_;
  }
  // Scores add up: a key that comes back from a store continues with its old score.
  bool counts_occurrences() const {
    return options_.score_strategy == ScoreStrategy::kLfu || ages();
  }
  bool ages() const {  // its scores are those of aged_score.h
    return options_.score_strategy == ScoreStrategy::kAgedLfu ||
           options_.score_strategy == ScoreStrategy::kImportance;
  }

 private:
  friend class Snapshot;
  friend class SlotList;
  friend class ForkGuard;
  struct Evicted {
    IndexEntry entry{0, 0, kMissingRow};
    Slot slot = kNoSlot;
    bool pinned = false;  // by another batch
  };
  struct Newcomers;
  // Whose row a newcomer may take: nobody's, any key's, or that of a key with a smaller score.
  enum class Eviction : uint8_t { kNone, kAny, kSmaller };

  explicit Table(const TableOptions& options);
  void FindDivided(std::span<const int64_t> keys, Row* rows, BatchScore score);
  // Makes room for this many rows in all: in the index, in memory and for marks. Throws OutOfMemory
  // and changes no row.
  void MakeRoom(int64_t rows);
  Newcomers Distinct(const int64_t* keys, std::span<const uint32_t> missing, uint64_t score,
                     const uint64_t* scores, const FetchedRows& below) const;
  void Order(Newcomers& fresh, std::span<const int64_t> keys,
             std::span<const uint64_t> scores) const;
  void Evict(Slot slot, size_t place, Newcomers& fresh);
  // Adds what the sketch knows to the scores of newcomers, and what it learns from them.
  void Recall(Newcomers& fresh);
  void SortByScore(Newcomers& fresh, size_t begin, size_t end) const;
  // Tells the sketch which keys have rows now, and which have lost theirs.
  void Remember(const Newcomers& fresh);
  template <typename KeyOf, typename Wanted, typename Use>
  void UseSketch(const Newcomers& fresh, size_t count, const KeyOf& key_of, const Wanted& wanted,
                 const Use& use);
  void Place(Newcomers& fresh, Eviction eviction);
  // Whether the overflow area is involved, which Place has to see to.
  bool PlacePart(Newcomers& fresh, Eviction eviction, size_t begin, size_t end);
  uint64_t SumOfScores(uint64_t a, uint64_t b) const;
  FrequencySketch EmptySketch() const;
  std::vector<uint16_t> CounterHeader();
  void TrackCounters(bool on);
  void BeginShared(Row row);
  RowBlock CollectShared() const;
  // Keys of a class, one of 2^k equal ranges of hashes, compete for the same rows. Classes depend
  // on the options only, so a table that was dumped and loaded makes the same choices.
  size_t ClassOf(uint64_t hash) const { return class_bits_ ? hash >> (64 - class_bits_) : 0; }
  uint64_t FirstOf(size_t in_class) const {  // of its hashes
    return class_bits_ ? uint64_t{in_class} << (64 - class_bits_) : 0;
  }
  uint64_t LastOf(size_t in_class) const {
    return FirstOf(in_class) + (class_bits_ ? UINT64_MAX >> class_bits_ : UINT64_MAX);
  }
  // The row to give up for a key with this hash, or kNoSlot: the smallest of its class, by worth
  // and then by HashKey, that is not held; if all are, that of a class nearby; if all of these are,
  // one that only other batches hold.
  Slot Victim(uint64_t hash);
  // The row that a newcomer with this score and hash may take, or kNoSlot: that of the smallest of
  // its class, if its own score is larger by a clear lead. REQUIRES: scores are aged.
  Slot WeakerThan(uint64_t score, uint64_t hash);
  // The smallest of the class that is not held and worth no more than `most`, or kNoSlot.
  Slot Smallest(size_t in_class, uint64_t most);
  template <typename IsHeld>
  Slot SearchClass(size_t in_class, uint64_t most, const IsHeld& is_held) const;
  void FillQueue(size_t in_class);
  // A row that a batch ahead has brought up, and that is held until it is used, would be among the
  // smallest: with many of them a queue would offer few rows that may go. So they are left out, and
  // one that is dropped unused goes after the next fill.
  bool IsLeftOut(uint64_t score) const {
    return score == kUnusedScore && below_.exists() && !counts_occurrences() && !counts_apart() &&
           options_.score_strategy != ScoreStrategy::kCustomized;
  }
  void CheckQueues() const;
  void CheckAnnounced() const;
  // A key that is new or came back, with at most its worth.
  void OfferVictim(uint64_t hash, const VictimQueues::Entry& entry, bool held = false);
  void ForgetVictims() {
    if (queues_) queues_->Forget();
  }
  // Hits will set this score.
  void NoteScore(uint64_t score);
  // Classes that lend each other rows: 2^kNeighbourBits with the same leading bits.
  static constexpr int kNeighbourBits = 3;
  // Keys whose hashes differ in so many leading bits share neither stripes nor neighbours, so
  // different threads may place them.
  int PartBits() const;
  void Undo(Newcomers& fresh);
  void Unpin(std::span<const Evicted> evicted, const Row* own);
  void FillRows(Newcomers& fresh, const FetchedRows& below, const float* initial);
  void InsertBeyondBudget(Newcomers& fresh, const FetchedRows& below, const float* initial);
  // scores: those of new rows, or null for `score`.
  int64_t InsertMissing(const int64_t* keys, Row* rows, std::span<const uint32_t> missing,
                        BatchScore score, const uint64_t* scores, const FetchedRows& below,
                        const float* initial, std::vector<uint32_t>* unadmitted = nullptr);
  static constexpr int64_t kRowsPerFill = 512;
  static int64_t FillTasks(int64_t rows) { return (rows + kRowsPerFill - 1) / kRowsPerFill; }
  void FillRow(Row row, int64_t key, const FetchedRow& below, const float* initial,
               float* scratch);  // scratch holds a vector
  bool counts_apart() const { return options_.evict_least_used && !counts_occurrences(); }
  uint64_t Worth(const IndexEntry& entry) const {  // the smallest is evicted first
    if (!counts_apart()) return entry.score;
    return entry.score < expired_below_ ? 0 : uses(entry.row);
  }
  uint32_t uses(Row row) const { return counts_apart() ? uses_[static_cast<size_t>(row)] : 0; }
  void CountUses(const Row* rows, int64_t n);
  void AfterUse(const Row* rows, int64_t n);
  // FindHere of a watched table.
  int64_t FindAndAnnounce(const IndexView& view, std::span<const int64_t> keys, Row* rows,
                          BatchScore score, bool alone);
  int64_t FindAnnounced(const IndexView& view, std::span<const int64_t> keys, Row* rows,
                        BatchScore score);
  void AnnounceHits(std::span<const Slot> slots, const Row* rows, BatchScore score, bool alone);
  void BeginToWatch();  // called for every watcher, before it misses anything
  bool evicts() const { return options_.score_strategy != ScoreStrategy::kNoEviction; }
  bool MayExceedBudget() const;
  void WriteBack(std::span<const Evicted> evicted);
  void ForgetRows();
  Row FindRow(int64_t key) const;  // or kMissingRow
  // Finds the keys and returns the positions of those that are missing.
  std::vector<uint32_t> FindMissing(std::span<const int64_t> keys, Row* rows);
  // Inserts keys that were fetched, each once.
  void Install(std::span<const int64_t> keys, Row* rows, std::span<const uint32_t> found,
               const FetchedRows& below);
  void FetchAndInstall(std::span<const int64_t> keys, Row* rows, std::span<const uint32_t> missing);
  static void RepeatRows(Row* rows, std::span<const uint32_t> missing, const FetchedRows& below);
  // A row that comes up keeps the score that it has below.
  bool keeps_scores() const { return counts_occurrences() || options_.ttl > 0; }
  // Whether a fetch has to bring scores along.
  bool wants_scores() const { return keeps_scores() || snapshot_; }
  // What a prefetched row has until it is used: it is the first to go.
  static constexpr uint64_t kUnusedScore = 1;
  MissSampler& RequireMissSampler() const;
  void EvictSmallest(int64_t count);
  void MoveRow(Row from, Row to);
  static int64_t RowStride(const TableOptions& options);
  // Keys that come once or twice outnumber those that stay.
  static constexpr int64_t kTrackedPerRow = 4;
  static int64_t SketchKeys(int64_t rows) {
    constexpr int64_t kLeastTracked = 1 << 14;
    return std::max(kLeastTracked, kTrackedPerRow * rows);
  }
  static int ClassBits(const TableOptions& options, int64_t max_capacity);
  static KeyIndexOptions IndexOptions(const TableOptions& options, int64_t max_capacity);
  int64_t MissWindow() const;
  int64_t EraseLocked(std::span<const int64_t> keys);
  int64_t Sweep(uint64_t min_score);
  // Which of the sweeps of a lifetime a batch of this score belongs to; 0: it is too early for any.
  uint64_t SweepOf(uint64_t now) const;
  std::vector<int64_t> OldKeys(uint64_t min_score) const;
  void LockedResident(std::span<const int64_t> keys, uint8_t* found) const;
  // The distinct keys that are in the store and not in the table.
  std::vector<int64_t> OnlyBelow(std::span<const int64_t> keys) const;
  // Tells snapshots that the rows of these keys, which are only below, are about to change.
  void PreserveBelow(std::span<const int64_t> keys);
  // Called around an operation that replaces all rows, below too: informs watchers. The first
  // returns the keys that were there, for the second.
  std::vector<int64_t> BeforeReplacement();
  void AfterReplacement(std::vector<int64_t> replaced);
  Store& RequireStore() const;
  void LogEvictions(std::span<Evicted> evicted);
  void InitRow(Row row, int64_t key, const float* initial, float* scratch);
  // states (n, state width) of these rows; skips kMissingRow.
  void AssignStates(const Row* rows, int64_t n, const float* states);
  void AfterInsert(Row row);  // a row that was free
  // values (n, dim) and states (n, state width) of these rows; each may be null.
  void CopyRows(const Row* numbers, int64_t n, float* values, float* states) const;
  RowBlock Collect(std::span<const IndexEntry> entries, bool with_values, bool with_states) const;
  float* state_at(Row row) const { return reinterpret_cast<float*>(rows_.at(row) + state_offset_); }
  void FreeSlot(Slot slot);
  void AfterForkInChild(bool whole);  // whole: the fork had waited for the lock

  TableOptions options_;
  int64_t state_width_, state_offset_, row_stride_;
  Initializer initializer_;
  ScoreClock clock_;
  mutable RwLock lock_;
  bool lost_in_fork_ = false;
  std::optional<KeyIndex> index_;  // empty once closed
  AwayKeys away_keys_;
  RowHeap rows_;
  int64_t row_limit_ = 0;     // rows at most
  int64_t row_capacity_ = 0;  // row numbers are below it
  std::optional<AdmissionFilter> admission_;
  std::optional<FrequencySketch> sketch_;  // with admit_by_frequency, once the table is full
  std::optional<VictimQueues> queues_;     // once it evicts
  uint64_t highest_score_ = 0;             // of all that hits have set, or that rows came with
  int class_bits_ = 0;
  std::vector<uint8_t> shared_used_;  // by number: a training batch has used it
  uint64_t layout_ = 0;               // changes when slots do
  uint64_t expired_below_ = 0;        // scores below it have outlived the ttl
  uint64_t swept_ = 0;                // the last sweep of ExpireOld, see SweepOf
  TableStats stats_;
  RowBlock log_;
  Snapshot* snapshot_ = nullptr;  // the newest; unlinks itself when it ends
  std::unique_ptr<ChangeSet> changes_;
  uint64_t watchers_ = 1;             // changes when there is a new one
  uint64_t unannounced_through_ = 0;  // the largest score when the newest came
  HugeBuffer spare_marks_;            // for the next set of changes: all 0, and its pages are there
  std::unique_ptr<MissSampler> miss_sampler_;

  PinnedRows pins_;
  LowerTier below_;
  std::vector<uint32_t> uses_;  // occurrences of each row's key; empty unless counts_apart()
};

}  // namespace embstore
