// KeyList: distinct keys in the order in which they were added, each with a mark. About 15 bytes a
// key.
//
// Thread safety: const methods may run together; any other method needs exclusive access.
#pragma once

#include <cstdint>
#include <vector>

#include "embstore/distinct_keys.h"

namespace embstore {

class KeyList {
 public:
  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  int64_t key(int64_t at) const { return keys_.keys()[static_cast<size_t>(at)]; }
  bool marked(int64_t at) const { return marks_[static_cast<size_t>(at)] != 0; }
  void Mark(int64_t at) { marks_[static_cast<size_t>(at)] = 1; }

  // The position of the key, or -1.
  int64_t Find(int64_t key) const { return keys_.Find(key); }

  // Appends a key that is not there yet. Throws InvalidState beyond 2^32 - 2 keys.
  void Add(int64_t key, bool marked) {
    marks_.push_back(marked);
    try {
      keys_.Add(key);
    } catch (...) {
      marks_.pop_back();
      throw;
    }
  }

 private:
  DistinctKeys keys_;
  std::vector<uint8_t> marks_;
};

}  // namespace embstore
