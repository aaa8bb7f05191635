// Which row goes when a key needs one and the table is full.
//
// The victim of a key is the smallest of its class, by worth and then by HashKey, that nobody
// holds. So the choice depends on the keys and their scores alone: not on threads, on the order of
// arrival or on where the index keeps them.
#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "embstore/table.h"

namespace embstore {

// A class has so few keys that its smallest score is found quickly, but at least as many as a
// bucket has room for: options say among how many rows a victim is searched. A small table is one
// class.
int Table::ClassBits(const TableOptions& options, int64_t max_capacity) {
  constexpr int64_t kSmall = 1024, kLeastKeys = 128;
  const int64_t keys =
      options.admit_by_frequency ? kLeastKeys : std::max(kLeastKeys, options.index.bucket_capacity);
  if (max_capacity <= std::max(kSmall, keys)) return 0;
  return std::bit_width(static_cast<uint64_t>(max_capacity / keys)) - 1;
}

int Table::PartBits() const {
  return std::min(index_->stripe_bits(), std::max(class_bits_ - kNeighbourBits, 0));
}

void Table::FillQueue(size_t in_class) {
  const HashRange range{index_->secret(), FirstOf(in_class), LastOf(in_class)};
  const bool by_score = !counts_apart();
  VictimQueues::Candidates all;
  bool all_met = true;
  const auto add = [&](const IndexEntry& entry) {
    const uint64_t worth = Worth(entry);
    if (worth > all.most) return;
    if (IsLeftOut(entry.score) && pins_.IsHeld(entry.row, entry.score)) {
      all_met = false;
    } else {
      all.Add({worth, entry.key});
    }
  };
  const auto look = [&](const IndexGroup* groups, int64_t n) {
    constexpr int64_t kPiece = 64;
    Row rows[VictimQueues::Candidates::kPlaces];
    for (int64_t begin = 0; begin < n; begin += kPiece) {
      all.MakeRoom(kPiece * IndexGroup::kSlots);
      const int64_t before = all.count;
      all.count = ActiveKernels().collect(groups + begin, std::min(kPiece, n - begin), range,
                                          by_score ? all.most : UINT64_MAX,
                                          {all.keys, all.worths, rows}, before);
      if (by_score && !below_.exists()) continue;  // scores are worths, and none is left out
      const int64_t after = std::exchange(all.count, before);
      for (int64_t i = before; i < after; ++i) add({all.keys[i], all.worths[i], rows[i]});
    }
  };
  if (index_->VisitRuns(range.first, range.last, look)) {
    index_->VisitAside(range.first, range.last, [&](Slot, const IndexEntry& entry) {
      all.MakeRoom(1);
      add(entry);
    });
  }
  queues_->Fill(in_class, all, all_met);
}

Slot Table::Smallest(size_t in_class, uint64_t most) {
  for (bool filled = false;; filled = true) {
    if (queues_->IsKnown(in_class)) {
      while (const VictimQueues::Entry* const found = queues_->Next(in_class)) {
        const VictimQueues::Entry next = *found;
        const auto at = static_cast<int>(found - queues_->entries(in_class).data());
        if (next.worth > most) return kNoSlot;
        const Slot slot = index_->Find(next.key);
        if (slot == kNoSlot) {
          queues_->Remove(in_class, at);
          continue;
        }
        const IndexEntry entry = index_->entry(slot);
        if (const uint64_t worth = Worth(entry); worth != next.worth) {
          queues_->Remove(in_class, at);
          queues_->Offer(in_class, {worth, next.key});  // it may be the next one still
          continue;
        }
        if (pins_.IsHeld(entry.row, entry.score)) {  // it may go after this batch
          queues_->HoldNext(in_class);
          continue;
        }
        queues_->Remove(in_class, at);  // its key goes
        return slot;
      }
      if (queues_->bound(in_class).worth > most || queues_->IsComplete(in_class)) return kNoSlot;
    }
    if (filled) break;
    FillQueue(in_class);
  }
  // All of the queue are held.
  return SearchClass(in_class, most,
                     [&](const IndexEntry& entry) { return pins_.IsHeld(entry.row, entry.score); });
}

template <typename IsHeld>
Slot Table::SearchClass(size_t in_class, uint64_t most, const IsHeld& is_held) const {
  Slot best = kNoSlot;
  VictimQueues::Rank smallest{UINT64_MAX, UINT64_MAX};
  index_->VisitHashes(
      FirstOf(in_class), LastOf(in_class), [](uint64_t score) { return score != 0; },
      [&](Slot slot, const IndexEntry& entry) {
        const VictimQueues::Rank rank{Worth(entry), HashKey(entry.key)};
        if (rank.worth > most) return;
        if ((best != kNoSlot && rank > smallest) || is_held(entry)) return;
        best = slot;
        smallest = rank;
      });
  return best;
}

Slot Table::WeakerThan(uint64_t score, uint64_t hash) {
  // Larger by 1/16 to 1/8. Keys of about the same frequency would else take the row from each other
  // in turn, and lose what was learned.
  constexpr uint64_t kLead = kAgedOne / 8;
  return Smallest(ClassOf(hash), score - kLead - 1);
}

Slot Table::Victim(uint64_t hash) {
  const size_t own = ClassOf(hash);
  Slot slot = Smallest(own, UINT64_MAX);
  if (slot != kNoSlot) return slot;
  // Every row of the class is held. Others nearby may not be.
  const size_t neighbours = size_t{1} << std::min(class_bits_, kNeighbourBits);
  const auto neighbour = [&](size_t step) {
    return (own & ~(neighbours - 1)) | ((own + step) & (neighbours - 1));
  };
  for (size_t step = 1; slot == kNoSlot && step < neighbours; ++step) {
    slot = Smallest(neighbour(step), UINT64_MAX);
  }
  // Rows of other live batches go last, since their gradients are lost; over a store the table
  // grows instead.
  if (MayExceedBudget()) return slot;
  for (size_t step = 0; slot == kNoSlot && step < neighbours; ++step) {
    slot = SearchClass(neighbour(step), UINT64_MAX, [&](const IndexEntry& entry) {
      return pins_.IsHeldByCall(entry.row, entry.score);
    });
  }
  return slot;
}

void Table::OfferVictim(uint64_t hash, const VictimQueues::Entry& entry, bool held) {
  if (!queues_ || !queues_->IsKnown(ClassOf(hash)) || (held && IsLeftOut(entry.worth))) return;
  queues_->Offer(ClassOf(hash), entry, held);
}

void Table::NoteScore(uint64_t score) {
  if (score >= highest_score_) {
    highest_score_ = score;
  } else if (queues_) {
    queues_->Forget();  // scores of hits may fall
  }
}

}  // namespace embstore
