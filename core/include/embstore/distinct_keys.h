// DistinctKeys numbers distinct keys from 0, in the order of their first occurrence.
//
//     Add       7  -1   7  12
//     number    0   1   0   2          keys()  7  -1  12
//
// Thread safety: const methods may run together; any other method needs exclusive access.
//
// Invariants
//  1. keys() holds each key once; the number of a key is its position there.
//  2. At most three quarters of places_ are in use, so a search ends.
//
// Places come from a secret of the process: nobody can choose keys that collide, not even with the
// seed of a table, and numbers do not depend on it.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "embstore/hash.h"
#include "embstore/types.h"

namespace embstore {

class DistinctKeys {
 public:
  struct Added {
    uint32_t number;
    bool is_new;
  };

  // Forgets all keys and makes room for `expected` of them.
  void Reset(size_t expected) {
    keys_.clear();
    places_.assign(std::bit_ceil(std::max<size_t>(2 * expected, 16)), 0);
    keys_.reserve(expected);
    SetRoom();
  }

  // The number of the key, which is added if it is new. Throws InvalidState beyond 2^32 - 2 keys.
  Added Add(int64_t key) {
    if (keys_.size() >= room_) [[unlikely]]
      Grow();
    uint32_t& place = places_[PlaceOf(key)];
    if (place) return {place - 1, false};
    keys_.push_back(key);
    place = static_cast<uint32_t>(keys_.size());
    return {place - 1, true};
  }

  // The number of the key, or -1.
  int64_t Find(int64_t key) const {
    if (keys_.empty()) return -1;
    return int64_t{places_[PlaceOf(key)]} - 1;
  }

  const std::vector<int64_t>& keys() const { return keys_; }
  std::vector<int64_t> TakeKeys() { return std::move(keys_); }  // then only Reset
  size_t size() const { return keys_.size(); }
  bool empty() const { return keys_.empty(); }
  // The most places that a search for one of the keys looks at.
  size_t LongestSearch() const {
    const size_t mask = places_.size() - 1;
    size_t longest = 0;
    for (const int64_t key : keys_) {
      longest = std::max(longest, ((PlaceOf(key) - KeyedHash(key, secret_)) & mask) + 1);
    }
    return longest;
  }

 private:
  size_t PlaceOf(int64_t key) const {
    const size_t mask = places_.size() - 1;
    size_t at = KeyedHash(key, secret_) & mask;
    while (places_[at] && keys_[places_[at] - 1] != key) at = (at + 1) & mask;
    return at;
  }

  void Grow() {
    if (keys_.size() >= UINT32_MAX - 1) throw InvalidState("a list of keys can hold 2^32 - 2");
    std::vector<uint32_t> larger(std::max<size_t>(2 * places_.size(), 64), 0);
    places_.swap(larger);
    SetRoom();
    for (size_t i = 0; i < keys_.size(); ++i) {
      places_[PlaceOf(keys_[i])] = static_cast<uint32_t>(i + 1);
    }
  }

  void SetRoom() { room_ = std::min<size_t>(places_.size() / 4 * 3, UINT32_MAX - 1); }

  HashSecret secret_ = ProcessSecret();
  std::vector<int64_t> keys_;
  std::vector<uint32_t> places_;  // number + 1; 0 is free
  size_t room_ = 0;               // keys that fit without growing
};

// Sorts the keys and drops repetitions.
inline void SortDistinct(std::vector<int64_t>& keys) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
}

}  // namespace embstore
