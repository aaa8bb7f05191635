// Rows of the store below a table, fetched in one batch for the keys that the table does not hold.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "embstore/hash.h"
#include "embstore/memory.h"
#include "embstore/store.h"

namespace embstore {

class FetchedRows {
 public:
  struct Row {
    const std::byte* data = nullptr;  // null: the key is not below
    uint64_t score = 0;               // 0 where scores were not asked for
  };

  FetchedRows() = default;  // finds nothing

  // Gets keys[i] for every i of `wanted`, each key once. Throws what the store throws.
  FetchedRows(const Store& store, const int64_t* keys, std::span<const uint32_t> wanted,
              bool with_scores)
      : row_bytes_(store.row_bytes()) {
    // Open addressing over the distinct keys, half full at most; 0 is a free place.
    places_.assign(std::bit_ceil(2 * wanted.size() + 2), 0);
    for (uint32_t i : wanted) {
      uint32_t& place = Place(keys[i]);
      if (place) continue;
      keys_.push_back(keys[i]);
      place = static_cast<uint32_t>(keys_.size());
    }
    rows_ = PooledBuffer(keys_.size() * static_cast<size_t>(row_bytes_));
    if (with_scores) scores_.resize(keys_.size());
    found_.resize(keys_.size());
    store.Get(keys_, rows_.as<std::byte>(), with_scores ? scores_.data() : nullptr, found_.data());
  }

  Row Find(int64_t key) const {
    if (keys_.empty()) return {};
    const uint32_t place = const_cast<FetchedRows*>(this)->Place(key);
    if (place == 0 || !found_[place - 1]) return {};
    return {rows_.as<std::byte>() + (place - 1) * row_bytes_,
            scores_.empty() ? 0 : scores_[place - 1]};
  }

  std::span<const int64_t> keys() const { return keys_; }
  bool has_scores() const { return keys_.empty() || !scores_.empty(); }

 private:
  uint32_t& Place(int64_t key) {
    const size_t mask = places_.size() - 1;
    size_t at = KeyedHash(key, ProcessSecret()) & mask;
    while (places_[at] && keys_[places_[at] - 1] != key) at = (at + 1) & mask;
    return places_[at];
  }

  int64_t row_bytes_ = 0;
  std::vector<int64_t> keys_;
  std::vector<uint32_t> places_;
  PooledBuffer rows_;
  std::vector<uint64_t> scores_;
  std::vector<uint8_t> found_;
};

}  // namespace embstore
