#include "embstore/victim_queues.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace embstore {

void VictimQueues::Forget() { std::fill(counts_.begin(), counts_.end(), kUnknown); }

// Moves the smallest to the front: at least kEntries, as a rule not many more. Without branches on
// the worths, which the processor could not predict.
std::span<VictimQueues::Entry> VictimQueues::Smallest(std::span<Entry> all) {
  uint64_t least = UINT64_MAX, most = 0;
  for (const Entry& entry : all) {
    least = std::min(least, entry.worth);
    most = std::max(most, entry.worth);
  }
  constexpr int kBits = 6;
  const int shift = std::max(static_cast<int>(std::bit_width(most - least)) - kBits, 0);
  const auto bin_of = [&](const Entry& entry) { return (entry.worth - least) >> shift; };
  uint32_t counts[1 << kBits] = {};
  for (const Entry& entry : all) ++counts[bin_of(entry)];
  size_t last = 0;
  for (uint32_t count = counts[0]; count < kEntries;) count += counts[++last];
  size_t n = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const Entry entry = all[i];
    all[n] = entry;
    n += bin_of(entry) <= last;
  }
  return all.first(n);
}

void VictimQueues::Fill(size_t in_class, std::span<Entry> all, bool none_left_out) {
  const size_t kept = std::min(all.size(), size_t{kEntries});
  const bool complete = none_left_out && kept == all.size();
  if (kept < all.size()) all = Smallest(all);
  constexpr size_t kWorthSelecting = 2 * kEntries;
  if (all.size() > kWorthSelecting) {
    std::nth_element(all.begin(), all.begin() + kEntries, all.end(), RanksBelow);
    all = all.first(kept);
  }
  std::sort(all.begin(), all.end(), RanksBelow);
  Queue& queue = this->queue(in_class);
  std::reverse_copy(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(kept), queue.entries);
  queue.bound = complete ? kNoBound : kept ? RankOf(all[kept - 1]) : Rank{};
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
