#include "embstore/table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <shared_mutex>
#include <string>
#include <utility>

#include "embstore/fork_guard.h"
#include "embstore/snapshot.h"

namespace embstore {
namespace {

constexpr int64_t kRowAlignment = 16;
constexpr int64_t kMaxDim = 1 << 16;
constexpr int64_t kMaxSharedRows = 1 << 16;

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t StateOffset(int64_t dim, DType dtype) {
  return RoundUp(dim * static_cast<int64_t>(SizeOf(dtype)), 4);
}

const TableOptions& Validated(const TableOptions& options) {
  if (options.dim < 1 || options.dim > kMaxDim) {
    throw InvalidArgument("dim should be between 1 and " + std::to_string(kMaxDim) +
                          " but is: " + std::to_string(options.dim));
  }
  if (options.eviction_log_capacity < 1) {
    throw InvalidArgument("eviction_log_capacity should be at least 1 but is: " +
                          std::to_string(options.eviction_log_capacity));
  }
  const auto check = [&](bool ok, const std::string& message) {
    if (!ok) throw InvalidArgument(message);
  };
  check(options.shared_rows >= 0 && options.shared_rows <= kMaxSharedRows,
        "shared_rows should be between 0 and " + std::to_string(kMaxSharedRows) +
            " but is: " + std::to_string(options.shared_rows));
  check(options.half_life >= 0,
        "half_life should be at least 0 but is: " + std::to_string(options.half_life));
  if (options.admit_by_frequency) {
    check(options.score_strategy == ScoreStrategy::kAgedLfu ||
              options.score_strategy == ScoreStrategy::kImportance,
          "admit_by_frequency should come with an aged score strategy");
    check(!options.store, "admit_by_frequency should come without a store, which has every row");
    check(options.admission_threshold == 0,
          "admit_by_frequency should come without admission_threshold");
  }
  if (options.ttl > 0 && options.score_strategy != ScoreStrategy::kTimestamp &&
      options.score_strategy != ScoreStrategy::kStep &&
      options.score_strategy != ScoreStrategy::kNoEviction) {
    throw InvalidArgument("ttl should be 0 for a score strategy without a clock but is: " +
                          std::to_string(options.ttl));
  }
  Validate(options.initializer);
  Validate(options.optimizer);
  const int64_t row_bytes = StoredRowBytes(options.dim, options.dtype, options.optimizer);
  if (options.store && options.store->row_bytes() != row_bytes) {
    throw InvalidArgument("store should keep rows of " + std::to_string(row_bytes) +
                          " bytes for table '" + options.name + "' but " +
                          options.store->Describe() +
                          " keeps: " + std::to_string(options.store->row_bytes()));
  }
  return options;
}

}  // namespace

int64_t DefaultHalfLife(int64_t max_capacity) {
  constexpr int64_t kLeastKeys = 1 << 15;
  return std::max(kLeastKeys, 2 * max_capacity);
}

void RequireBatchSize(size_t keys) {
  if (keys < size_t{1} << 31) return;
  throw InvalidArgument("keys should be fewer than 2^31 in a call but are: " +
                        std::to_string(keys));
}

int64_t StoredRowBytes(int64_t dim, DType dtype, const OptimizerOptions& optimizer) {
  return StateOffset(dim, dtype) + 4 * StateWidth(optimizer, dim);
}

int64_t Table::RowStride(const TableOptions& options) {
  return RoundUp(StoredRowBytes(options.dim, options.dtype, options.optimizer), kRowAlignment);
}

SlotList::SlotList(std::shared_ptr<Table> table, std::span<const int64_t> keys)
    : table_(std::move(table)),
      buffer_(keys.size() * (sizeof(int64_t) + sizeof(Row))),
      n_(std::ssize(keys)) {
  std::copy(keys.begin(), keys.end(), this->keys());
  std::fill_n(rows(), n_, kMissingRow);
  table_->pins_.Add(this);
}

SlotList::SlotList(std::shared_ptr<Table> table, int64_t n)
    : table_(std::move(table)),
      buffer_(static_cast<size_t>(n) * (sizeof(int64_t) + sizeof(Row))),
      n_(n) {
  table_->pins_.Add(this);
}

SlotList::~SlotList() { table_->pins_.Remove(this); }

std::shared_ptr<Table> Table::Create(const TableOptions& options) {
  std::shared_ptr<Table> table(new Table(Validated(options)));
  ForkGuard::Add(table);
  return table;
}

Table::Table(const TableOptions& options)
    : options_(options),
      state_width_(StateWidth(options.optimizer, options.dim)),
      state_offset_(StateOffset(options.dim, options.dtype)),
      row_stride_(RowStride(options)),
      initializer_(options.initializer, options.seed, options.name),
      clock_(options.score_strategy,
             options.half_life > 0
                 ? HalfLife{options.half_life, /*in_batches=*/true}
                 : HalfLife{DefaultHalfLife(options.index.max_capacity), /*in_batches=*/false},
             options.name) {
  options_.index.seed = options.seed;  // the index keeps it when the table gets another seed
  index_.emplace(IndexOptions(options_, options_.index.max_capacity));
  row_capacity_ = index_->capacity() + options.shared_rows;
  row_limit_ = evicts() ? index_->max_capacity() : KeyIndex::kMaxCapacity;
  RequireAvailableMemory(
      index_->bytes() + static_cast<size_t>(row_capacity_ * row_stride_),
      "table '" + options.name + "' with " + std::to_string(row_capacity_) + " rows");
  rows_ = RowHeap(row_stride_, row_capacity_);
  rows_.Take(options.shared_rows);
  shared_used_.resize(static_cast<size_t>(options.shared_rows), 0);
  class_bits_ = ClassBits(options, options.index.max_capacity);
  if (options.admission_threshold != 0) admission_.emplace(options.admission_threshold);
  if (counts_apart()) uses_.resize(static_cast<size_t>(row_capacity_), 0);
  below_.Attach(options_.store, row_capacity_);
}

Table::~Table() = default;

void Table::AfterForkInChild(bool whole) {
  lock_.Renew();
  // The threads that read snapshots or fetch rows ahead exist only in the parent.
  snapshot_ = nullptr;
  below_.RenewAfterFork();
  if (whole) return;
  pins_.RenewAfterFork();
  lost_in_fork_ = true;
}

void Table::RequireOpen() const {
  if (lost_in_fork_) {
    throw InvalidState("table '" + options_.name +
                       "' cannot be used in this process: another thread was changing it when the "
                       "process was forked");
  }
  if (!index_) throw InvalidState("table '" + options_.name + "' is closed");
}

void Table::Close() {
  std::unique_lock guard(lock_);
  if (!index_) return;
  if (below_.exists()) {
    below_.WriteBackAll(*index_, rows_);
    below_.store().Flush();
  }
  below_.Close();
  index_.reset();
  rows_ = RowHeap();
  pins_.Clear();
  changes_.reset();
  uses_ = {};
  sketch_.reset();
  queues_.reset();
}

RowsView Table::rows() const {
  return {rows_.data(), row_stride_, options_.dim, options_.dtype, state_offset_};
}

TableStats Table::stats() const {
  std::shared_lock guard(lock_);
  TableStats stats = stats_;
  stats.fetches = below_.fetches();
  stats.write_backs = below_.write_backs();
  if (index_) {
    stats.size = index_->size();
    stats.capacity = index_->capacity();
    stats.max_capacity = std::max(index_->max_capacity(), stats.capacity);
    stats.bytes = static_cast<int64_t>(index_->bytes()) + rows_.bytes();
    if (admission_) stats.bytes += admission_->bytes();
    if (sketch_) stats.bytes += sketch_->bytes();
    if (queues_) stats.bytes += queues_->bytes();
  }
  return stats;
}

int64_t Table::size() const {
  std::shared_lock guard(lock_);
  RequireOpen();
  return index_->size();
}

int64_t Table::capacity() const {
  std::shared_lock guard(lock_);
  RequireOpen();
  return index_->capacity();
}

uint64_t Table::current_score() {
  std::unique_lock guard(lock_);
  RequireOpen();
  return clock_.Peek();
}

void Table::set_custom_score(uint64_t score) {
  std::unique_lock guard(lock_);
  RequireOpen();
  clock_.set_custom_score(score);
}

void Table::set_step(uint64_t step) {
  std::unique_lock guard(lock_);
  RequireOpen();
  clock_.set_step(step);
  // Else a table that was loaded would sweep sooner than the one that went on.
  swept_ = SweepOf(std::max<uint64_t>(step, 1) - 1);
}

void Table::RaiseClock(uint64_t score) {
  std::unique_lock guard(lock_);
  clock_.RaiseTo(score);
}

void Table::set_seed(uint64_t seed) {
  std::unique_lock guard(lock_);
  options_.seed = seed;
  initializer_ = Initializer(options_.initializer, seed, options_.name);
}

void Table::MakeRoom(int64_t rows) {
  const std::string purpose =
      "growing table '" + options_.name + "' to " + std::to_string(rows) + " rows";
  const int64_t numbers = rows + options_.shared_rows;
  rows_.Require(numbers, purpose);
  if (numbers > row_capacity_) {
    // A little extra, so that not every batch has to extend the marks.
    const int64_t capacity = std::max(
        numbers, std::min(row_capacity_ + row_capacity_ / 8, row_limit_ + options_.shared_rows));
    rows_.Grow(capacity);
    if (snapshot_) snapshot_->Grow(capacity);
    if (changes_) changes_->Grow(capacity);
    below_.Grow(capacity);
    if (counts_apart()) uses_.resize(static_cast<size_t>(capacity), 0);
    row_capacity_ = capacity;
  }
  index_->Reserve(rows);
}

void Table::FreeSlot(Slot slot) {
  const Row row = index_->row(slot);
  if (changes_) changes_->Unmark(row);  // marks are of rows in use
  rows_.Free(row);
  index_->Erase(slot);
}

void Table::Reserve(int64_t rows) {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (rows < 0 || rows > row_limit_) {
    throw InvalidArgument("rows should be between 0 and max_capacity (" +
                          std::to_string(row_limit_) + ") but is: " + std::to_string(rows));
  }
  MakeRoom(rows);
}

void Table::InitRow(Row row, int64_t key, const float* initial, float* scratch) {
  const Row shared = initial || !options_.start_from_shared ? kMissingRow : SharedRow(key);
  if (initial) {
    ActiveKernels().store_vector(initial, options_.dim, options_.dtype, rows_.at(row));
  } else if (shared != kMissingRow) {
    std::memcpy(rows_.at(row), rows_.at(shared), static_cast<size_t>(state_offset_));
  } else if (options_.dtype == DType::kFloat32) {
    initializer_.Fill(key,
                      {reinterpret_cast<float*>(rows_.at(row)), static_cast<size_t>(options_.dim)});
  } else {
    initializer_.Fill(key, {scratch, static_cast<size_t>(options_.dim)});
    ActiveKernels().store_vector(scratch, options_.dim, options_.dtype, rows_.at(row));
  }
  InitState(options_.optimizer, options_.dim, state_at(row));
}

void Table::InitialVector(int64_t key, float* out) const {
  initializer_.FillRounded(key, options_.dtype, {out, static_cast<size_t>(options_.dim)});
}

}  // namespace embstore
