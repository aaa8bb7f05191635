// How keys that are missing get rows: room, eviction, protection of pinned rows, admission.
#include <algorithm>
#include <atomic>
#include <utility>

#include "embstore/parallel.h"
#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "fetched_rows.h"

namespace embstore {

void Table::NextStamp() {
  stamps_.resize(static_cast<size_t>(row_capacity()), 0);
  if (++stamp_ == 0) {
    std::fill(stamps_.begin(), stamps_.end(), uint8_t{0});
    stamp_ = 1;
  }
}

void Table::StampPinned() {
  NextStamp();
  std::lock_guard guard(lists_mutex_);
  for (const SlotList* list : lists_) {
    constexpr int64_t kRowsPerTask = 8192;
    ParallelFor((list->size() + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
      const int64_t begin = task * kRowsPerTask;
      const int64_t end = std::min(begin + kRowsPerTask, list->size());
      for (int64_t i = begin; i < end; ++i) {
        const Row row = list->rows()[i];
        if (row < 0) continue;
        // Several threads may stamp the same row, always with the same value.
        std::atomic_ref<uint8_t>(stamps_[static_cast<size_t>(row)])
            .store(stamp_, std::memory_order_relaxed);
      }
    });
  }
}

struct Table::InsertPass {
  std::vector<uint32_t> inserted;  // occurrences whose key is new, one for each key, ascending
  std::vector<uint32_t> repeated;  // later occurrences of these
  std::vector<uint32_t> blocked;   // occurrences whose bucket is full
  std::vector<Evicted> evicted;

  void Append(const InsertPass& part) {
    const std::ptrdiff_t mine = std::ssize(inserted);
    inserted.insert(inserted.end(), part.inserted.begin(), part.inserted.end());
    std::inplace_merge(inserted.begin(), inserted.begin() + mine, inserted.end());
    repeated.insert(repeated.end(), part.repeated.begin(), part.repeated.end());
    blocked.insert(blocked.end(), part.blocked.begin(), part.blocked.end());
    evicted.insert(evicted.end(), part.evicted.begin(), part.evicted.end());
  }
};

// Threads share the work by bucket, so that the keys of one bucket come in the order of the batch
// whatever the number of threads.
Table::InsertPass Table::Insert(const int64_t* keys, Slot* slots, Row* rows,
                                std::span<const uint32_t> missing, uint64_t score, bool evict) {
  constexpr size_t kWorthSharing = 256;
  const int64_t parts = missing.size() < kWorthSharing ? 1 : NumThreads();
  std::vector<InsertPass> passes(static_cast<size_t>(parts));
  const bool counts = counts_occurrences();
  ParallelFor(parts, [&](int64_t part) {
    InsertPass& pass = passes[static_cast<size_t>(part)];
    std::span<const uint32_t> mine = missing;
    std::vector<uint32_t> share;
    if (parts > 1) {
      share.reserve(missing.size());
      for (const uint32_t i : missing) {
        if (index_->BucketOf(keys[i]) % parts == part) share.push_back(i);
      }
      mine = share;
    }
    const size_t ahead = evict ? 3 : 16;  // whole buckets fill the first cache soon
    for (size_t at = 0; at < mine.size(); ++at) {
      if (at + ahead < mine.size()) index_->Prefetch(keys[mine[at + ahead]], evict);
      const uint32_t i = mine[at];
      const int64_t key = keys[i];
      // An earlier occurrence may have inserted the key.
      auto [slot, inserted] =
          evict ? KeyIndex::Insertion{index_->Find(key), false} : index_->FindOrInsert(key, score);
      if (slot != kNoSlot && !inserted && counts) {
        index_->set_score(slot, index_->score(slot) + 1);
      }
      if (slot == kNoSlot && evict) {
        slot = index_->Victim(index_->BucketOf(key),
                              [&](Slot s) { return IsStamped(index_->row(s)); });
        if (slot != kNoSlot) {
          const IndexEntry victim = index_->entry(slot);
          if (watched()) BeforeChange(victim);
          pass.evicted.push_back({victim.key, victim.score, slot, victim.row});
          index_->Replace(slot, key, score);
          Stamp(victim.row);
          inserted = true;
        }
      }
      slots[i] = slot;
      // Who replaces a victim has its row; new rows are numbered below.
      rows[i] = evict && slot != kNoSlot ? index_->row(slot) : kMissingRow;
      (inserted ? pass.inserted : slot == kNoSlot ? pass.blocked : pass.repeated).push_back(i);
    }
  });
  for (int64_t part = 1; part < parts; ++part) passes[0].Append(passes[static_cast<size_t>(part)]);
  InsertPass& pass = passes[0];
  if (evict) return std::move(pass);
  // Numbered in the order of the batch, so that rows do not depend on the threads either.
  const auto number = [&](std::span<const uint32_t> occurrences, bool fresh) {
    constexpr int64_t kPerTask = 2048, kAhead = 16;
    const auto n = std::ssize(occurrences);
    ParallelFor((n + kPerTask - 1) / kPerTask, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kPerTask, n);
      for (int64_t j = task * kPerTask; j < end; ++j) {
        if (j + kAhead < end) {
          index_->PrefetchSlot(slots[occurrences[static_cast<size_t>(j + kAhead)]]);
        }
        const uint32_t i = occurrences[static_cast<size_t>(j)];
        if (fresh) {
          index_->set_row(slots[i], rows_.Next(j));
          AfterInsert(rows_.Next(j));
        }
        rows[i] = index_->row(slots[i]);
      }
    });
  };
  number(pass.inserted, true);
  number(pass.repeated, false);
  rows_.Take(std::ssize(pass.inserted));
  return std::move(pass);
}

int64_t Table::InsertMissing(const int64_t* keys, Row* rows, std::span<const uint32_t> missing,
                             uint64_t score, const float* initial) {
  if (missing.empty()) return 0;
  return InsertMissing(keys, rows, missing, score, Fetch(keys, missing), initial);
}

int64_t Table::InsertMissing(const int64_t* keys, Row* rows, std::span<const uint32_t> missing,
                             uint64_t score, const FetchedRows& below, const float* initial) {
  GrowFor(keys, missing);
  RequireRows(std::min(index_->size() + std::ssize(missing), index_->capacity()));
  InsertPass done;  // inserted: keys that have no row yet
  std::vector<uint32_t> blocked(missing.begin(), missing.end());
  if (missing.empty()) return 0;
  std::vector<Slot> slots(missing.back() + 1);
  const auto insert_if_room = [&] {
    InsertPass more = Insert(keys, slots.data(), rows, blocked, score, /*evict=*/false);
    index_->AddSize(std::ssize(more.inserted));
    blocked = std::move(more.blocked);
    done.inserted = std::move(more.inserted);
  };
  const auto finish_rows = [&] {
    constexpr int64_t kRowsPerTask = 512;
    const auto count = static_cast<int64_t>(done.inserted.size());
    ParallelFor((count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kRowsPerTask, count);
      for (int64_t j = task * kRowsPerTask; j < end; ++j) {
        constexpr int64_t kAhead = 8;
        if (j + kAhead < end) {
          const std::byte* next = rows_.at(rows[done.inserted[static_cast<size_t>(j + kAhead)]]);
          for (int64_t byte = 0; byte < row_stride_; byte += 64) __builtin_prefetch(next + byte, 1);
        }
        const uint32_t i = done.inserted[static_cast<size_t>(j)];
        FillRow(slots[i], rows[i], keys[i], below, initial ? initial + i * options_.dim : nullptr);
      }
    });
    stats_.inserts += count;
    done.inserted.clear();
  };
  if (index_->size() < index_->capacity()) insert_if_room();
  // A full bucket of a table that may grow: double until there is room.
  while (!blocked.empty() && index_->CanGrow()) {
    finish_rows();  // growing may fail, and rows that have a key must be whole by then
    Grow();
    insert_if_room();
  }
  if (!blocked.empty() && options_.score_strategy != ScoreStrategy::kNoEviction) {
    std::sort(blocked.begin(), blocked.end());
    finish_rows();  // stamps may fail as well
    StampPinned();
    InsertPass more = Insert(keys, slots.data(), rows, blocked, score, /*evict=*/true);
    done.inserted = std::move(more.inserted);
    blocked = std::move(more.blocked);
    try {
      WriteBack(more.evicted);  // the last moment: rows are still those of the victims
    } catch (...) {
      Undo(keys, rows, missing, done.inserted, more.evicted);
      throw;
    }
    try {
      LogEvictions(more.evicted);  // reads the rows, so before they are made anew
    } catch (...) {
      finish_rows();
      throw;
    }
  }
  finish_rows();
  while (!blocked.empty() && MayExceedBudget()) {
    Grow();
    insert_if_room();
    finish_rows();
  }
  if (blocked.empty()) return 0;
  std::vector<int64_t> refused;
  for (uint32_t i : blocked) refused.push_back(keys[i]);
  std::sort(refused.begin(), refused.end());
  const auto distinct = std::unique(refused.begin(), refused.end()) - refused.begin();
  stats_.refusals += distinct;
  return distinct;
}

std::vector<uint32_t> Table::Admit(const int64_t* keys, std::vector<uint32_t>& missing) {
  if (!admission_ || missing.empty()) return {};
  // Keys that come once or twice outnumber those that stay.
  constexpr int64_t kTrackedPerRow = 4;
  admission_->Reserve(kTrackedPerRow * index_->capacity());
  for (const uint32_t i : missing) admission_->Count(keys[i]);
  const FetchedRows below = Fetch(keys, missing);  // what was stored once stays so
  const auto first = std::stable_partition(missing.begin(), missing.end(), [&](uint32_t i) {
    return admission_->IsAdmitted(keys[i]) || below.Find(keys[i]).data != nullptr;
  });
  std::vector<uint32_t> waiting(first, missing.end());
  missing.erase(first, missing.end());
  for (const uint32_t i : missing) admission_->Forget(keys[i]);
  stats_.unadmitted += static_cast<int64_t>(waiting.size());
  return waiting;
}

void Table::LogEvictions(std::span<Evicted> evicted) {
  stats_.evictions += static_cast<int64_t>(evicted.size());
  if (changes_) {
    for (const Evicted& gone : evicted) changes_->Remove(gone.key);
  }
  if (options_.eviction_log == EvictionLog::kOff) return;
  // They come in the order of the threads that found them; the log must not depend on those.
  std::sort(evicted.begin(), evicted.end(),
            [](const Evicted& a, const Evicted& b) { return a.row < b.row; });
  const bool with_rows = options_.eviction_log == EvictionLog::kRows;
  const auto dim = static_cast<size_t>(options_.dim), width = static_cast<size_t>(state_width_);
  for (const Evicted& gone : evicted) {
    log_.keys.push_back(gone.key);
    log_.scores.push_back(gone.score);
    if (!with_rows) continue;
    log_.values.resize(log_.values.size() + dim);
    ActiveKernels().load_vector(rows_.at(gone.row), options_.dim, options_.dtype,
                                &log_.values[log_.values.size() - dim]);
    log_.states.insert(log_.states.end(), state_at(gone.row), state_at(gone.row) + width);
  }
  const auto capacity = static_cast<size_t>(options_.eviction_log_capacity);
  if (log_.keys.size() <= capacity) return;
  const auto drop = static_cast<std::ptrdiff_t>(log_.keys.size() - capacity);
  log_.keys.erase(log_.keys.begin(), log_.keys.begin() + drop);
  log_.scores.erase(log_.scores.begin(), log_.scores.begin() + drop);
  if (with_rows) {
    log_.values.erase(log_.values.begin(), log_.values.begin() + drop * options_.dim);
    log_.states.erase(log_.states.begin(), log_.states.begin() + drop * state_width_);
  }
  stats_.log_dropped += drop;
}

}  // namespace embstore
