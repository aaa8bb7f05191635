#include "embstore/lower_tier.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <numeric>
#include <utility>

namespace embstore {
namespace {

// Rows that go down in one Put: enough to fill the queue of a disk, little enough to copy.
constexpr size_t kRowsPerPut = 16384;

}  // namespace

FetchedRows::FetchedRows(const Store& store, const int64_t* keys, std::span<const uint32_t> wanted,
                         bool with_scores)
    : row_bytes_(store.row_bytes()) {
  keys_.Reset(wanted.size());
  numbers_.reserve(wanted.size());
  for (const uint32_t i : wanted) {
    const auto [number, is_new] = keys_.Add(keys[i]);
    if (is_new) first_.push_back(i);
    numbers_.push_back(number);
  }
  rows_ = RecycledBuffer(keys_.size() * static_cast<size_t>(row_bytes_));
  if (with_scores) scores_.resize(keys_.size());
  found_.resize(keys_.size());
  store.Get(keys_.keys(), rows_.as<std::byte>(), with_scores ? scores_.data() : nullptr,
            found_.data());
}

FetchedRow FetchedRows::Find(int64_t key) const {
  const int64_t number = keys_.Find(key);
  return number < 0 ? FetchedRow{} : at(static_cast<size_t>(number));
}

FetchedRow FetchedRows::at(size_t number) const {
  if (!found_[number]) return {};
  return {rows_.as<std::byte>() + static_cast<int64_t>(number) * row_bytes_,
          scores_.empty() ? 0 : scores_[number]};
}

std::vector<uint32_t> FetchedRows::NumbersOf(std::span<const uint32_t> first) const {
  std::vector<uint32_t> numbers;
  if (keys_.empty()) return numbers;
  numbers.reserve(first.size());
  uint32_t number = 0;
  for (const uint32_t position : first) {
    for (; first_[number] != position; ++number) assert(number + 1 < first_.size());
    numbers.push_back(number);
  }
  return numbers;
}

void LowerTier::Attach(std::shared_ptr<Store> store, int64_t capacity) {
  if (!store) return;
  dirty_.resize(static_cast<size_t>(capacity), 0);
  store->Attach();
  store_ = std::move(store);
  attached_ = true;
}

void LowerTier::Detach() noexcept {
  if (std::exchange(attached_, false)) store_->Detach();
}

void LowerTier::Close() {
  Detach();
  dirty_ = {};
}

void LowerTier::RenewAfterFork() {
  reads_ahead_ = 0;
  changed_.Reset(0);
}

FetchedRows LowerTier::Fetch(const int64_t* keys, std::span<const uint32_t> wanted,
                             bool with_scores) const {
  if (!store_ || wanted.empty()) return {};
  return FetchedRows(*store_, keys, wanted, with_scores);
}

FetchedRows LowerTier::Fetch(std::span<const int64_t> keys, bool with_scores) const {
  std::vector<uint32_t> all(keys.size());
  std::iota(all.begin(), all.end(), 0u);
  return Fetch(keys.data(), all, with_scores);
}

bool LowerTier::Install(const FetchedRow& fetched, Row row, const RowHeap& rows) {
  if (!store_) return false;
  dirty_[static_cast<size_t>(row)] = fetched.data == nullptr;
  if (!fetched.data) return false;
  std::memcpy(rows.at(row), fetched.data, static_cast<size_t>(store_->row_bytes()));
  return true;
}

void LowerTier::Grow(int64_t capacity) {
  if (store_) dirty_.resize(static_cast<size_t>(capacity), 0);
}

void LowerTier::WriteBack(std::span<const IndexEntry> entries, const RowHeap& rows) {
  std::vector<int64_t> keys;
  std::vector<uint64_t> scores;
  std::vector<const std::byte*> data;
  std::vector<Row> numbers;
  const size_t most = std::min(entries.size(), kRowsPerPut);
  keys.reserve(most);
  scores.reserve(most);
  data.reserve(most);
  numbers.reserve(most);
  for (size_t next = 0; next < entries.size();) {
    keys.clear();
    scores.clear();
    data.clear();
    numbers.clear();
    for (; next < entries.size() && keys.size() < kRowsPerPut; ++next) {
      const IndexEntry& entry = entries[next];
      if (!IsDirty(entry.row)) continue;
      keys.push_back(entry.key);
      scores.push_back(entry.score);
      data.push_back(rows.at(entry.row));
      numbers.push_back(entry.row);
    }
    if (keys.empty()) continue;
    store_->PutScattered(keys, data.data(), scores.data());
    NoteChanged(keys);
    for (const Row row : numbers) dirty_[static_cast<size_t>(row)] = 0;
    write_backs_ += std::ssize(keys);
  }
}

void LowerTier::WriteBackAll(const KeyIndex& index, const RowHeap& rows) {
  std::vector<IndexEntry> entries;
  const auto write = [&] {
    WriteBack(entries, rows);
    entries.clear();
  };
  index.VisitAll([&](Slot, const IndexEntry& entry) {
    if (!IsDirty(entry.row)) return;
    entries.push_back(entry);
    if (entries.size() == kRowsPerPut) write();
  });
  write();
}

void LowerTier::Erase(std::span<const int64_t> keys) {
  store_->Erase(keys);
  NoteChanged(keys);
}

std::vector<int64_t> LowerTier::Present(std::vector<int64_t> keys) const {
  SortDistinct(keys);
  std::vector<uint8_t> found(keys.size());
  store_->Contains(keys, found.data());
  size_t kept = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i]) keys[kept++] = keys[i];
  }
  keys.resize(kept);
  return keys;
}

void LowerTier::AppendKeys(std::vector<int64_t>& keys) const {
  const auto scanner = store_->ScanKeys();
  std::vector<int64_t> block;
  for (scanner->Next(kRowsPerPut, block); !block.empty(); scanner->Next(kRowsPerPut, block)) {
    keys.insert(keys.end(), block.begin(), block.end());
  }
}

void LowerTier::NoteReplaced() {
  std::fill(dirty_.begin(), dirty_.end(), uint8_t{0});
  ++contents_;
}

void LowerTier::NoteChanged(std::span<const int64_t> keys) {
  if (reads_ahead_ == 0) return;
  for (const int64_t key : keys) changed_.Add(key);
}

LowerTier::ReadAhead LowerTier::BeginReadAhead() {
  ++reads_ahead_;
  return {contents_};
}

void LowerTier::EndReadAhead() {
  if (--reads_ahead_ == 0 && !changed_.empty()) changed_.Reset(changed_.size());
}

}  // namespace embstore
