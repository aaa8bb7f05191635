// How missing keys get rows: room, eviction, protection of pinned rows, admission.
#include <algorithm>
#include <bit>
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
  DistinctKeys distinct;  // the seed of the index may be known
  distinct.Reset(missing.size());
  for (size_t i = 0; i < missing.size(); ++i) {
    const int64_t key = keys[missing[i]];
    const uint64_t hash = index_->Hash(key);
    const auto [number, is_new] = distinct.Add(key);
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
  fresh.keys = distinct.TakeKeys();
  const bool adds_up = counts_occurrences() && !scores && !below.empty();
  for (int64_t j = 0; adds_up && j < fresh.size(); ++j) {
    uint64_t& own = fresh.scores[static_cast<size_t>(j)];
    const uint64_t before = below.Find(fresh.keys[static_cast<size_t>(j)]).score;
    own = SumOfScores(own, before);
  }
  fresh.rows.resize(fresh.first.size(), kMissingRow);
  fresh.aside.resize(fresh.first.size(), 0);
  return fresh;
}

// Sorts the newcomers by the leading bits of their hashes, and else in the order of the batch.
void Table::Order(Newcomers& fresh) const {
  const int64_t n = fresh.size();
  constexpr int kMostBits = 14;  // so many counters stay in the caches
  const int bits = std::min(static_cast<int>(std::bit_width(static_cast<uint64_t>(n))), kMostBits);
  fresh.order_bits = bits;
  std::vector<uint32_t> ends((size_t{1} << bits) + 1, 0);
  const auto range = [&](uint64_t hash) { return static_cast<size_t>(hash >> (64 - bits)); };
  for (const uint64_t hash : fresh.hashes) ++ends[range(hash) + 1];
  for (size_t i = 1; i < ends.size(); ++i) ends[i] += ends[i - 1];
  fresh.order.resize(static_cast<size_t>(n));
  for (size_t j = 0; j < fresh.hashes.size(); ++j) {
    fresh.order[ends[range(fresh.hashes[j])]++] = static_cast<uint32_t>(j);
  }
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

// Threads divide the work by stripes and classes, so that the keys of each are placed in one order,
// whatever the number of threads.
void Table::Place(Newcomers& fresh, Eviction eviction) {
  constexpr size_t kWorthSharing = 256;
  const size_t n = fresh.order.size();
  // Only the overflow area is shared, and erasing moves its entries.
  const bool alone =
      n < kWorthSharing ||
      (eviction != Eviction::kNone && fresh.plain < fresh.size() && index_->overflow_size() > 0);
  const int64_t parts = alone ? 1 : NumThreads();
  const int bits = std::min(PartBits(), fresh.order_bits);
  const auto unit = [&](size_t i) {
    return bits ? fresh.hashes[fresh.order[i]] >> (64 - bits) : uint64_t{0};
  };
  const auto begin_of = [&](int64_t part) {  // the next unit begins here, or the list ends
    size_t i = n * static_cast<size_t>(part) / static_cast<size_t>(parts);
    while (i > 0 && i < n && unit(i) == unit(i - 1)) ++i;
    return i;
  };
  ParallelFor(
      parts, [&](int64_t part) { PlacePart(fresh, eviction, begin_of(part), begin_of(part + 1)); });
  for (int64_t j = 0; j < fresh.size(); ++j) {
    const auto at = static_cast<size_t>(j);
    if (!fresh.aside[at]) continue;
    index_->InsertAside({fresh.keys[at], fresh.scores[at], fresh.rows[at]}, fresh.hashes[at]);
    // A queue that was filled since has not seen it.
    if (!counts_apart()) OfferVictim(fresh.hashes[at], {fresh.scores[at], fresh.keys[at]}, true);
    fresh.aside[at] = 0;
  }
}

void Table::PlacePart(Newcomers& fresh, Eviction eviction, size_t begin, size_t end) {
  // In the order in which an eviction reads them.
  constexpr size_t kQueueAhead = 24, kHomeAhead = 16, kVictimAhead = 8, kAhead = 8;
  const auto class_at = [&](size_t i) { return ClassOf(fresh.hashes[fresh.order[i]]); };
  const auto evicts_at = [&](size_t i) {
    return i < end && eviction != Eviction::kNone && fresh.order[i] >= fresh.plain;
  };
  for (size_t i = begin; i < end; ++i) {
    if (evicts_at(i + kQueueAhead)) queues_->Prefetch(class_at(i + kQueueAhead));
    if (evicts_at(i + kHomeAhead)) {
      const size_t in_class = class_at(i + kHomeAhead);
      if (const auto* next = queues_->Next(in_class)) {
        index_->PrefetchHome(index_->Hash(next->key));
      } else {
        index_->PrefetchHomes(FirstOf(in_class), LastOf(in_class));
      }
    }
    if (evicts_at(i + kVictimAhead)) {
      if (const auto* next = queues_->Next(class_at(i + kVictimAhead))) {
        const Row row = index_->PeekRow(next->key);
        if (row != kMissingRow) pins_.Prefetch(row);
      }
    }
    if (i + kAhead < end) index_->Prefetch(fresh.hashes[fresh.order[i + kAhead]]);
    const size_t at = fresh.order[i];
    const uint64_t hash = fresh.hashes[at], score = fresh.scores[at];
    if (fresh.rows[at] == kMissingRow) {
      if (eviction == Eviction::kNone) continue;
      const Slot slot = eviction == Eviction::kAny ? Victim(hash) : WeakerThan(score, hash);
      if (slot == kNoSlot) continue;
      Evict(slot, static_cast<int64_t>(at), fresh);
    }
    const IndexEntry entry{fresh.keys[at], score, fresh.rows[at]};
    if (!counts_apart()) OfferVictim(hash, {score, entry.key}, /*held=*/true);
    fresh.aside[at] = !index_->Insert(entry, hash);
  }
}

// Undoes Place. Rows have not been touched, so only the index has to be restored.
void Table::Undo(Newcomers& fresh) {
  for (int64_t j = 0; j < fresh.size(); ++j) {
    const auto at = static_cast<size_t>(j);
    if (fresh.rows[at] == kMissingRow || fresh.aside[at]) continue;
    const Slot slot = index_->Find(fresh.keys[at], fresh.hashes[at]);
    if (slot != kNoSlot) index_->Erase(slot);
  }
  for (const Evicted& gone : fresh.evicted) {
    if (gone.slot != kNoSlot) index_->PutBack(gone.slot, gone.entry);
  }
  ForgetVictims();  // those that were chosen are in no queue any more
}

void Table::FillRows(Newcomers& fresh, const FetchedRows& below, const float* initial) {
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
      FillRow(row, fresh.keys[static_cast<size_t>(j)], below,
              initial ? initial + i * options_.dim : nullptr, scratch);
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
  Order(fresh);
  MakeRoom(size + fresh.plain);
  if (fresh.plain < n) {
    if (!queues_) queues_.emplace(class_bits_);
    pins_.BeginBatch(rows, row_capacity_);
    queues_->BeginCall();
  }
  for (int64_t j = 0; j < fresh.plain; ++j) {
    fresh.rows[static_cast<size_t>(j)] = rows_.Next(j);
    if (fresh.plain < n) pins_.Hold(rows_.Next(j));
  }
  std::vector<Evicted> evicted;
  try {
    if (unadmitted) Recall(fresh);
    Place(fresh, unadmitted ? Eviction::kSmaller : Eviction::kAny);
    std::copy_if(fresh.evicted.begin(), fresh.evicted.end(), std::back_inserter(evicted),
                 [](const Evicted& gone) { return gone.slot != kNoSlot; });
    if (snapshot_) {
      for (const Evicted& gone : evicted) snapshot_->Leave(gone.entry.key);
    }
    WriteBack(evicted);  // the rows still hold what the victims had
    LogEvictions(evicted);
  } catch (...) {
    Undo(fresh);
    throw;
  }
  if (unadmitted) Remember(fresh);
  rows_.Take(fresh.plain);
  index_->AddSize(fresh.plain);
  for (int64_t j = 0; watched() && j < fresh.plain; ++j) {
    AfterInsert(fresh.rows[static_cast<size_t>(j)]);
  }
  Unpin(evicted, rows);
  FillRows(fresh, below, initial);
  int64_t refused = std::count(fresh.rows.begin(), fresh.rows.end(), kMissingRow);
  stats_.inserts += n - refused;
  if (unadmitted) refused = 0;
  if (refused && MayExceedBudget()) {
    InsertBeyondBudget(fresh, below, initial);
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
    for (size_t j = 0; queues_ && j < fresh.rows.size(); ++j) {
      if (fresh.rows[j] == kMissingRow) continue;
      OfferVictim(fresh.hashes[j], {uses(fresh.rows[j]), fresh.keys[j]});
    }
  }
  return refused;
}

// Over a store: gives rows to the remaining newcomers, beyond the budget.
void Table::InsertBeyondBudget(Newcomers& fresh, const FetchedRows& below, const float* initial) {
  Newcomers rest;
  try {
    for (int64_t j = 0; j < fresh.size(); ++j) {
      const auto at = static_cast<size_t>(j);
      if (fresh.rows[at] != kMissingRow) continue;
      rest.first.push_back(fresh.first[at]);
      rest.number.push_back(static_cast<uint32_t>(j));
      rest.keys.push_back(fresh.keys[at]);
      rest.hashes.push_back(fresh.hashes[at]);
      rest.scores.push_back(fresh.scores[at]);
      rest.rows.push_back(rows_.Next(std::ssize(rest.rows)));
    }
    rest.aside.resize(rest.first.size(), 0);
    Order(rest);
    rest.plain = rest.size();
    rest.scratch =
        RecycledBuffer(static_cast<size_t>(FillTasks(rest.size()) * options_.dim) * sizeof(float));
    MakeRoom(index_->size() + rest.size());
    try {
      Place(rest, Eviction::kNone);
    } catch (...) {
      Undo(rest);
      throw;
    }
  } catch (...) {
    // Removes the keys of the call. Their victims are below, so nothing is lost.
    int64_t erased = 0;
    for (int64_t j = 0; j < fresh.size(); ++j) {
      const auto at = static_cast<size_t>(j);
      if (fresh.rows[at] == kMissingRow) continue;
      FreeSlot(index_->Find(fresh.keys[at], fresh.hashes[at]));
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
  FillRows(rest, below, initial);
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
