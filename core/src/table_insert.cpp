// How missing keys get rows: room, eviction, protection of pinned rows, admission.
#include <algorithm>
#include <atomic>
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
  fresh.number.resize(missing.size());
  std::vector<uint64_t> sums;  // scores by number
  sums.reserve(missing.size());
  DistinctKeys distinct;  // the seed of the index may be known
  distinct.Reset(missing.size());
  for (size_t i = 0; i < missing.size(); ++i) {
    const auto [number, is_new] = distinct.Add(keys[missing[i]]);
    if (is_new) {
      fresh.first.push_back(missing[i]);
      sums.push_back(score);
    } else if (counts_occurrences() && !scores_gradients() && !scores) {
      sums[number] = SumOfScores(sums[number], score);
    }
    fresh.number[i] = number;
    if (scores) sums[number] = scores[missing[i]];
  }
  fresh.fetched = below.NumbersOf(fresh.first);
  if (counts_occurrences() && !scores && !below.empty()) {
    for (size_t j = 0; j < sums.size(); ++j) {
      sums[j] = SumOfScores(sums[j], fresh.FetchedRowOf(static_cast<uint32_t>(j), below).score);
    }
  }
  Order(fresh, distinct.keys(), sums);
  return fresh;
}

// Sorts the newcomers by the leading bits of their hashes, and else in the order of the batch.
void Table::Order(Newcomers& fresh, std::span<const int64_t> keys,
                  std::span<const uint64_t> scores) const {
  const size_t n = keys.size();
  constexpr int kMostBits = 14;  // so many counters stay in the caches
  const int bits = std::min(static_cast<int>(std::bit_width(n)), kMostBits);
  fresh.order_bits = bits;
  std::vector<uint32_t> ends((size_t{1} << bits) + 1, 0);
  const auto range = [&](int64_t key) {
    return static_cast<size_t>(index_->Hash(key) >> (64 - bits));
  };
  for (const int64_t key : keys) ++ends[range(key) + 1];
  for (size_t i = 1; i < ends.size(); ++i) ends[i] += ends[i - 1];
  fresh.placed.resize(n);
  fresh.place.resize(n);
  for (size_t j = 0; j < n; ++j) {
    const uint32_t to = ends[range(keys[j])]++;
    fresh.placed[to] = {keys[j], index_->Hash(keys[j]), scores[j], static_cast<uint32_t>(j),
                        kMissingRow};
    fresh.place[j] = to;
  }
  fresh.fates = std::make_unique_for_overwrite<Newcomers::Fate[]>(n);
}

// Gives the row of a slot to the newcomer at this place. A victim in the overflow area, which
// threads share, keeps its slot until all are done; nobody chooses it again, since its row is held
// now.
void Table::Evict(Slot slot, size_t place, Newcomers& fresh) {
  const IndexEntry victim = index_->entry(slot);
  if (watched()) BeforeChange(victim);
  fresh.fates[place].evicted = {victim, slot, pins_.IsHeldByOthers(victim.row)};
  if (!KeyIndex::IsAside(slot)) index_->Erase(slot);
  fresh.placed[place].row = victim.row;
  pins_.Hold(victim.row);
}

// Threads divide the work by stripes and classes, so that the keys of each are placed in one order,
// whatever the number of threads.
void Table::Place(Newcomers& fresh, Eviction eviction) {
  constexpr size_t kWorthSharing = 256;
  const size_t n = fresh.placed.size();
  const int64_t parts = n < kWorthSharing ? 1 : NumThreads();
  const int bits = std::min(PartBits(), fresh.order_bits);
  const auto unit = [&](size_t i) {
    return bits ? fresh.placed[i].hash >> (64 - bits) : uint64_t{0};
  };
  const auto begin_of = [&](int64_t part) {  // the next unit begins here, or the list ends
    size_t i = n * static_cast<size_t>(part) / static_cast<size_t>(parts);
    while (i > 0 && i < n && unit(i) == unit(i - 1)) ++i;
    return i;
  };
  const bool by_score = eviction == Eviction::kSmaller && fresh.plain < fresh.size();
  std::vector<size_t> begins;  // before anything is sorted
  for (int64_t part = 0; part <= parts; ++part) begins.push_back(begin_of(part));
  std::atomic<bool> aside{false};
  ParallelFor(parts, [&](int64_t part) {
    const size_t begin = begins[static_cast<size_t>(part)];
    const size_t end = begins[static_cast<size_t>(part) + 1];
    if (by_score) SortByScore(fresh, begin, end);
    if (PlacePart(fresh, eviction, begin, end)) aside = true;
  });
  for (size_t i = 0; by_score && i < n; ++i) {
    fresh.place[fresh.placed[i].number] = static_cast<uint32_t>(i);
  }
  if (!aside) return;
  for (size_t i = 0; i < n; ++i) {
    const Evicted& gone = fresh.fates[i].evicted;
    if (KeyIndex::IsAside(gone.slot)) index_->Erase(index_->Find(gone.entry.key));  // slots change
  }
  for (size_t j = 0; j < n; ++j) {
    bool& homeless = fresh.fates[fresh.place[j]].aside;
    if (!homeless) continue;
    const Newcomers::Newcomer& own = fresh.at(j);
    index_->InsertAside({own.key, own.score, own.row}, own.hash);
    // A queue that was filled since has not seen it.
    if (!counts_apart()) OfferVictim(own.hash, {own.score, own.key}, /*held=*/true);
    homeless = false;
  }
}

bool Table::PlacePart(Newcomers& fresh, Eviction eviction, size_t begin, size_t end) {
  // In the order in which an eviction reads them.
  constexpr size_t kHeadAhead = 40, kQueueAhead = 32, kHomeAhead = 24, kFillAhead = 16,
                   kVictimAhead = 12, kAwayAhead = 6, kInsertAhead = 16, kFreeAhead = 8, kRing = 8;
  bool is_away[kRing] = {};  // whether the victims that were peeked at last are not at home
  const auto class_at = [&](size_t i) { return ClassOf(fresh.placed[i].hash); };
  const auto evicts_at = [&](size_t i) { return i < end && fresh.placed[i].number >= fresh.plain; };
  for (size_t i = begin; i < end; ++i) fresh.fates[i] = {{}, false};  // if this throws, too
  bool aside = false;
  for (size_t i = begin; i < end; ++i) {
    if (evicts_at(i + kHeadAhead)) queues_->PrefetchHead(class_at(i + kHeadAhead));
    if (evicts_at(i + kQueueAhead)) queues_->Prefetch(class_at(i + kQueueAhead));
    if (evicts_at(i + kHomeAhead)) {
      const size_t in_class = class_at(i + kHomeAhead);
      if (const auto* next = queues_->Next(in_class)) {
        index_->PrefetchHome(index_->Hash(next->key));
      } else {
        index_->PrefetchHomes(FirstOf(in_class), LastOf(in_class));
      }
    }
    if (evicts_at(i + kFillAhead) && queues_->IsSpent(class_at(i + kFillAhead))) {
      FillQueue(class_at(i + kFillAhead));
    }
    if (evicts_at(i + kVictimAhead)) {
      if (const auto* next = queues_->Next(class_at(i + kVictimAhead))) {
        const Row row = index_->PeekRow(next->key);
        if (row != kMissingRow) pins_.Prefetch(row);
        is_away[(i + kVictimAhead) % kRing] = row == kMissingRow;
      }
    }
    if (evicts_at(i + kAwayAhead) && std::exchange(is_away[(i + kAwayAhead) % kRing], false)) {
      if (const auto* next = queues_->Next(class_at(i + kAwayAhead))) {
        const Slot slot = index_->Find(next->key);
        if (slot != kNoSlot) pins_.Prefetch(index_->row(slot));
      }
    }
    if (i + kInsertAhead < end) index_->Prefetch(fresh.placed[i + kInsertAhead].hash);
    if (i + kFreeAhead < end) index_->PrefetchFree(fresh.placed[i + kFreeAhead].hash);
    Newcomers::Newcomer& own = fresh.placed[i];
    if (own.number < fresh.plain) {
      own.row = rows_.Next(own.number);
      if (fresh.plain < fresh.size()) pins_.Hold(own.row);
    } else {
      const Slot slot =
          eviction == Eviction::kAny ? Victim(own.hash) : WeakerThan(own.score, own.hash);
      if (slot == kNoSlot) continue;
      Evict(slot, i, fresh);
      aside |= KeyIndex::IsAside(slot);
    }
    if (!counts_apart()) OfferVictim(own.hash, {own.score, own.key}, /*held=*/true);
    if (index_->Insert({own.key, own.score, own.row}, own.hash)) continue;
    aside = fresh.fates[i].aside = true;
  }
  return aside;
}

// Undoes Place. Rows have not been touched, so only the index has to be restored.
void Table::Undo(Newcomers& fresh) {
  const size_t n = fresh.placed.size();
  for (size_t i = 0; i < n; ++i) {
    const Newcomers::Newcomer& own = fresh.placed[i];
    if (own.row == kMissingRow || fresh.fates[i].aside) continue;
    const Slot slot = index_->Find(own.key, own.hash);
    if (slot != kNoSlot) index_->Erase(slot);
  }
  for (size_t i = 0; i < n; ++i) {
    const auto& [entry, slot, pinned] = fresh.fates[i].evicted;
    if (slot == kNoSlot) continue;
    if (KeyIndex::IsAside(slot) && index_->Find(entry.key) != kNoSlot) continue;  // still there
    index_->PutBack(slot, entry);
  }
  ForgetVictims();  // those that were chosen are in no queue any more
}

void Table::FillRows(Newcomers& fresh, const FetchedRows& below, const float* initial) {
  ParallelFor(FillTasks(fresh.size()), [&](int64_t task) {
    const auto end = static_cast<size_t>(std::min((task + 1) * kRowsPerFill, fresh.size()));
    float* const scratch = fresh.scratch.as<float>() + task * options_.dim;
    int64_t fetched = 0;
    for (auto i = static_cast<size_t>(task * kRowsPerFill); i < end; ++i) {
      constexpr size_t kAhead = 24;
      if (const Row next = i + kAhead < end ? fresh.placed[i + kAhead].row : kMissingRow;
          next >= 0) {
        const std::byte* const row = rows_.at(next);
        for (int64_t byte = 0; byte < row_stride_; byte += 64) __builtin_prefetch(row + byte, 1);
        const std::byte* const from =
            fresh.FetchedRowOf(fresh.placed[i + kAhead].number, below).data;
        for (int64_t byte = 0; from && byte < row_stride_; byte += 64) {
          __builtin_prefetch(from + byte);
        }
      }
      const Newcomers::Newcomer& own = fresh.placed[i];
      if (own.row == kMissingRow) continue;
      const FetchedRow from = fresh.FetchedRowOf(own.number, below);
      FillRow(own.row, own.key, from,
              initial ? initial + fresh.first[own.number] * options_.dim : nullptr, scratch);
      fetched += from.data != nullptr;
    }
    if (fetched) below_.CountFetches(fetched);
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
                             BatchScore score, const float* initial,
                             std::vector<uint32_t>& unadmitted) {
  if (missing.empty()) return 0;
  return InsertMissing(keys, rows, missing, score, nullptr, Fetch(keys, missing), initial,
                       options_.admit_by_frequency ? &unadmitted : nullptr);
}

int64_t Table::InsertMissing(const int64_t* keys, Row* rows, std::span<const uint32_t> missing,
                             BatchScore score, const uint64_t* scores, const FetchedRows& below,
                             const float* initial, std::vector<uint32_t>* unadmitted) {
  if (missing.empty()) return 0;
  if (snapshot_) snapshot_->PreserveBelow(keys, missing, below);
  // Whatever may run out of memory comes first, or can be undone.
  Newcomers fresh = Distinct(keys, missing, score.score, scores, below);
  const int64_t n = fresh.size(), size = index_->size();
  fresh.plain = std::clamp<int64_t>(row_limit_ - size, 0, n);
  if (fresh.plain < n && !evicts()) {
    throw OutOfMemory("table '" + options_.name +
                      "' has as many rows as there can be: " + std::to_string(size));
  }
  fresh.scratch = RecycledBuffer(static_cast<size_t>(FillTasks(n) * options_.dim) * sizeof(float));
  MakeRoom(size + fresh.plain);
  if (fresh.plain < n) {
    if (!queues_) queues_.emplace(class_bits_);
    pins_.BeginBatch(rows, row_capacity_, LeastScoreOfHit(score));
    queues_->BeginCall();
  }
  if (unadmitted) Recall(fresh);
  std::vector<Evicted> evicted;
  try {
    Place(fresh, unadmitted ? Eviction::kSmaller : Eviction::kAny);
    for (int64_t j = fresh.plain; j < n; ++j) {
      const Evicted& gone = fresh.fates[fresh.place[static_cast<size_t>(j)]].evicted;
      if (gone.slot != kNoSlot) evicted.push_back(gone);
    }
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
    AfterInsert(fresh.at(static_cast<size_t>(j)).row);
  }
  Unpin(evicted, rows);
  FillRows(fresh, below, initial);
  int64_t refused = n - fresh.plain - std::ssize(evicted);
  stats_.inserts += n - refused;
  if (unadmitted) refused = 0;
  if (refused && MayExceedBudget()) {
    InsertBeyondBudget(fresh, below, initial);
    refused = 0;
  }
  stats_.refusals += refused;
  constexpr size_t kOccurrencesPerTask = 4096;
  const size_t tasks = (missing.size() + kOccurrencesPerTask - 1) / kOccurrencesPerTask;
  ParallelFor(static_cast<int64_t>(tasks), [&](int64_t task) {
    const size_t begin = static_cast<size_t>(task) * kOccurrencesPerTask;
    const size_t end = std::min(begin + kOccurrencesPerTask, missing.size());
    for (size_t i = begin; i < end; ++i) rows[missing[i]] = fresh.at(fresh.number[i]).row;
  });
  for (size_t i = 0; unadmitted && i < missing.size(); ++i) {
    if (rows[missing[i]] != kMissingRow) continue;
    unadmitted->push_back(missing[i]);
    ++stats_.unadmitted;
  }
  if (counts_apart()) {
    for (const auto& own : fresh.placed) {
      if (own.row != kMissingRow) uses_[static_cast<size_t>(own.row)] = 0;
    }
    for (const uint32_t i : missing) CountUses(rows + i, 1);
    for (const auto& own : fresh.placed) {
      if (queues_ && own.row != kMissingRow) OfferVictim(own.hash, {uses(own.row), own.key});
    }
  }
  return refused;
}

// Over a store: gives rows to the remaining newcomers, beyond the budget.
void Table::InsertBeyondBudget(Newcomers& fresh, const FetchedRows& below, const float* initial) {
  Newcomers rest;
  try {
    std::vector<int64_t> keys;
    std::vector<uint64_t> scores;
    for (size_t j = 0; j < fresh.first.size(); ++j) {
      const Newcomers::Newcomer& own = fresh.at(j);
      if (own.row != kMissingRow) continue;
      rest.first.push_back(fresh.first[j]);
      rest.number.push_back(own.number);
      keys.push_back(own.key);
      scores.push_back(own.score);
    }
    rest.fetched = below.NumbersOf(rest.first);
    Order(rest, keys, scores);
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
    for (const auto& own : fresh.placed) {
      if (own.row == kMissingRow) continue;
      FreeSlot(index_->Find(own.key, own.hash));
      ++erased;
    }
    index_->AddSize(-erased);
    throw;
  }
  rows_.Take(rest.size());
  index_->AddSize(rest.size());
  for (size_t j = 0; j < rest.number.size(); ++j) {
    AfterInsert(rest.at(j).row);
    fresh.at(rest.number[j]).row = rest.at(j).row;
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
