// A table as a write-back cache of the store below it.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "embstore/parallel.h"
#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "fetched_rows.h"

namespace embstore {
namespace {

// Rows that go down in one Put: enough to fill the queue of a disk, little enough to copy.
constexpr size_t kRowsPerPut = 16384;

}  // namespace

Store& Table::RequireStore() const {
  if (!options_.store) throw InvalidState("table '" + options_.name + "' has no store below it");
  return *options_.store;
}

bool Table::MayExceedBudget() const {
  return options_.store && options_.score_strategy != ScoreStrategy::kNoEviction;
}

FetchedRows Table::Fetch(const int64_t* keys, std::span<const uint32_t> missing) const {
  if (!options_.store || missing.empty()) return {};
  // Every other strategy sets the score of a key that comes up, but a snapshot keeps the old one.
  const bool with_scores = counts_occurrences() || snapshot_;
  return FetchedRows(*options_.store, keys, missing, with_scores);
}

void Table::FillRow(Row row, int64_t key, const FetchedRows& below, const float* initial,
                    float* scratch) {
  const FetchedRows::Row fetched = below.Find(key);
  // A new row is dirty: the store below has none yet.
  if (tracks_dirty()) dirty_[static_cast<size_t>(row)] = fetched.data == nullptr;
  if (!fetched.data) {
    InitRow(row, key, initial, scratch);
    return;
  }
  std::memcpy(rows_.at(row), fetched.data, static_cast<size_t>(stored_row_bytes()));
  std::atomic_ref<int64_t>(stats_.fetches).fetch_add(1, std::memory_order_relaxed);
}

void Table::WriteBack(std::span<const Evicted> rows) {
  if (!options_.store) return;
  std::vector<const Evicted*> dirty;
  for (const Evicted& gone : rows) {
    if (dirty_[static_cast<size_t>(gone.row)]) dirty.push_back(&gone);
  }
  if (!rows.empty()) ++layout_;  // an export would meet them twice, or not at all
  std::vector<int64_t> keys;
  std::vector<uint64_t> scores;
  std::vector<const std::byte*> data;
  for (size_t begin = 0; begin < dirty.size(); begin += kRowsPerPut) {
    const size_t n = std::min(kRowsPerPut, dirty.size() - begin);
    keys.resize(n);
    scores.resize(n);
    data.resize(n);
    for (size_t j = 0; j < n; ++j) {
      const Evicted& gone = *dirty[begin + j];
      keys[j] = gone.key;
      scores[j] = gone.score;
      data[j] = rows_.at(gone.row);
    }
    options_.store->PutScattered(keys, data.data(), scores.data());
    if (prefetches_ > 0) changed_below_.insert(keys.begin(), keys.end());
    for (size_t j = 0; j < n; ++j) dirty_[static_cast<size_t>(dirty[begin + j]->row)] = 0;
    stats_.write_backs += static_cast<int64_t>(n);
  }
}

Row Table::FindRow(int64_t key) const {
  const Slot slot = index_->Find(key);
  return slot == kNoSlot ? kMissingRow : index_->row(slot);
}

std::vector<uint32_t> Table::FindMissing(std::span<const int64_t> keys, Row* rows) {
  const auto n = static_cast<int64_t>(keys.size());
  std::vector<uint32_t> missing;
  FindAll(keys, rows, {ScoreUpdate::kKeep, 0});
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] == kMissingRow) missing.push_back(static_cast<uint32_t>(i));
  }
  return missing;
}

// Gives those of the missing keys a slot that were fetched.
void Table::Install(std::span<const int64_t> keys, Row* rows, std::vector<uint32_t> missing,
                    const FetchedRows& below) {
  std::erase_if(missing, [&](uint32_t i) { return !below.Find(keys[i]).data; });
  if (missing.empty()) return;
  // The lowest score: a row that is brought up and then not used goes first.
  InsertMissing(keys.data(), rows, missing, 1, nullptr, below, nullptr);
  if (!counts_occurrences()) return;
  for (uint32_t i : missing) {  // coming up is no occurrence
    const Slot slot = index_->Find(keys[i]);
    if (slot == kNoSlot) continue;
    index_->set_score(slot, std::max<uint64_t>(below.Find(keys[i]).score, 1));
  }
}

void Table::BringUp(std::span<const int64_t> keys, Row* rows) {
  std::vector<uint32_t> missing = FindMissing(keys, rows);
  if (!options_.store || missing.empty()) return;
  const FetchedRows below = Fetch(keys.data(), missing);
  Install(keys, rows, std::move(missing), below);
}

std::unique_ptr<SlotList> Table::Prefetch(std::span<const int64_t> keys) {
  RequireStore();
  auto list = std::make_unique<SlotList>(shared_from_this(), keys);
  Row* const rows = list->rows();
  std::unique_lock guard(lock_);
  RequireOpen();
  std::vector<uint32_t> missing = FindMissing(keys, rows);
  if (missing.empty()) return list;
  ++prefetches_;
  const uint64_t contents = contents_;
  const bool with_scores = counts_occurrences() || snapshot_;
  guard.unlock();
  FetchedRows below;
  std::exception_ptr failure;
  try {
    below = FetchedRows(*options_.store, keys.data(), missing, with_scores);
  } catch (...) {
    failure = std::current_exception();
  }
  guard.lock();
  // A snapshot that was taken meanwhile wants to know scores.
  const bool all_changed = contents != contents_ || (snapshot_ && !below.has_scores());
  std::vector<uint32_t> current, stale;
  for (uint32_t i : missing) {
    if (index_) rows[i] = FindRow(keys[i]);
    if (rows[i] != kMissingRow) continue;  // the training brought it up itself
    (all_changed || changed_below_.contains(keys[i]) ? stale : current).push_back(i);
  }
  if (--prefetches_ == 0) changed_below_.clear();
  if (failure) std::rethrow_exception(failure);
  RequireOpen();
  Install(keys, rows, std::move(current), below);
  if (!stale.empty()) {
    below = Fetch(keys.data(), stale);
    Install(keys, rows, std::move(stale), below);
  }
  return list;
}

void Table::WriteBackDirty() {
  std::vector<Evicted> rows;
  const auto write = [&] {
    WriteBack(rows);
    rows.clear();
  };
  index_->VisitAll([&](Slot slot, const IndexEntry& entry) {
    if (!dirty_[static_cast<size_t>(entry.row)]) return;
    rows.push_back({entry.key, entry.score, slot, entry.row, false});
    if (rows.size() == kRowsPerPut) write();
  });
  write();
}

void Table::Flush() {
  Store& store = RequireStore();
  std::unique_lock guard(lock_);
  RequireOpen();
  WriteBackDirty();
  store.Flush();
}

void Table::SaveSnapshot(const std::string& name) {
  Store& store = RequireStore();
  std::unique_lock guard(lock_);
  RequireOpen();
  WriteBackDirty();
  store.Snapshot(name);
}

void Table::LoadSnapshot(const std::string& name) {
  Store& store = RequireStore();
  std::unique_lock guard(lock_);
  RequireOpen();
  std::vector<int64_t> replaced = BeforeReplacement();
  store.LoadSnapshot(name);
  AfterReplacement(std::move(replaced));
}

void Table::PreserveBelow(std::span<const int64_t> keys) {
  if (!snapshot_ || !options_.store || keys.empty()) return;
  std::vector<uint32_t> all(keys.size());
  std::iota(all.begin(), all.end(), 0u);
  try {
    snapshot_->PreserveBelow(keys.data(), all, Fetch(keys.data(), all));
  } catch (...) {
    snapshot_->FailAll();
  }
}

std::vector<int64_t> Table::BeforeReplacement() {
  std::vector<int64_t> replaced;
  if (!watched()) return replaced;
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    if (snapshot_) snapshot_->Preserve(entry);
    if (changes_) replaced.push_back(entry.key);
  });
  if (!options_.store) return replaced;
  if (snapshot_) snapshot_->PreserveStore();
  if (changes_) AppendKeysBelow(replaced);
  return replaced;
}

void Table::AfterReplacement(std::vector<int64_t> replaced) {
  ForgetRows();
  if (!changes_) return;
  changes_->UnmarkAll();
  if (options_.store) AppendKeysBelow(replaced);  // what came instead
  for (const int64_t key : replaced) changes_->Remove(key);
}

void Table::AppendKeysBelow(std::vector<int64_t>& keys) const {
  const auto scanner = options_.store->ScanKeys();
  std::vector<int64_t> block;
  for (scanner->Next(kRowsPerPut, block); !block.empty(); scanner->Next(kRowsPerPut, block)) {
    keys.insert(keys.end(), block.begin(), block.end());
  }
}

}  // namespace embstore
