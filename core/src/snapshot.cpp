#include "embstore/snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <string>
#include <utility>

#include "embstore/table.h"
#include "key_list.h"
#include "saved_rows.h"

namespace embstore {

struct Snapshot::Output {
  int64_t* keys;
  float* values;
  float* states;
  uint64_t* scores;
  uint32_t* uses;
  uint64_t min_score;
  int64_t count = 0;
};

struct Snapshot::Rest {
  SavedRows::Block block;
  int64_t next = 0;
};

Snapshot::Snapshot(std::shared_ptr<Table> table, int64_t memory_bytes, Of of)
    : process_(getpid()),
      of_(of),
      unread_(of == Of::kChanges ? kChanged : 0),
      table_(std::move(table)),
      rest_(std::make_unique<Rest>()),
      below_(std::make_unique<KeyList>()) {
  std::unique_lock guard(table_->lock_);
  table_->RequireOpen();
  table_->BeginToWatch();
  saved_ = std::make_unique<SavedRows>(table_->row_bytes(), table_->row_capacity_, memory_bytes);
  if (of_ == Of::kChanges) {
    if (!table_->changes_) {
      throw InvalidState("changes of table '" + table_->options_.name +
                         "' should be tracked but are not");
    }
    auto next = std::make_unique<ChangeSet>(std::move(table_->spare_marks_),
                                            table_->row_capacity_);  // may throw: first
    marks_ = table_->changes_->TakeMarks();
    below_ = table_->changes_->TakeRemoved();
    table_->changes_ = std::move(next);
    std::memset(marks_.data(), 0, static_cast<size_t>(table_->options_.shared_rows));
  } else {
    marks_ = HugeBuffer(static_cast<size_t>(table_->row_capacity_));
    for (Row row = 0; row < table_->options_.shared_rows; ++row) mark(row).store(kSettled);
    resident_rows_ = table_->index_->size();
    listed_ = !table_->below_.exists();
  }
  shared_ = std::make_unique<RowBlock>(table_->CollectShared());
  older_ = std::exchange(table_->snapshot_, this);
}

Snapshot::~Snapshot() {
  Detach();
  if (of_ != Of::kChanges || getpid() != process_) return;
  // Whoever takes the next changes finds marks whose pages are there.
  constexpr size_t kPiece = 4096;
  for (size_t begin = 0; begin < marks_.size(); begin += kPiece) {
    std::byte* const piece = marks_.data() + begin;
    const size_t n = std::min(kPiece, marks_.size() - begin);
    if (std::any_of(piece, piece + n, [](std::byte mark) { return mark != std::byte{0}; })) {
      std::memset(piece, 0, n);
    }
  }
  std::unique_lock guard(table_->lock_);
  if (table_->changes_ && table_->spare_marks_.size() < marks_.size()) {
    std::swap(table_->spare_marks_, marks_);
  }
}

void Snapshot::Detach() {
  std::unique_lock guard(table_->lock_);
  if (std::exchange(detached_, true)) return;
  Snapshot** link = &table_->snapshot_;
  while (*link && *link != this) link = &(*link)->older_;
  if (*link) *link = older_;  // else this is the child of a fork, where tables have no snapshots
}

void Snapshot::Skip(Row row) {
  for (Snapshot* at = this; at; at = at->older_) {
    if (at->of_ == Of::kTable) at->mark(row).store(kSettled, std::memory_order_relaxed);
  }
}

void Snapshot::Grow(int64_t rows) {
  for (Snapshot* at = this; at; at = at->older_) at->marks_.Grow(static_cast<size_t>(rows));
}

void Snapshot::Fail() {
  const std::exception_ptr error = std::current_exception();
  std::lock_guard guard(failure_mutex_);
  if (failed_.load()) return;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& thrown) {
    reason_ = thrown.what();
  } catch (...) {
    reason_ = "unknown error";
  }
  failure_ = error;
  failed_.store(true);
  saved_->Clear();
}

void Snapshot::FailAll() {
  for (Snapshot* at = this; at; at = at->older_) at->Fail();
}

// The first caller gets the error itself; Python's errors cannot be thrown twice.
void Snapshot::RethrowFailure() {
  if (getpid() != process_) {
    throw InvalidState("a snapshot of table '" + table_->options_.name +
                       "' was taken by another process and cannot be read after fork");
  }
  if (!failed_.load()) return;
  std::lock_guard guard(failure_mutex_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  throw InvalidState("a snapshot of table '" + table_->options_.name + "' failed: " + reason_);
}

// ---- rows of the table ----

void Snapshot::Preserve(const IndexEntry& entry) {
  for (Snapshot* at = this; at; at = at->older_) {
    switch (at->Claim(entry.row)) {
      case Claimed::kNow:
        at->SaveClaimed({&entry, 1});
        break;
      case Claimed::kBefore:
        at->AwaitSaved(entry.row);
        break;
      case Claimed::kNobody:
        break;
    }
  }
}

void Snapshot::Preserve(std::span<const Slot> slots, const Row* rows) {
  for (Snapshot* at = this; at; at = at->older_) at->SaveAll(slots, rows);
}

// First all marks, which the caller has prefetched, then all rows.
void Snapshot::SaveAll(std::span<const Slot> slots, const Row* rows) {
  std::vector<IndexEntry> ours;
  std::vector<Row> others;
  for (size_t i = 0; i < slots.size(); ++i) {
    // Most occurrences are of rows that are settled.
    if (slots[i] == kNoSlot || IsSettledMark(ReadMark(rows[i]))) continue;
    switch (Claim(rows[i])) {
      case Claimed::kNow:
        ours.push_back(table_->index_->entry(slots[i]));
        break;
      case Claimed::kBefore:  // by another thread, or for an earlier occurrence of this batch
        others.push_back(rows[i]);
        break;
      case Claimed::kNobody:
        break;
    }
  }
  if (!ours.empty()) SaveClaimed(ours);
  // After our own: two threads may wait for each other's rows.
  for (const Row row : others) AwaitSaved(row);
}

Snapshot::Claimed Snapshot::Claim(Row row) {
  std::atomic_ref<uint8_t> state = mark(row);
  uint8_t seen = state.load(std::memory_order_acquire);
  if (seen == unread_ && state.compare_exchange_strong(seen, kSaving, std::memory_order_acq_rel)) {
    return Claimed::kNow;
  }
  return IsSettledMark(seen) ? Claimed::kNobody : Claimed::kBefore;
}

void Snapshot::AwaitSaved(Row row) {
  while (mark(row).load(std::memory_order_acquire) == kSaving) {
  }
}

void Snapshot::SaveClaimed(std::span<const IndexEntry> entries) {
  try {
    if (!failed_.load(std::memory_order_relaxed)) {
      std::vector<SavedRows::Original> rows;
      rows.reserve(entries.size());
      for (const IndexEntry& entry : entries) {
        rows.push_back(
            {entry.key, entry.score, table_->uses(entry.row), table_->rows_.at(entry.row)});
      }
      saved_->Add(rows, table_->row_stride_);
    }
  } catch (...) {
    Fail();
  }
  // Also after a failure: other threads wait for this.
  for (const IndexEntry& entry : entries) {
    mark(entry.row).store(kSettled, std::memory_order_release);
  }
}

void Snapshot::Emit(int64_t key, uint64_t score, uint32_t uses, const std::byte* row,
                    Output& out) const {
  if (score < out.min_score) return;
  const Table& table = *table_;
  out.keys[out.count] = key;
  out.scores[out.count] = score;
  if (out.uses) out.uses[out.count] = uses;
  if (out.values) {
    ActiveKernels().load_vector(row, table.options_.dim, table.options_.dtype,
                                out.values + out.count * table.options_.dim);
  }
  if (out.states) {
    std::memcpy(out.states + out.count * table.state_width_, row + table.state_offset_,
                static_cast<size_t>(table.state_width_) * sizeof(float));
  }
  ++out.count;
}

// The next few entries, or none at the end. An entry stays as it is while its mark says unread:
// whoever changes or removes it saves it first.
std::span<const IndexEntry> Snapshot::NextEntries(std::span<IndexEntry> room) {
  std::lock_guard guard(walk_mutex_);
  while (met_next_ == met_.size()) {
    if (walk_.ended) return {};
    met_.clear();
    met_next_ = 0;
    table_->index_->Advance(
        walk_, INT64_MAX, [](const IndexEntry&) { return true; },
        [&](const IndexEntry& entry) { met_.push_back(entry); });
  }
  const size_t n = std::min(room.size(), met_.size() - met_next_);
  std::copy_n(met_.data() + met_next_, n, room.data());
  met_next_ += n;
  return room.first(n);
}

// Reads the next few rows. False when there are none. Stops early where a training step waits.
bool Snapshot::Walk(Output& out, int64_t room) {
  std::shared_lock guard(table_->lock_);
  RequireReadable();
  IndexEntry entries[kRowsPerPiece];
  Row numbers[kRowsPerPiece];
  int64_t walked = 0;
  do {
    const std::span<const IndexEntry> piece =
        NextEntries(std::span(entries).first(std::min<size_t>(room, kRowsPerPiece)));
    if (piece.empty()) return walked > 0;
    for (const IndexEntry& entry : piece) Prefetch(entry.row);
    int64_t found = 0;
    for (const IndexEntry& entry : piece) {
      std::atomic_ref<uint8_t> state = mark(entry.row);
      if (IsSettledMark(state.load(std::memory_order_relaxed))) continue;
      state.store(kSettled, std::memory_order_relaxed);
      if (entry.score < out.min_score) continue;
      out.keys[out.count + found] = entry.key;
      out.scores[out.count + found] = entry.score;
      if (out.uses) out.uses[out.count + found] = table_->uses(entry.row);
      numbers[found++] = entry.row;
    }
    table_->CopyRows(numbers, found,
                     out.values ? out.values + out.count * table_->options_.dim : nullptr,
                     out.states ? out.states + out.count * table_->state_width_ : nullptr);
    out.count += found;
    room -= found;
    walked += std::ssize(piece);
  } while (room > 0 && walked < kRowsPerHold &&
           (walked < kLeastRowsPerHold || !table_->lock_.IsAwaited()));
  return true;
}

void Snapshot::List() {
  std::lock_guard listing(list_mutex_);
  if (listed_) return;
  RethrowFailure();
  if (of_ == Of::kChanges) {
    CountMarks();
    ListChanges();
    listed_ = true;
    return;
  }
  const auto scanner = table_->below_.store().ScanKeys();
  std::vector<int64_t> keys;
  std::vector<uint8_t> resident;
  for (scanner->Next(kKeysPerHold, keys); !keys.empty(); scanner->Next(kKeysPerHold, keys)) {
    std::shared_lock guard(table_->lock_);
    RequireReadable();
    if (all_preserved_) break;  // what is below now is newer
    resident.resize(keys.size());
    table_->LockedResident(keys, resident.data());
    std::lock_guard below_guard(below_mutex_);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (resident[i] || below_->Find(keys[i]) >= 0) continue;
      below_->Add(keys[i], /*marked=*/false);
      ++below_rows_;
    }
  }
  listed_ = true;
}

void Snapshot::RequireReadable() const {
  table_->RequireOpen();
  if (detached_) {
    throw InvalidState("a snapshot of table '" + table_->options_.name + "' was ended");
  }
}

int64_t Snapshot::rows() {
  RethrowFailure();
  saved_->Prepare();
  List();
  std::shared_lock guard(table_->lock_);
  std::lock_guard below_guard(below_mutex_);
  RethrowFailure();
  return resident_rows_ + below_rows_;
}

int64_t Snapshot::Read(int64_t max_rows, uint64_t min_score, int64_t* keys, float* values,
                       float* states, uint64_t* scores, uint32_t* uses) {
  if (max_rows < 1) {
    throw InvalidArgument("max_rows should be at least 1 but is: " + std::to_string(max_rows));
  }
  if (of_ == Of::kChanges) List();  // counts the marks before they change
  Output out{keys, values, states, scores, uses, min_score};
  bool walked = false, all_given = false;
  saved_->Prepare();
  while (out.count < max_rows) {
    RethrowFailure();
    {
      std::lock_guard guard(rest_mutex_);
      // Saved rows first, to free their memory soon.
      if (rest_->next == rest_->block.count()) {
        rest_->next = 0;
        saved_->Return(rest_->block);
        try {
          saved_->Take(rest_->block, /*full_only=*/!all_given);
        } catch (...) {
          Fail();
          continue;
        }
      }
      const int64_t n = std::min(rest_->block.count() - rest_->next, max_rows - out.count);
      for (const int64_t end = rest_->next + n; rest_->next < end; ++rest_->next) {
        Emit(rest_->block.key(rest_->next), rest_->block.score(rest_->next),
             rest_->block.uses(rest_->next), rest_->block.row(rest_->next), out);
      }
      if (n > 0) continue;
    }
    if (all_given) break;
    if (!walked) {
      walked = !Walk(out, max_rows - out.count);
      continue;
    }
    try {
      all_given = !table_->below_.exists() || !ReadBelow(out, max_rows - out.count);
    } catch (...) {
      Fail();  // the rows of this call are lost
    }
  }
  return out.count;
}

}  // namespace embstore
