// The watchers of a table: snapshots, which keep rows as they were, and tracked changes.
#include <algorithm>
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

void Table::BeginToWatch() {
  ++watchers_;
  unannounced_through_ = std::max(highest_score_, kUnusedScore);
}

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

void Table::BeforeUpdate(const SlotList& list, std::span<const Occurrence> sorted) {
  constexpr size_t kAhead = 16;
  const bool announces = watched() && list.watchers() != watchers_;
  if (!announces && !tracks_dirty()) return;
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (announces && snapshot_ && i + kAhead < sorted.size()) {
      snapshot_->Prefetch(static_cast<Row>(sorted[i + kAhead].row));
    }
    if (i > 0 && sorted[i].row == sorted[i - 1].row) continue;
    const auto row = static_cast<Row>(sorted[i].row);
    if (announces) BeforeChange(list.keys()[sorted[i].index], row);
    if (tracks_dirty()) MarkDirty(row);
  }
}

// A hit changes the score too, so its row is announced first; in pieces, whose part of the index is
// in the nearest caches when the scores are renewed. While a piece is searched, the marks of the
// one before come from memory.
int64_t Table::FindAndAnnounce(const IndexView& view, std::span<const int64_t> keys, Row* rows,
                               BatchScore score, bool alone) {
  const auto n = static_cast<int64_t>(keys.size());
  constexpr int64_t kPiece = 256;
  Slot slots[2][kPiece];
  int64_t missing = 0;
  for (int64_t begin = 0, before = -1; before < n; before = begin, begin += kPiece) {
    if (begin < n) {
      const int64_t m = std::min(kPiece, n - begin);
      missing += ActiveKernels().find(view, keys.data() + begin, m, slots[begin / kPiece % 2],
                                      rows + begin, ScoreUpdate::kKeep, 0, true);
      for (int64_t i = 0; snapshot_ && i < m; ++i) snapshot_->Prefetch(rows[begin + i]);
    }
    if (before < 0) continue;
    const std::span found = std::span(slots[before / kPiece % 2])
                                .first(static_cast<size_t>(std::min(kPiece, n - before)));
    AnnounceHits(found, rows + before, score, alone);
  }
  return missing;
}

// Scores are set, so one above those that were there when the newest watcher came says that its row
// has been announced: only the others are asked for. They are few after some batches.
int64_t Table::FindAnnounced(const IndexView& view, std::span<const int64_t> keys, Row* rows,
                             BatchScore score) {
  constexpr int64_t kPiece = 1024;
  uint32_t positions[kPiece];
  Slot slots[kPiece];
  Row postponed_rows[kPiece];
  const auto n = static_cast<int64_t>(keys.size());
  int64_t missing = 0;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    PostponedHits hits{unannounced_through_, positions, slots};
    missing += ActiveKernels().find_announced(
        view, keys.data() + begin, std::min(kPiece, n - begin), rows + begin, score.score, hits);
    for (int64_t i = 0; i < hits.count; ++i) {
      postponed_rows[i] = rows[begin + positions[i]];
      if (snapshot_) snapshot_->Prefetch(postponed_rows[i]);
    }
    AnnounceHits(std::span(slots).first(static_cast<size_t>(hits.count)), postponed_rows, score,
                 /*alone=*/false);
  }
  return missing;
}

// Some slots may be kNoSlot.
void Table::AnnounceHits(std::span<const Slot> slots, const Row* rows, BatchScore score,
                         bool alone) {
  const IndexView view = index();
  if (snapshot_) snapshot_->Preserve(slots, rows);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] == kNoSlot) continue;
    if (changes_) changes_->Mark(rows[i]);
    RenewScore(view.score(slots[i]), score.update, score.score, alone);
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
  BeginToWatch();
  HugeBuffer marks(static_cast<size_t>(row_capacity_));
  spare_marks_ = HugeBuffer(static_cast<size_t>(row_capacity_));
  // Pages are zeroed when they are first touched, which should not be in a training step.
  for (HugeBuffer* of : {&marks, &spare_marks_}) std::memset(of->data(), 0, of->size());
  SavedRows::Prepare(row_bytes(), row_capacity_);
  changes_ = std::make_unique<ChangeSet>(std::move(marks), row_capacity_);
}

}  // namespace embstore
