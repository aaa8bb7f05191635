// The invariants of table.h, checked in full. Tests call it after what is hard to get right.
#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <vector>

#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "invariant.h"

namespace embstore {

void Table::CheckInvariants() const {
  std::shared_lock guard(lock_);
  RequireOpen();
  index_->CheckInvariants();
  std::vector<uint8_t> in_use(static_cast<size_t>(rows_.used()), 0);
  std::fill_n(in_use.begin(), options_.shared_rows, uint8_t{3});
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    RequireInvariant(entry.row >= 0 && entry.row < rows_.used(), "a key has a row that was taken");
    RequireInvariant(!in_use[static_cast<size_t>(entry.row)], "a row belongs to one key");
    in_use[static_cast<size_t>(entry.row)] = 1;
  });
  rows_.VisitFree([&](Row row) {
    RequireInvariant(row >= 0 && row < rows_.used(), "a free row was in use before");
    RequireInvariant(!in_use[static_cast<size_t>(row)], "a free row belongs to no key");
    in_use[static_cast<size_t>(row)] = 2;
  });
  for (const uint8_t use : in_use) RequireInvariant(use != 0, "a taken row is in use or free");
  pins_.VisitLists([&](const SlotList& list) {
    for (int64_t i = 0; i < list.size(); ++i) {
      const Row row = list.rows()[i];
      RequireInvariant(row == kMissingRow || IsShared(row) || row == FindRow(list.keys()[i]),
                       "a list names the rows of its keys");
    }
  });
  if (below_.exists()) below_.CheckInvariants(*index_, rows_);
  if (queues_) CheckQueues();
  CheckAnnounced();
}

void Table::CheckAnnounced() const {
  if (counts_occurrences()) return;
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    RequireInvariant(entry.score <= std::max(highest_score_, kUnusedScore),
                     "no score is above the highest");
    if (entry.score <= unannounced_through_) return;
    RequireInvariant(!snapshot_ || snapshot_->IsSettled(entry.row),
                     "a row with a score of this time is settled in every snapshot");
    RequireInvariant(!changes_ || changes_->IsMarked(entry.row),
                     "a row with a score of this time is a change");
  });
}

void Table::CheckQueues() const {
  for (size_t in_class = 0; in_class < size_t{1} << class_bits_; ++in_class) {
    if (!queues_->IsKnown(in_class)) continue;
    const auto entries = queues_->entries(in_class);
    for (size_t i = 0; i < entries.size(); ++i) {
      const VictimQueues::Rank rank = VictimQueues::RankOf(entries[i]);
      RequireInvariant(rank <= queues_->bound(in_class), "no entry of a queue is above its bound");
      RequireInvariant(i == 0 || rank < VictimQueues::RankOf(entries[i - 1]),
                       "the entries of a queue descend");
    }
  }
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    const size_t in_class = ClassOf(index_->Hash(entry.key));
    if (!queues_->IsKnown(in_class) || IsLeftOut(entry.score)) return;
    const uint64_t worth = Worth(entry);
    if (VictimQueues::RankOf({worth, entry.key}) > queues_->bound(in_class)) return;
    const auto entries = queues_->entries(in_class);
    RequireInvariant(std::any_of(entries.begin(), entries.end(),
                                 [&](const VictimQueues::Entry& e) {
                                   return e.key == entry.key && e.worth <= worth;
                                 }),
                     "a key of small worth is in the queue of its class");
  });
}

void LowerTier::CheckInvariants(const KeyIndex& index, const RowHeap& rows) const {
  std::vector<IndexEntry> clean;
  index.VisitAll([&](Slot, const IndexEntry& entry) {
    if (!IsDirty(entry.row)) clean.push_back(entry);
  });
  std::vector<int64_t> keys;
  for (const IndexEntry& entry : clean) keys.push_back(entry.key);
  const FetchedRows below = Fetch(keys, /*with_scores=*/false);
  for (const IndexEntry& entry : clean) {
    const std::byte* const row = below.Find(entry.key).data;
    RequireInvariant(row != nullptr, "a clean row is below");
    RequireInvariant(
        std::memcmp(row, rows.at(entry.row), static_cast<size_t>(store_->row_bytes())) == 0,
        "a clean row equals the one below");
  }
}

}  // namespace embstore
