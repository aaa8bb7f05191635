#include "embstore/victim_queues.h"

#include <algorithm>
#include <cassert>

namespace embstore {

void VictimQueues::Forget() { std::fill(counts_.begin(), counts_.end(), kUnknown); }

void VictimQueues::Fill(size_t in_class, std::span<Candidate> all, bool none_left_out) {
  const auto less = [](const Candidate& a, const Candidate& b) { return a.rank < b.rank; };
  const auto kept = std::min<std::ptrdiff_t>(std::ssize(all), kEntries);
  std::partial_sort(all.begin(), all.begin() + kept, all.end(), less);
  Queue& queue = this->queue(in_class);
  for (std::ptrdiff_t i = 0; i < kept; ++i) {
    const Candidate& next = all[static_cast<size_t>(i)];
    queue.entries[kept - 1 - i] = {next.rank.worth, next.key};
  }
  if (none_left_out && kept == std::ssize(all)) {
    queue.bound = kNoBound;
  } else {
    queue.bound = kept ? all[static_cast<size_t>(kept - 1)].rank : Rank{};
  }
  counts_[in_class] = static_cast<uint8_t>(kept);
  SetHeld(in_class, 0);
}

void VictimQueues::Remove(size_t in_class, int at) {
  uint8_t& count = counts_[in_class];
  assert(at >= 0 && at < count && count != kUnknown);
  Entry* const entries = queue(in_class).entries;
  if (at >= count - held(in_class)) SetHeld(in_class, held(in_class) - 1);
  std::copy(entries + at + 1, entries + count, entries + at);
  --count;
}

bool VictimQueues::Offer(size_t in_class, const Entry& entry, bool held) {
  uint8_t& count = counts_[in_class];
  Queue& queue = this->queue(in_class);
  const Rank rank = RankOf(entry);
  if (rank > queue.bound) return false;
  int at = count;  // the first that ranks below, which are at the end
  while (at > 0 && RankOf(queue.entries[at - 1]) < rank) --at;
  if (at > 0 && RankOf(queue.entries[at - 1]) == rank) return true;  // the same key once more
  const int after = count - at;                                      // entries that rank below
  if (count == kEntries && at == 0) {
    queue.bound = RankOf(queue.entries[0]);
    return false;
  }
  if (after < this->held(in_class)) {
    SetHeld(in_class, held ? std::min(this->held(in_class) + 1, kEntries) : after);
  }
  if (count == kEntries) {  // the largest goes
    std::copy(queue.entries + 1, queue.entries + at, queue.entries);
    queue.entries[at - 1] = entry;
    queue.bound = RankOf(queue.entries[0]);
    return true;
  }
  std::copy_backward(queue.entries + at, queue.entries + count, queue.entries + count + 1);
  queue.entries[at] = entry;
  ++count;
  return true;
}

}  // namespace embstore
