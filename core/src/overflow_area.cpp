// The overflow area of a KeyIndex: keys whose stripe has no room.
//
// Entries are a dense list, so that the order in which they are visited does not depend on the
// secret; places, an open addressing table keyed by it, say where in the list a key is.
#include <algorithm>
#include <bit>
#include <string>

#include "embstore/key_index.h"

namespace embstore {

void KeyIndex::InsertAside(const IndexEntry& entry, uint64_t hash) {
  ReserveOverflow(overflow_size() + 1);
  PutAside(entry);
  CountElsewhere(groups(), LayoutAt(hash), hash);
}

void KeyIndex::ReserveOverflow(int64_t entries) {
  if (entries > kMostOverflowEntries) {
    throw OutOfMemory("an index finds no place for more than " +
                      std::to_string(kMostOverflowEntries) +
                      " keys that collide: give the table a seed that nobody knows");
  }
  const auto wanted = std::bit_ceil(static_cast<size_t>(std::max<int64_t>(entries, 8)));
  overflow_.reserve(wanted);
  if (2 * entries <= std::ssize(overflow_places_)) return;
  overflow_places_ = std::vector<uint32_t>(4 * wanted, 0);
  for (size_t i = 0; i < overflow_.size(); ++i) {
    overflow_places_[OverflowPlace(overflow_[i].key)] = static_cast<uint32_t>(i + 1);
  }
}

size_t KeyIndex::OverflowPlace(int64_t key) const {
  const size_t mask = overflow_places_.size() - 1;
  size_t at = OverflowHome(key);
  while (overflow_places_[at] && overflow_[overflow_places_[at] - 1].key != key) {
    at = (at + 1) & mask;
  }
  return at;
}

int64_t KeyIndex::LongestOverflowSearch() const {
  size_t longest = 0;
  for (const OverflowEntry& e : overflow_) {
    const size_t steps = OverflowPlace(e.key) - OverflowHome(e.key);
    longest = std::max(longest, (steps & (overflow_places_.size() - 1)) + 1);
  }
  return static_cast<int64_t>(longest);
}

void KeyIndex::PutAside(const IndexEntry& entry) {
  const size_t place = OverflowPlace(entry.key);
  overflow_.push_back({entry.key, entry.score, entry.row});
  overflow_places_[place] = static_cast<uint32_t>(overflow_.size());
}

// The last entry takes the number of the one that goes.
void KeyIndex::EraseAside(Slot slot) {
  const auto number = static_cast<size_t>(slot - kFirstOverflowSlot);
  const size_t mask = overflow_places_.size() - 1;
  size_t hole = OverflowPlace(overflow_[number].key);
  // Later places move back into the hole unless that would put them before their home.
  for (size_t at = (hole + 1) & mask; overflow_places_[at]; at = (at + 1) & mask) {
    const size_t home = OverflowHome(overflow_[overflow_places_[at] - 1].key);
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    overflow_places_[hole] = overflow_places_[at];
    hole = at;
  }
  overflow_places_[hole] = 0;
  if (number + 1 < overflow_.size()) {
    overflow_places_[OverflowPlace(overflow_.back().key)] = static_cast<uint32_t>(number + 1);
    overflow_[number] = overflow_.back();
  }
  overflow_.pop_back();
}

}  // namespace embstore
