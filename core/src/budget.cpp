// What a table costs in bytes, and how its limit moves while it is in use.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "embstore/aged_score.h"
#include "embstore/snapshot.h"
#include "embstore/table.h"

namespace embstore {

// Victims come from classes of 128 keys or more, so newcomers would crowd buckets that are smaller.
KeyIndexOptions Table::IndexOptions(const TableOptions& options, int64_t max_capacity) {
  constexpr int64_t kLeast = 128, kStep = 16;
  KeyIndexOptions index = options.index;
  index.max_capacity = max_capacity;
  if (index.bucket_capacity >= kStep && index.bucket_capacity % kStep == 0) {  // else it is refused
    const int64_t all = (max_capacity + kStep - 1) / kStep * kStep;
    index.bucket_capacity = std::max(index.bucket_capacity, std::clamp(all, kStep, kLeast));
  }
  return index;
}

int64_t Table::FullBytes(const TableOptions& options) {
  constexpr int64_t kMarkBytes = 3, kUsesBytes = 4;  // stamps_, dirty_, changes_; uses_
  const int64_t rows = options.index.max_capacity;
  const int64_t row_bytes =
      RowStride(options) + kMarkBytes + (options.evict_least_used ? kUsesBytes : 0);
  int64_t bytes = static_cast<int64_t>(KeyIndex::FullBytes(IndexOptions(options, rows))) +
                  (rows + options.shared_rows) * row_bytes;
  if (options.admit_by_frequency) bytes += FrequencySketch::BytesFor(SketchKeys(rows));
  if (options.score_strategy != ScoreStrategy::kNoEviction) {
    bytes += VictimQueues::BytesFor(ClassBits(options, rows));
  }
  if (options.admission_threshold > 0) bytes += AdmissionFilter::BytesFor(kTrackedPerRow * rows);
  return bytes;
}

void Table::SetMaxCapacity(int64_t rows) {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!evicts()) {
    throw InvalidArgument("max_capacity of table '" + options_.name +
                          "' should not be set: it evicts nothing");
  }
  if (rows < 1 || rows > KeyIndex::kMaxCapacity) {
    throw InvalidArgument("max_capacity should be between 1 and " +
                          std::to_string(KeyIndex::kMaxCapacity) +
                          " but is: " + std::to_string(rows));
  }
  if (rows == options_.index.max_capacity) return;
  EvictSmallest(index_->size() - rows);
  // Rows that are in use move down to numbers that are free, so that the heap can end after them.
  std::vector<Row> number(static_cast<size_t>(rows_.used()), kMissingRow);  // by the present one
  index_->VisitAll([&](Slot, const IndexEntry& e) { number[static_cast<size_t>(e.row)] = e.row; });
  for (Row row = 0; row < options_.shared_rows; ++row) number[static_cast<size_t>(row)] = row;
  const int64_t keys = index_->size(), used = keys + options_.shared_rows;
  if (!snapshot_) {  // which knows rows by their numbers
    int64_t free = 0;
    for (int64_t row = used; row < std::ssize(number); ++row) {
      if (number[static_cast<size_t>(row)] == kMissingRow) continue;
      while (number[static_cast<size_t>(free)] != kMissingRow) ++free;
      number[static_cast<size_t>(row)] = static_cast<Row>(free++);
    }
  }
  KeyIndexOptions options = IndexOptions(options_, rows);
  options.init_capacity = std::clamp<int64_t>(keys, 1, rows);
  KeyIndex index(options);
  index.Reserve(keys);
  index_->VisitAll([&](Slot, const IndexEntry& e) {
    index.InsertNew({e.key, e.score, number[static_cast<size_t>(e.row)]});
  });
  // Nothing fails from here on.
  index_ = std::move(index);
  options_.index.max_capacity = row_limit_ = rows;
  if (miss_sampler_) miss_sampler_->set_window(MissWindow());
  class_bits_ = ClassBits(options_, rows);
  queues_.reset();
  if (sketch_ && sketch_->bytes() != FrequencySketch::BytesFor(SketchKeys(rows))) sketch_.reset();
  if (snapshot_) return;
  for (int64_t from = used; from < std::ssize(number); ++from) {
    const Row to = number[static_cast<size_t>(from)];
    if (to != kMissingRow) MoveRow(static_cast<Row>(from), to);
  }
  pins_.Renumber(number);
  rows_.Truncate(used);
}

void Table::MoveRow(Row from, Row to) {
  std::memcpy(rows_.at(to), rows_.at(from), static_cast<size_t>(row_stride_));
  if (below_.exists()) below_.MoveRow(from, to);
  if (counts_apart()) uses_[static_cast<size_t>(to)] = uses_[static_cast<size_t>(from)];
  if (!changes_) return;
  if (changes_->IsMarked(from)) {
    changes_->Mark(to);
  } else {
    changes_->Unmark(to);
  }
  changes_->Unmark(from);
}

// Evicts the rows with the smallest scores of the whole table, but no rows of live batches.
void Table::EvictSmallest(int64_t count) {
  if (count <= 0) return;
  pins_.BeginBatch(nullptr, row_capacity_, 0);
  std::vector<IndexEntry> entries;
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    if (!pins_.IsHeld(entry.row, entry.score)) entries.push_back(entry);
  });
  count = std::min(count, std::ssize(entries));
  const auto rank = [&](const IndexEntry& e) { return std::pair(Worth(e), HashKey(e.key)); };
  std::partial_sort(entries.begin(), entries.begin() + count, entries.end(),
                    [&](const IndexEntry& a, const IndexEntry& b) { return rank(a) < rank(b); });
  std::vector<Evicted> evicted;
  for (int64_t i = 0; i < count; ++i) {
    const IndexEntry& entry = entries[static_cast<size_t>(i)];
    if (watched()) BeforeChange(entry);
    if (snapshot_ && below_.exists()) snapshot_->Leave(entry.key);
    evicted.push_back({entry, index_->Find(entry.key), false});
  }
  WriteBack(evicted);
  LogEvictions(evicted);
  for (const Evicted& gone : evicted) {
    if (changes_) changes_->Unmark(gone.entry.row);
    if (sketch_) {  // what is known of a key stays known when its row goes
      const int64_t now = clock_.half_life();
      sketch_->Add(gone.entry.key, AgedAmount(gone.entry.score, now), now);
    }
    FreeSlot(index_->Find(gone.entry.key));
  }
  index_->AddSize(-std::ssize(evicted));
}

}  // namespace embstore
