// How missing keys get rows: room, eviction, protection of pinned rows, admission.
#include <algorithm>
#include <string>
#include <utility>

#include "embstore/parallel.h"
#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "newcomers.h"

namespace embstore {

Table::Newcomers Table::Distinct(const int64_t* keys, std::span<const uint32_t> missing,
                                 uint64_t score, const uint64_t* scores,
                                 const FetchedRows& below) const {
  Newcomers fresh;
  fresh.first.reserve(missing.size());
  fresh.hashes.reserve(missing.size());
  fresh.scores.reserve(missing.size());
  fresh.number.resize(missing.size());
  DistinctKeys distinct(index_->secret());
  distinct.Reset(missing.size());
  for (size_t i = 0; i < missing.size(); ++i) {
    const int64_t key = keys[missing[i]];
    const uint64_t hash = index_->Hash(key);
    const auto [number, is_new] = distinct.Add(key, hash);
    if (is_new) {
      fresh.first.push_back(missing[i]);
      fresh.hashes.push_back(hash);
      fresh.scores.push_back(score);
    } else if (counts_occurrences() && !scores_gradients() && !scores) {
      fresh.scores[number] = SumOfScores(fresh.scores[number], score);
    }
    fresh.number[i] = number;
    if (scores) fresh.scores[number] = scores[missing[i]];
  }
  const bool adds_up = counts_occurrences() && !scores && !below.empty();
  for (int64_t j = 0; adds_up && j < fresh.size(); ++j) {
    uint64_t& own = fresh.scores[static_cast<size_t>(j)];
    const uint64_t before = below.Find(keys[fresh.first[static_cast<size_t>(j)]]).score;
    own = SumOfScores(own, before);
  }
  fresh.rows.resize(fresh.first.size(), kMissingRow);
  fresh.aside.resize(fresh.first.size(), 0);
  return fresh;
}

// The slot to give up for this key, or kNoSlot. Rows of other live batches go last, since their
// gradients are lost; over a store the table grows instead.
Slot Table::Victim(uint64_t hash) const {
  const auto is_pinned = [&](Row row) { return pins_.IsHeld(row); };
  const auto worth = [&](const IndexEntry& entry) { return Worth(entry); };
  const Slot slot = index_->Victim(hash, is_pinned, worth);
  if (slot != kNoSlot || MayExceedBudget()) return slot;
  return index_->Victim(hash, [&](Row row) { return pins_.IsHeldByCall(row); }, worth);
}

// Gives the row of a slot to a newcomer.
void Table::Evict(Slot slot, int64_t newcomer, Newcomers& fresh) {
  const IndexEntry victim = index_->entry(slot);
  if (watched()) BeforeChange(victim);
  fresh.evicted[static_cast<size_t>(newcomer - fresh.plain)] = {victim, slot,
                                                                pins_.IsHeldByOthers(victim.row)};
  index_->Erase(slot);
  fresh.rows[static_cast<size_t>(newcomer)] = victim.row;
  pins_.Hold(victim.row);
}

// Keys of the overflow area belong to no bucket, so no search for a victim finds them. Those with
// the smallest scores go before the victims of the first newcomers.
void Table::EvictAside(Newcomers& fresh) {
  std::vector<IndexEntry> aside;
  index_->VisitOverflow([&](Slot, const IndexEntry& entry) {
    if (!pins_.IsHeld(entry.row)) aside.push_back(entry);
  });
  std::sort(aside.begin(), aside.end(), [this](const IndexEntry& a, const IndexEntry& b) {
    return std::pair(Worth(a), HashKey(a.key)) < std::pair(Worth(b), HashKey(b.key));
  });
  int64_t newcomer = fresh.plain;
  for (const IndexEntry& entry : aside) {
    if (newcomer == fresh.size()) return;
    const Slot other = Victim(fresh.hashes[static_cast<size_t>(newcomer)]);
    if (other != kNoSlot && Worth(index_->entry(other)) <= Worth(entry)) return;
    Evict(index_->Find(entry.key), newcomer++, fresh);
  }
}

// Threads divide the work by stripe, so that the keys of a stripe are placed in the order of the
// batch, whatever the number of threads.
void Table::Place(const int64_t* keys, Newcomers& fresh, bool may_evict) {
  constexpr int64_t kWorthSharing = 256;
  const int64_t n = fresh.size();
  const int64_t parts = n < kWorthSharing ? 1 : NumThreads();
  ParallelFor(parts, [&](int64_t part) {
    constexpr int64_t kAhead = 12, kAheadWhole = 3;  // whole buckets fill the L1 cache quickly
    for (int64_t j = 0; j < n; ++j) {
      const int64_t ahead = j + (j + kAhead < fresh.plain ? kAhead : kAheadWhole);
      if (ahead < n) {
        const uint64_t next = fresh.hashes[static_cast<size_t>(ahead)];
        if (parts == 1 || index_->StripeOf(next) % parts == part) {
          index_->Prefetch(next, ahead >= fresh.plain);
        }
      }
      const auto at = static_cast<size_t>(j);
      const uint64_t hash = fresh.hashes[at];
      if (parts > 1 && index_->StripeOf(hash) % parts != part) continue;
      if (fresh.rows[at] == kMissingRow) {
        const Slot slot = may_evict ? Victim(hash) : kNoSlot;
        if (slot == kNoSlot) continue;
        Evict(slot, j, fresh);
      }
      LowerFloor(hash, fresh.scores[at]);
      const IndexEntry entry{keys[fresh.first[at]], fresh.scores[at], fresh.rows[at]};
      fresh.aside[at] = !index_->Insert(entry, hash);
    }
  });
  for (int64_t j = 0; j < n; ++j) {
    const auto at = static_cast<size_t>(j);
    if (!fresh.aside[at]) continue;
    index_->InsertAside({keys[fresh.first[at]], fresh.scores[at], fresh.rows[at]},
                        fresh.hashes[at]);
    fresh.aside[at] = 0;
  }
}

// Undoes Place. Rows have not been touched, so only the index has to be restored.
void Table::Undo(const int64_t* keys, Newcomers& fresh) {
  for (int64_t j = 0; j < fresh.size(); ++j) {
    const auto at = static_cast<size_t>(j);
    if (fresh.rows[at] == kMissingRow || fresh.aside[at]) continue;
    const Slot slot = index_->Find(keys[fresh.first[at]], fresh.hashes[at]);
    if (slot != kNoSlot) index_->Erase(slot);
  }
  for (const Evicted& gone : fresh.evicted) {
    if (gone.slot != kNoSlot) index_->PutBack(gone.slot, gone.entry);
  }
}

void Table::FillRows(const int64_t* keys, Newcomers& fresh, const FetchedRows& below,
                     const float* initial) {
  ParallelFor(FillTasks(fresh.size()), [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kRowsPerFill, fresh.size());
    float* const scratch = fresh.scratch.as<float>() + task * options_.dim;
    for (int64_t j = task * kRowsPerFill; j < end; ++j) {
      constexpr int64_t kAhead = 8;
      if (const Row next = j + kAhead < end ? fresh.rows[static_cast<size_t>(j + kAhead)] : -1;
          next >= 0) {
        const std::byte* row = rows_.at(next);
        for (int64_t byte = 0; byte < row_stride_; byte += 64) __builtin_prefetch(row + byte, 1);
      }
      const Row row = fresh.rows[static_cast<size_t>(j)];
      if (row == kMissingRow) continue;
      const uint32_t i = fresh.first[static_cast<size_t>(j)];
      FillRow(row, keys[i], below, initial ? initial + i * options_.dim : nullptr, scratch);
    }
  });
}

// Takes the evicted rows from the lists of other batches.
void Table::Unpin(std::span<const Evicted> evicted, const Row* own) {
  if (std::none_of(evicted.begin(), evicted.end(), [](const Evicted& e) { return e.pinned; })) {
    return;
  }
  pins_.Begin(row_capacity_);
  for (const Evicted& gone : evicted) {
    if (!gone.pinned) continue;
    pins_.Hold(gone.entry.row);
    ++stats_.dropped_gradients;
  }
  pins_.TakeFromLists(own);
}

int64_t Table::InsertMissing(const int64_t* keys, Row* rows, std::span<const uint32_t> missing,
                             uint64_t score, const float* initial,
                             std::vector<uint32_t>& unadmitted) {
  if (missing.empty()) return 0;
  return InsertMissing(keys, rows, missing, score, nullptr, Fetch(keys, missing), initial,
                       options_.admit_by_frequency ? &unadmitted : nullptr);
}

int64_t Table::InsertMissing(const int64_t* keys, Row* rows, std::span<const uint32_t> missing,
                             uint64_t score, const uint64_t* scores, const FetchedRows& below,
                             const float* initial, std::vector<uint32_t>* unadmitted) {
  if (missing.empty()) return 0;
  if (snapshot_) snapshot_->PreserveBelow(keys, missing, below);
  // Whatever may run out of memory comes first, or can be undone.
  Newcomers fresh = Distinct(keys, missing, score, scores, below);
  const int64_t n = fresh.size(), size = index_->size();
  fresh.plain = std::clamp<int64_t>(row_limit_ - size, 0, n);
  if (fresh.plain < n && !evicts()) {
    throw OutOfMemory("table '" + options_.name +
                      "' has as many rows as there can be: " + std::to_string(size));
  }
  fresh.evicted.resize(static_cast<size_t>(n - fresh.plain));
  fresh.scratch = RecycledBuffer(static_cast<size_t>(FillTasks(n) * options_.dim) * sizeof(float));
  MakeRoom(size + fresh.plain);
  if (fresh.plain < n) pins_.BeginBatch(rows, row_capacity_);
  for (int64_t j = 0; j < fresh.plain; ++j) {
    fresh.rows[static_cast<size_t>(j)] = rows_.Next(j);
    if (fresh.plain < n) pins_.Hold(rows_.Next(j));
  }
  std::vector<Evicted> evicted;
  try {
    if (unadmitted) {
      Contest(keys, fresh);
    } else if (fresh.plain < n && index_->overflow_size() > 0) {
      EvictAside(fresh);
    }
    Place(keys, fresh, /*may_evict=*/!unadmitted);
    std::copy_if(fresh.evicted.begin(), fresh.evicted.end(), std::back_inserter(evicted),
                 [](const Evicted& gone) { return gone.slot != kNoSlot; });
    if (snapshot_) {
      for (const Evicted& gone : evicted) snapshot_->Leave(gone.entry.key);
    }
    WriteBack(evicted);  // the rows still hold what the victims had
    LogEvictions(evicted);
  } catch (...) {
    Undo(keys, fresh);
    throw;
  }
  rows_.Take(fresh.plain);
  index_->AddSize(fresh.plain);
  for (int64_t j = 0; watched() && j < fresh.plain; ++j) {
    AfterInsert(fresh.rows[static_cast<size_t>(j)]);
  }
  Unpin(evicted, rows);
  FillRows(keys, fresh, below, initial);
  int64_t refused = std::count(fresh.rows.begin(), fresh.rows.end(), kMissingRow);
  stats_.inserts += n - refused;
  if (unadmitted) refused = 0;
  if (refused && MayExceedBudget()) {
    InsertBeyondBudget(keys, fresh, below, initial);
    refused = 0;
  }
  stats_.refusals += refused;
  for (size_t i = 0; i < missing.size(); ++i) {
    const Row row = rows[missing[i]] = fresh.rows[fresh.number[i]];
    if (!unadmitted || row != kMissingRow) continue;
    unadmitted->push_back(missing[i]);
    ++stats_.unadmitted;
  }
  if (counts_apart()) {
    for (const Row row : fresh.rows) {
      if (row != kMissingRow) uses_[static_cast<size_t>(row)] = 0;
    }
    for (const uint32_t i : missing) CountUses(rows + i, 1);
  }
  return refused;
}

// Over a store: gives rows to the remaining newcomers, beyond the budget.
void Table::InsertBeyondBudget(const int64_t* keys, Newcomers& fresh, const FetchedRows& below,
                               const float* initial) {
  Newcomers rest;
  try {
    for (int64_t j = 0; j < fresh.size(); ++j) {
      const auto at = static_cast<size_t>(j);
      if (fresh.rows[at] != kMissingRow) continue;
      rest.first.push_back(fresh.first[at]);
      rest.number.push_back(static_cast<uint32_t>(j));
      rest.hashes.push_back(fresh.hashes[at]);
      rest.scores.push_back(fresh.scores[at]);
      rest.rows.push_back(rows_.Next(std::ssize(rest.rows)));
    }
    rest.aside.resize(rest.first.size(), 0);
    rest.plain = rest.size();
    rest.scratch =
        RecycledBuffer(static_cast<size_t>(FillTasks(rest.size()) * options_.dim) * sizeof(float));
    MakeRoom(index_->size() + rest.size());
    try {
      Place(keys, rest, /*may_evict=*/false);
    } catch (...) {
      Undo(keys, rest);
      throw;
    }
  } catch (...) {
    // Removes the keys of the call. Their victims are below, so nothing is lost.
    int64_t erased = 0;
    for (int64_t j = 0; j < fresh.size(); ++j) {
      const auto at = static_cast<size_t>(j);
      if (fresh.rows[at] == kMissingRow) continue;
      FreeSlot(index_->Find(keys[fresh.first[at]], fresh.hashes[at]));
      ++erased;
    }
    index_->AddSize(-erased);
    throw;
  }
  rows_.Take(rest.size());
  index_->AddSize(rest.size());
  for (size_t j = 0; j < rest.rows.size(); ++j) {
    AfterInsert(rest.rows[j]);
    fresh.rows[rest.number[j]] = rest.rows[j];
  }
  FillRows(keys, rest, below, initial);
  stats_.inserts += rest.size();
}

void Table::LogEvictions(std::span<Evicted> evicted) {
  const auto expired = std::count_if(evicted.begin(), evicted.end(), [&](const Evicted& gone) {
    return !below_.exists() && gone.entry.score < expired_below_;
  });
  stats_.expired += expired;
  stats_.evictions += std::ssize(evicted) - expired;
  if (changes_) {
    for (const Evicted& gone : evicted) changes_->Remove(gone.entry.key);
  }
  if (miss_sampler_) {
    for (const Evicted& gone : evicted) miss_sampler_->Evict(gone.entry.key);
  }
  if (options_.eviction_log == EvictionLog::kOff) return;
  // Their order depends on the threads; that of the log must not.
  std::sort(evicted.begin(), evicted.end(),
            [](const Evicted& a, const Evicted& b) { return a.entry.row < b.entry.row; });
  const bool with_rows = options_.eviction_log == EvictionLog::kRows;
  const auto dim = static_cast<size_t>(options_.dim), width = static_cast<size_t>(state_width_);
  for (const Evicted& gone : evicted) {
    log_.keys.push_back(gone.entry.key);
    log_.scores.push_back(gone.entry.score);
    if (!with_rows) continue;
    log_.values.resize(log_.values.size() + dim);
    ActiveKernels().load_vector(rows_.at(gone.entry.row), options_.dim, options_.dtype,
                                &log_.values[log_.values.size() - dim]);
    const float* const state = state_at(gone.entry.row);
    log_.states.insert(log_.states.end(), state, state + width);
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
