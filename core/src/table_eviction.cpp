// Which rows a full table gives up for newcomers, and what becomes of those that go.
#include <algorithm>
#include <bit>

#include "embstore/parallel.h"
#include "embstore/table.h"
#include "newcomers.h"

namespace embstore {
namespace {

// Keys of a range of hashes compete for the same rows: one of 2^bits equal ranges. It has so few
// keys that the one to give up is found quickly. A newcomer also looks at another range of its
// block, so that ranges where many keys are in use take rows of others. A small table is one range.
// Ranges depend on the options only, so a table that was dumped and loaded makes the same choices.
constexpr uint64_t kBlockRanges = 16;

int RangeBits(int64_t max_capacity) {
  constexpr int64_t kKeys = 16;
  if (max_capacity <= kSmallTable) return 0;
  return std::bit_width(static_cast<uint64_t>(max_capacity / kKeys)) - 1;
}

}  // namespace

struct Table::Challenger {
  uint64_t range, score;
  int64_t newcomer;
};

// A row that may go.
struct Table::Candidate {
  uint64_t worth;
  int64_t key;
  Slot slot;
};

// Newcomers of one range in the order in which they choose, and the hashes of their rows: two
// ranges of equal width, or twice the same.
struct Table::Round {
  std::span<const Challenger> challengers;
  uint64_t first, second, width;
};

void Table::EvictFor(Newcomers& fresh, bool must_win) {
  std::vector<Challenger> all;
  all.reserve(static_cast<size_t>(fresh.size() - fresh.plain));
  const int bits = RangeBits(row_limit_);
  for (int64_t j = fresh.plain; j < fresh.size(); ++j) {
    const uint64_t hash = fresh.hashes[static_cast<size_t>(j)];
    all.push_back({bits ? hash >> (64 - bits) : 0, fresh.scores[static_cast<size_t>(j)], j});
  }
  if (all.empty()) return;
  // The most frequent first; ties in the order of the batch.
  std::sort(all.begin(), all.end(), [&](const Challenger& a, const Challenger& b) {
    if (a.range != b.range) return a.range < b.range;
    if (must_win && a.score != b.score) return a.score > b.score;
    return a.newcomer < b.newcomer;
  });
  std::vector<Round> rounds;
  const uint64_t width = bits ? uint64_t{1} << (64 - bits) : 0;
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    while (end < all.size() && all[end].range == all[begin].range) ++end;
    const uint64_t range = all[begin].range;
    const uint64_t hash = fresh.hashes[static_cast<size_t>(all[begin].newcomer)];
    const uint64_t step = bits ? 1 + (hash & 0xffff) % (kBlockRanges - 1) : 0;
    const uint64_t other = range / kBlockRanges * kBlockRanges + (range + step) % kBlockRanges;
    rounds.push_back({{all.data() + begin, end - begin}, range * width, other * width, width});
  }
  // Threads get whole stripes and blocks. The overflow area belongs to all of them.
  std::vector<size_t> tasks = {0};
  constexpr size_t kWorthSharing = 64;
  for (size_t i = kWorthSharing; i < rounds.size() && index_->overflow_size() == 0; ++i) {
    if (i - tasks.back() < kWorthSharing) continue;
    const auto block = [&](size_t at) { return rounds[at].challengers[0].range / kBlockRanges; };
    if (block(i) == block(i - 1)) continue;
    if (index_->StripeOf(rounds[i].first) == index_->StripeOf(rounds[i - 1].first)) continue;
    tasks.push_back(i);
  }
  tasks.push_back(rounds.size());

  // Most rows that go were not used for long: a score tells that they are in no live batch. The
  // rows of live batches are stamped only if that is not enough.
  std::vector<uint8_t> decided(rounds.size(), 0);
  if (fresh.batch_score <= 1) StampRows(fresh);
  for (;;) {
    ParallelFor(std::ssize(tasks) - 1, [&](int64_t task) {
      std::vector<Candidate> candidates;
      const size_t end = tasks[static_cast<size_t>(task) + 1];
      for (size_t i = tasks[static_cast<size_t>(task)]; i < end; ++i) {
        constexpr size_t kAhead = 3;
        if (i + kAhead < end) {
          const Round& next = rounds[i + kAhead];
          index_->PrefetchHashes(next.first, next.first + (next.width - 1));
          index_->PrefetchHashes(next.second, next.second + (next.width - 1));
        }
        if (!decided[i]) decided[i] = Decide(rounds[i], fresh, must_win, candidates);
      }
    });
    if (std::find(decided.begin(), decided.end(), 0) == decided.end()) return;
    StampRows(fresh);
  }
}

void Table::StampRows(Newcomers& fresh) {
  if (fresh.stamped) return;
  pins_.BeginBatch(fresh.batch, row_capacity_);
  for (const Row row : fresh.rows) {
    if (row != kMissingRow) pins_.Hold(row);
  }
  fresh.stamped = true;
}

// Evicts the rows of the least worth that are not in live batches, ties by HashKey, until the
// challengers or the rows come to an end. False, and nothing changes, if that cannot be told before
// StampRows.
bool Table::Decide(const Round& round, Newcomers& fresh, bool must_win,
                   std::vector<Candidate>& candidates) {
  // The largest score that may go.
  uint64_t limit = must_win ? round.challengers.front().score - 1 : UINT64_MAX;
  const bool one = round.challengers.size() == 1, by_score = !counts_apart() && expired_below_ == 0;
  bool unknown = false;
  candidates.clear();
  const auto goes_first = [](const Candidate& a, const Candidate& b) {
    return a.worth != b.worth ? a.worth < b.worth : HashKey(a.key) < HashKey(b.key);
  };
  const auto wanted = [&](uint64_t score) { return score <= limit; };
  const auto visit = [&](Slot slot, const IndexEntry& entry) {
    if (fresh.stamped ? pins_.IsHeld(entry.row) : entry.score >= fresh.batch_score) {
      unknown |= !fresh.stamped;
      return;
    }
    const Candidate candidate{Worth(entry), entry.key, slot};
    if (!one || candidates.empty()) {
      candidates.push_back(candidate);
    } else if (goes_first(candidate, candidates[0])) {
      candidates[0] = candidate;
    }
    if (one && by_score) limit = candidates[0].worth;
  };
  index_->VisitHashes(round.first, round.first + (round.width - 1), wanted, visit);
  if (round.second != round.first) {
    index_->VisitHashes(round.second, round.second + (round.width - 1), wanted, visit);
  }
  const auto count = std::min(candidates.size(), round.challengers.size());
  if (unknown && count < round.challengers.size()) return false;
  const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(count);
  std::nth_element(candidates.begin(), end, candidates.end(), goes_first);
  std::sort(candidates.begin(), end, goes_first);
  for (size_t i = 0; i < count; ++i) {
    const Candidate& loser = candidates[i];
    if (must_win && round.challengers[i].score <= loser.worth) break;
    // Other slots of the overflow area may have changed.
    Evict(loser.slot < kFirstOverflowSlot ? loser.slot : index_->Find(loser.key),
          round.challengers[i].newcomer, fresh);
  }
  return true;
}

// The slot to give up for this key where its round had none, or kNoSlot. Rows of other live batches
// go last, since their gradients are lost; over a store the table grows instead.
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
  fresh.evicted[static_cast<size_t>(newcomer - fresh.plain)] = {
      victim, slot, fresh.stamped && pins_.IsHeldByOthers(victim.row)};
  index_->Erase(slot);
  fresh.rows[static_cast<size_t>(newcomer)] = victim.row;
  if (fresh.stamped) pins_.Hold(victim.row);
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
