// KeyList: distinct keys in the order in which they came, each with a mark.
//
// About 15 bytes a key: the keys themselves, their marks, and an open-addressing table of their
// positions that is three quarters full at most.
//
// Thread safety: const methods may run together; any other method needs exclusive access.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "embstore/hash.h"
#include "embstore/types.h"

namespace embstore {

class KeyList {
 public:
  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  int64_t key(int64_t at) const { return keys_[static_cast<size_t>(at)]; }
  bool marked(int64_t at) const { return marks_[static_cast<size_t>(at)] != 0; }
  void Mark(int64_t at) { marks_[static_cast<size_t>(at)] = 1; }

  // The position of the key, or -1.
  int64_t Find(int64_t key) const {
    if (places_.empty()) return -1;
    const uint32_t place = places_[PlaceOf(key)];
    return place == 0 ? -1 : int64_t{place} - 1;
  }

  // Appends a key that is not there yet. Throws InvalidState beyond 2^32 - 2 keys.
  void Add(int64_t key, bool marked) {
    if (4 * (keys_.size() + 1) > 3 * places_.size()) Grow();
    if (keys_.size() >= UINT32_MAX - 1) throw InvalidState("a list of keys can hold 2^32 - 2");
    keys_.push_back(key);
    marks_.push_back(marked);
    places_[PlaceOf(key)] = static_cast<uint32_t>(keys_.size());
  }

 private:
  size_t PlaceOf(int64_t key) const {
    const size_t mask = places_.size() - 1;
    size_t at = HashKey(key ^ salt_) & mask;
    while (places_[at] && keys_[places_[at] - 1] != key) at = (at + 1) & mask;
    return at;
  }

  void Grow() {
    std::vector<uint32_t> larger(places_.empty() ? 64 : 2 * places_.size(), 0);
    places_.swap(larger);
    for (size_t i = 0; i < keys_.size(); ++i) {
      places_[PlaceOf(keys_[i])] = static_cast<uint32_t>(i + 1);
    }
  }

  // Unknown to whoever chooses the keys, so that nobody can make them collide.
  const int64_t salt_ = static_cast<int64_t>(std::random_device{}()) << 32 | std::random_device{}();
  std::vector<int64_t> keys_;
  std::vector<uint8_t> marks_;
  std::vector<uint32_t> places_;  // position + 1; 0 is free
};

}  // namespace embstore
