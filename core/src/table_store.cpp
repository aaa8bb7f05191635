// A table as a write-back cache of the store below it.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "embstore/snapshot.h"
#include "embstore/table.h"

namespace embstore {

Store& Table::RequireStore() const {
  if (!below_.exists()) throw InvalidState("table '" + options_.name + "' has no store below it");
  return below_.store();
}

bool Table::MayExceedBudget() const {
  return below_.exists() && options_.score_strategy != ScoreStrategy::kNoEviction;
}

// Every strategy but kLfu sets the score of a key that comes up; a snapshot needs the old one.
FetchedRows Table::Fetch(const int64_t* keys, std::span<const uint32_t> missing) const {
  return below_.Fetch(keys, missing, wants_scores());
}

void Table::FillRow(Row row, int64_t key, const FetchedRow& below, const float* initial,
                    float* scratch) {
  if (!below_.Install(below, row, rows_)) {
    InitRow(row, key, initial, scratch);
  } else if (options_.ttl > 0) {
    MarkDirty(row);  // the store has to learn when it was last used
  }
}

void Table::WriteBack(std::span<const Evicted> evicted) {
  if (!below_.exists() || evicted.empty()) return;
  ++layout_;  // an export would give them twice, or not at all
  std::vector<IndexEntry> entries;
  entries.reserve(evicted.size());
  for (const Evicted& gone : evicted) entries.push_back(gone.entry);
  below_.WriteBack(entries, rows_);
}

Row Table::FindRow(int64_t key) const {
  const Slot slot = index_->Find(key);
  return slot == kNoSlot ? kMissingRow : index_->row(slot);
}

std::vector<uint32_t> Table::FindMissing(std::span<const int64_t> keys, Row* rows) {
  std::vector<uint32_t> missing;
  FindAll(keys, rows, {ScoreUpdate::kKeep, 0});
  const std::span<const Row> found(rows, keys.size());
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] == kMissingRow) missing.push_back(static_cast<uint32_t>(i));
  }
  return missing;
}

void Table::Install(std::span<const int64_t> keys, Row* rows, std::span<const uint32_t> found,
                    const FetchedRows& below) {
  if (found.empty()) return;
  // The lowest score, so that a row that is brought up and not used is evicted first.
  InsertMissing(keys.data(), rows, found, {ScoreUpdate::kKeep, kUnusedScore}, nullptr, below,
                nullptr);
  if (!keeps_scores()) return;
  for (uint32_t i : found) {  // coming up is not an occurrence
    const Slot slot = index_->Find(keys[i]);
    if (slot == kNoSlot) continue;
    const uint64_t score = std::max<uint64_t>(below.Find(keys[i]).score, kUnusedScore);
    index_->set_score(slot, score);
    highest_score_ = std::max(highest_score_, score);
    if (!counts_apart())
      OfferVictim(index_->Hash(keys[i]), {score, keys[i]});  // it may have fallen
  }
}

void Table::FetchAndInstall(std::span<const int64_t> keys, Row* rows,
                            std::span<const uint32_t> missing) {
  if (missing.empty()) return;
  const FetchedRows below = Fetch(keys.data(), missing);
  std::vector<uint32_t> found;
  for (size_t number = 0; number < below.keys().size(); ++number) {
    if (below.at(number).data) found.push_back(below.first()[number]);
  }
  Install(keys, rows, found, below);
  RepeatRows(rows, missing, below);
}

// Gives every occurrence the row of the first one with the same key.
void Table::RepeatRows(Row* rows, std::span<const uint32_t> missing, const FetchedRows& below) {
  for (size_t j = 0; j < missing.size(); ++j) {
    rows[missing[j]] = rows[below.first()[below.numbers()[j]]];
  }
}

void Table::BringUp(std::span<const int64_t> keys, Row* rows) {
  const std::vector<uint32_t> missing = FindMissing(keys, rows);
  if (below_.exists()) FetchAndInstall(keys, rows, missing);
}

std::unique_ptr<SlotList> Table::Prefetch(std::span<const int64_t> keys) {
  RequireStore();
  auto list = std::make_unique<SlotList>(shared_from_this(), keys);
  Row* const rows = list->rows();
  std::unique_lock guard(lock_);
  RequireOpen();
  const std::vector<uint32_t> missing = FindMissing(keys, rows);
  if (missing.empty()) return list;
  const LowerTier::ReadAhead read = below_.BeginReadAhead();
  const bool with_scores = wants_scores();
  const int64_t inserts = stats_.inserts;
  guard.unlock();
  FetchedRows below;
  std::exception_ptr failure;
  try {
    below = below_.Fetch(keys.data(), missing, with_scores);
  } catch (...) {
    failure = std::current_exception();
  }
  guard.lock();
  // A snapshot that was taken in the meantime needs scores.
  const bool lacks_scores = snapshot_ && !below.has_scores();
  std::vector<Row> now(below.keys().size(), kMissingRow);  // training may have brought them up
  if (index_ && stats_.inserts != inserts) {
    FindAll(below.keys(), now.data(), {ScoreUpdate::kKeep, 0});
  }
  std::vector<uint32_t> current, stale;
  for (size_t number = 0; number < now.size(); ++number) {
    const uint32_t i = below.first()[number];
    rows[i] = now[number];
    if (rows[i] != kMissingRow) continue;
    if (lacks_scores || below_.HasChangedBelow(read, keys[i])) {
      stale.push_back(i);
    } else if (below.at(number).data) {
      current.push_back(i);
    }
  }
  below_.EndReadAhead();
  if (failure) std::rethrow_exception(failure);
  RequireOpen();
  Install(keys, rows, current, below);
  FetchAndInstall(keys, rows, stale);
  RepeatRows(rows, missing, below);
  return list;
}

void Table::Flush() {
  Store& store = RequireStore();
  std::unique_lock guard(lock_);
  RequireOpen();
  below_.WriteBackAll(*index_, rows_);
  store.Flush();
}

void Table::SaveCheckpoint(const std::string& name) {
  Store& store = RequireStore();
  std::unique_lock guard(lock_);
  RequireOpen();
  below_.WriteBackAll(*index_, rows_);
  store.SaveCheckpoint(name);
}

void Table::LoadCheckpoint(const std::string& name) {
  Store& store = RequireStore();
  std::unique_lock guard(lock_);
  RequireOpen();
  std::vector<int64_t> replaced = BeforeReplacement();
  store.LoadCheckpoint(name);
  AfterReplacement(std::move(replaced));
}

void Table::PreserveBelow(std::span<const int64_t> keys) {
  if (!snapshot_ || !below_.exists()) return;
  try {
    snapshot_->PreserveBelow(keys, below_.Fetch(keys, /*with_scores=*/true));
  } catch (...) {
    snapshot_->FailAll();
  }
}

std::vector<int64_t> Table::BeforeReplacement() {
  std::vector<int64_t> replaced;
  if (!watched()) return replaced;
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    if (snapshot_) {
      snapshot_->Preserve(entry);
      snapshot_->Leave(entry.key);
    }
    if (changes_) replaced.push_back(entry.key);
  });
  if (!below_.exists()) return replaced;
  if (snapshot_) snapshot_->PreserveStore();
  if (changes_) below_.AppendKeys(replaced);
  return replaced;
}

void Table::AfterReplacement(std::vector<int64_t> replaced) {
  ForgetRows();
  if (!changes_) return;
  changes_->UnmarkAll();
  if (below_.exists()) below_.AppendKeys(replaced);  // the new ones
  for (const int64_t key : replaced) changes_->Remove(key);
}

}  // namespace embstore
