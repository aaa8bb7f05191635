#include "embstore/victim_queues.h"

#include <algorithm>
#include <cassert>

namespace embstore {

void VictimQueues::Candidates::MakeRoom(int64_t more) {
  if (count + more <= kMostCandidates) return;
  constexpr int64_t kKept = kEntries + 1;  // one more than a queue has: so it is not complete
  ActiveKernels().smallest(worths, keys, count, kKept);
  most = worths[kKept - 1];
  count = kKept;
}

void VictimQueues::Fill(size_t in_class, Candidates& all, bool none_left_out) {
  const int64_t kept = std::min<int64_t>(all.count, kEntries);
  const bool complete = none_left_out && kept == all.count;
  ActiveKernels().smallest(all.worths, all.keys, all.count, kept);
  Queue& queue = this->queue(in_class);
  for (int64_t i = 0; i < kept; ++i) {
    queue.entries[kept - 1 - i] = {all.worths[i], all.keys[i]};
  }
  queue.bound = complete ? kNoBound : kept ? RankOf(queue.entries[0]) : Rank{};
  queue.count = static_cast<int16_t>(kept);
  queue.knowledge = knowledge_;
  SetHeld(in_class, 0);
}

void VictimQueues::Remove(size_t in_class, int at) {
  assert(IsKnown(in_class));
  Queue& queue = this->queue(in_class);
  assert(at >= 0 && at < queue.count - held(in_class));
  std::copy(queue.entries + at + 1, queue.entries + queue.count, queue.entries + at);
  --queue.count;
}

bool VictimQueues::Offer(size_t in_class, const Entry& entry, bool held) {
  Queue& queue = this->queue(in_class);
  int16_t& count = queue.count;
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
