// How rows that were not used for a while leave a table, and the store below it.
#include <algorithm>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_set>
#include <vector>

#include "embstore/table.h"

namespace embstore {
namespace {

constexpr int64_t kRowsAtOnce = 16384;
// A sweep visits every row, so it comes eight times in a lifetime and not with every batch.
constexpr uint64_t kSweepsPerLifetime = 8;

}  // namespace

int64_t Table::Expire(uint64_t min_score) {
  std::unique_lock guard(lock_);
  RequireOpen();
  return Sweep(min_score);
}

int64_t Table::Sweep(uint64_t min_score) {
  std::vector<int64_t> old = OldKeys(min_score);
  int64_t expired = 0;
  for (size_t begin = 0; begin < old.size(); begin += kRowsAtOnce) {
    const size_t n = std::min<size_t>(kRowsAtOnce, old.size() - begin);
    const int64_t erased = EraseLocked({old.data() + begin, n});
    stats_.expired += erased;
    expired += erased;
  }
  return expired;
}

// The keys whose last use, here or below, has a smaller score; sorted, so that free rows do not
// depend on where the index keeps a key.
std::vector<int64_t> Table::OldKeys(uint64_t min_score) const {
  std::vector<int64_t> old;
  std::unordered_set<int64_t> unused;  // brought up by a Prefetch: only the store knows their score
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    if (entry.score >= min_score) return;
    if (below_.exists() && entry.score == kUnusedScore) {
      unused.insert(entry.key);
    } else {
      old.push_back(entry.key);
    }
  });
  const auto scanner = below_.exists() ? below_.store().Scan() : nullptr;
  StoredRows block;
  const auto next = [&] {
    if (scanner) scanner->Next(kRowsAtOnce, block);
  };
  for (next(); !block.keys.empty(); next()) {
    for (size_t i = 0; i < block.keys.size(); ++i) {
      const int64_t key = block.keys[i];
      const bool is_old = block.scores[i] < min_score;
      if (unused.contains(key)) {
        if (!is_old) unused.erase(key);
      } else if (is_old && index_->Find(key) == kNoSlot) {
        old.push_back(key);
      }
    }
  }
  old.insert(old.end(), unused.begin(), unused.end());
  std::sort(old.begin(), old.end());
  return old;
}

uint64_t Table::SweepOf(uint64_t now) const {
  if (options_.ttl == 0 || now <= options_.ttl) return 0;
  return now / std::max<uint64_t>(options_.ttl / kSweepsPerLifetime, 1);
}

void Table::ExpireOld(uint64_t now) {
  const uint64_t sweep = SweepOf(now);
  if (sweep == 0) return;
  expired_below_ = now - options_.ttl;
  if (counts_apart()) ForgetVictims();  // what has expired is worth less
  if (sweep == swept_) return;
  Sweep(expired_below_);
  swept_ = sweep;  // last: a store that fails is asked again
}

}  // namespace embstore
