// The watchers of a table: snapshots, which keep rows as they were, and tracked changes.
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "embstore/snapshot.h"
#include "embstore/table.h"

namespace embstore {

void ChangeSet::Remove(int64_t key) {
  removed_.push_back(key);
  if (removed_.size() < compact_at_) return;
  SortDistinct(removed_);
  compact_at_ = std::max(compact_at_, 2 * removed_.size());
}

void Table::BeforeChange(const IndexEntry& entry) {
  if (snapshot_) snapshot_->Preserve(entry);
  if (changes_) changes_->Mark(entry.row);
}

void Table::BeforeChange(int64_t key, Row row) {
  if (snapshot_ && !snapshot_->IsSettled(row)) {
    snapshot_->Preserve(index_->entry(index_->Find(key)));
  }
  if (changes_) changes_->Mark(row);
}

void Table::BeforeChange(std::span<const int64_t> keys, const Row* rows) {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (snapshot_ && i + kAhead < keys.size()) snapshot_->Prefetch(rows[i + kAhead]);
    if (rows[i] != kMissingRow) BeforeChange(keys[i], rows[i]);
  }
}

void Table::AfterInsert(Row row) {
  if (snapshot_) snapshot_->Skip(row);
  if (changes_) changes_->Mark(row);
}

void Table::TrackChanges(bool on) {
  std::unique_lock guard(lock_);
  RequireOpen();
  changes_ = on ? std::make_unique<ChangeSet>(row_capacity_) : nullptr;
}

Table::Changes Table::TakeChanges(bool with_states) {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!changes_) {
    throw InvalidState("changes of table '" + options_.name + "' should be tracked but are not");
  }
  std::vector<IndexEntry> changed;
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    if (changes_->IsMarked(entry.row)) changed.push_back(entry);
  });
  Changes taken{Collect(changed, true, with_states), CollectShared(), {}};
  for (int64_t key : changes_->removed()) {
    if (index_->Find(key) == kNoSlot) taken.removed.push_back(key);
  }
  SortDistinct(taken.removed);
  if (below_.exists()) TakeFromBelow(taken, with_states);
  changes_ = std::make_unique<ChangeSet>(row_capacity_);
  return taken;
}

// Over a store, an evicted key is not gone: its changed row is below.
void Table::TakeFromBelow(Changes& taken, bool with_states) const {
  std::vector<int64_t> gone;
  constexpr size_t kKeysAtOnce = 16384;
  for (size_t begin = 0; begin < taken.removed.size(); begin += kKeysAtOnce) {
    const size_t n = std::min(kKeysAtOnce, taken.removed.size() - begin);
    const std::span<const int64_t> keys{taken.removed.data() + begin, n};
    const FetchedRows below = below_.Fetch(keys, /*with_scores=*/true);
    for (const int64_t key : keys) {
      const FetchedRow row = below.Find(key);
      if (!row.data) {
        gone.push_back(key);
        continue;
      }
      RowBlock& rows = taken.rows;
      rows.keys.push_back(key);
      rows.scores.push_back(row.score);
      rows.values.resize(rows.values.size() + static_cast<size_t>(options_.dim));
      ActiveKernels().load_vector(row.data, options_.dim, options_.dtype,
                                  &rows.values[rows.values.size() - options_.dim]);
      if (!with_states) continue;
      const auto* state = reinterpret_cast<const float*>(row.data + state_offset_);
      rows.states.insert(rows.states.end(), state, state + state_width_);
    }
  }
  taken.removed = std::move(gone);
}

void Table::RestoreChanges(std::span<const int64_t> changed, std::span<const int64_t> removed) {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!changes_) return;
  for (int64_t key : changed) {
    const Row row = FindRow(key);
    if (row != kMissingRow) {
      changes_->Mark(row);
    } else {
      changes_->Remove(key);  // below, or gone since: the next TakeChanges looks
    }
  }
  for (int64_t key : removed) changes_->Remove(key);
}

}  // namespace embstore
