// The overflow area of a KeyIndex: keys whose stripe has no room.
//
// Entries are a dense list, so that the order in which they are visited does not depend on the
// secret; places, an open addressing table keyed by it, say where in the list a key is. Chains hold
// the entries of equal ranges of hashes of the index, so that the keys of a few stripes are found
// without a look at all others.
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
  overflow_links_.reserve(wanted);
  if (2 * entries <= std::ssize(overflow_places_)) return;
  std::vector<uint32_t> chains(wanted, 0);
  overflow_places_ = std::vector<uint32_t>(4 * wanted, 0);
  overflow_chains_ = std::move(chains);
  for (size_t i = 0; i < overflow_.size(); ++i) {
    overflow_places_[OverflowPlace(overflow_[i].key)] = static_cast<uint32_t>(i + 1);
    Chain(i);
  }
}

// Makes an entry the first of its chain.
void KeyIndex::Chain(size_t number) {
  uint32_t& first = overflow_chains_[ChainOf(Hash(overflow_[number].key))];
  overflow_links_[number] = {0, first};
  if (first) overflow_links_[first - 1].before = static_cast<uint32_t>(number + 1);
  first = static_cast<uint32_t>(number + 1);
}

// Lets the neighbours of an entry in its chain name `to` (a number + 1) and `back` instead of it.
void KeyIndex::Rechain(size_t number, uint32_t to, uint32_t back) {
  const auto [before, next] = overflow_links_[number];
  (before ? overflow_links_[before - 1].next
          : overflow_chains_[ChainOf(Hash(overflow_[number].key))]) = to;
  if (next) overflow_links_[next - 1].before = back;
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
  overflow_links_.emplace_back();
  overflow_places_[place] = static_cast<uint32_t>(overflow_.size());
  Chain(overflow_.size() - 1);
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
  Rechain(number, overflow_links_[number].next, overflow_links_[number].before);
  if (number + 1 < overflow_.size()) {
    const auto moved = static_cast<uint32_t>(number + 1);
    Rechain(overflow_.size() - 1, moved, moved);
    overflow_places_[OverflowPlace(overflow_.back().key)] = moved;
    overflow_[number] = overflow_.back();
    overflow_links_[number] = overflow_links_.back();
  }
  overflow_.pop_back();
  overflow_links_.pop_back();
}

}  // namespace embstore
