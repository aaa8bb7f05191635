// How missing keys get rows, and what new rows hold.
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

// Threads divide the work by stripe, so that the keys of a stripe are placed in the order of the
// batch, whatever the number of threads.
void Table::Place(const int64_t* keys, Newcomers& fresh, bool may_evict) {
  constexpr int64_t kWorthSharing = 256;
  const int64_t n = fresh.size();
  const int64_t parts = n < kWorthSharing ? 1 : NumThreads();
  if (may_evict &&
      std::find(fresh.rows.begin(), fresh.rows.end(), kMissingRow) != fresh.rows.end()) {
    StampRows(fresh);
  }
  ParallelFor(parts, [&](int64_t part) {
    constexpr int64_t kAhead = 12;
    for (int64_t j = 0; j < n; ++j) {
      if (j + kAhead < n) {
        const uint64_t next = fresh.hashes[static_cast<size_t>(j + kAhead)];
        if (parts == 1 || index_->StripeOf(next) % parts == part) index_->Prefetch(next);
      }
      const auto at = static_cast<size_t>(j);
      const uint64_t hash = fresh.hashes[at];
      if (parts > 1 && index_->StripeOf(hash) % parts != part) continue;
      if (fresh.rows[at] == kMissingRow) {
        const Slot slot = may_evict ? Victim(hash) : kNoSlot;
        if (slot == kNoSlot) continue;
        Evict(slot, j, fresh);
      }
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
  for (int64_t j = 0; j < fresh.plain; ++j) fresh.rows[static_cast<size_t>(j)] = rows_.Next(j);
  fresh.batch = rows;
  // A hit raises the score to that of the batch, but for importance; uses are another measure.
  const bool by_score = !scores && !scores_gradients() && !counts_apart();
  if (by_score && !pins_.HasOthers(rows)) fresh.batch_score = score;
  std::vector<Evicted> evicted;
  try {
    if (unadmitted) {
      Contest(keys, fresh);
    } else {
      EvictFor(fresh, /*must_win=*/false);
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

}  // namespace embstore
