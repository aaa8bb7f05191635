// The watchers of a table: snapshots, which keep rows as they were, and tracked changes.
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "key_list.h"
#include "saved_rows.h"

namespace embstore {

ChangeSet::ChangeSet(HugeBuffer marks, int64_t rows)
    : marks_(std::move(marks)), removed_(std::make_unique<KeyList>()) {
  marks_.Grow(static_cast<size_t>(rows));
}

ChangeSet::~ChangeSet() = default;

void ChangeSet::Remove(int64_t key) {
  if (removed_->Find(key) < 0) removed_->Add(key, /*marked=*/false);
}

std::unique_ptr<KeyList> ChangeSet::TakeRemoved() { return std::move(removed_); }

void Table::BeforeChange(const IndexEntry& entry) {
  if (snapshot_) snapshot_->Preserve(entry);
  if (changes_) changes_->Mark(entry.row);
}

void Table::BeforeChange(const int64_t& key, Row row) {
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

void Table::BeforeUpdate(const int64_t* keys, std::span<const Occurrence> sorted) {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (snapshot_ && i + kAhead < sorted.size()) {
      snapshot_->Prefetch(static_cast<Row>(sorted[i + kAhead].row));
    }
    if (i > 0 && sorted[i].row == sorted[i - 1].row) continue;
    const auto row = static_cast<Row>(sorted[i].row);
    if (watched()) BeforeChange(keys[sorted[i].index], row);
    if (tracks_dirty()) MarkDirty(row);
  }
}

void Table::AfterInsert(Row row) {
  if (snapshot_) snapshot_->Skip(row);
  if (changes_) changes_->Mark(row);
}

void Table::TrackChanges(bool on) {
  std::unique_lock guard(lock_);
  RequireOpen();
  changes_.reset();
  spare_marks_ = HugeBuffer();
  TrackCounters(on);
  if (!on) return;
  HugeBuffer marks(static_cast<size_t>(row_capacity_));
  spare_marks_ = HugeBuffer(static_cast<size_t>(row_capacity_));
  // Pages are zeroed when they are first touched, which should not be in a training step.
  for (HugeBuffer* of : {&marks, &spare_marks_}) std::memset(of->data(), 0, of->size());
  SavedRows::Prepare(row_bytes(), row_capacity_);
  changes_ = std::make_unique<ChangeSet>(std::move(marks), row_capacity_);
}

}  // namespace embstore
