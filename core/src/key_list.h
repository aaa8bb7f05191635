// KeyList: distinct keys in the order in which they came, each with a mark.
//
// About 15 bytes a key: the keys themselves, their marks, and open-addressing tables of their
// positions that are three quarters full at most. Nothing grows as a whole: keys lie in chunks, and
// there are 64 tables of positions, so no single Add takes long however many keys there are.
//
// Thread safety: const methods may run together; any other method needs exclusive access.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "embstore/hash.h"
#include "embstore/types.h"

namespace embstore {

class KeyList {
 public:
  int64_t size() const { return size_; }
  int64_t key(int64_t at) const { return chunk(at).keys[at % kChunk]; }
  bool marked(int64_t at) const { return chunk(at).marks[at % kChunk] != 0; }
  void Mark(int64_t at) { chunk(at).marks[at % kChunk] = 1; }

  // The position of the key, or -1.
  int64_t Find(int64_t key) const {
    const uint64_t hash = Hash(key);
    const Part& part = parts_[hash >> kPartShift];
    return part.places.empty() ? -1 : int64_t{part.places[PlaceOf(key, hash, part)]} - 1;
  }

  // Appends a key that is not there yet. Throws InvalidState beyond 2^32 - 2 keys.
  void Add(int64_t key, bool marked) {
    if (size_ >= int64_t{UINT32_MAX} - 1) throw InvalidState("a list of keys can hold 2^32 - 2");
    const uint64_t hash = Hash(key);
    Part& part = parts_[hash >> kPartShift];
    if (4 * (part.used + 1) > 3 * part.places.size()) Grow(part);
    if (size_ % kChunk == 0) chunks_.push_back(std::make_unique_for_overwrite<Chunk>());
    chunk(size_).keys[size_ % kChunk] = key;
    chunk(size_).marks[size_ % kChunk] = marked;
    part.places[PlaceOf(key, hash, part)] = static_cast<uint32_t>(++size_);
    ++part.used;
  }

 private:
  static constexpr int64_t kChunk = 4096;
  static constexpr int kPartShift = 58;
  struct Chunk {
    int64_t keys[kChunk];
    uint8_t marks[kChunk];
  };
  struct Part {
    std::vector<uint32_t> places;  // position + 1; 0 is free
    size_t used = 0;
  };

  // Unknown to whoever chooses the keys, so that nobody can make them collide.
  static uint64_t Hash(int64_t key) { return KeyedHash(key, ProcessSecret()); }
  Chunk& chunk(int64_t at) const { return *chunks_[static_cast<size_t>(at / kChunk)]; }

  size_t PlaceOf(int64_t wanted, uint64_t hash, const Part& part) const {
    const size_t mask = part.places.size() - 1;
    size_t at = hash & mask;
    while (part.places[at] && key(int64_t{part.places[at]} - 1) != wanted) at = (at + 1) & mask;
    return at;
  }

  void Grow(Part& part) {
    std::vector<uint32_t> before(part.places.empty() ? 8 : 2 * part.places.size(), 0);
    part.places.swap(before);
    for (const uint32_t place : before) {
      if (place == 0) continue;
      const int64_t moved = key(int64_t{place} - 1);
      part.places[PlaceOf(moved, Hash(moved), part)] = place;
    }
  }

  int64_t size_ = 0;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::array<Part, size_t{1} << (64 - kPartShift)> parts_;
};

}  // namespace embstore
