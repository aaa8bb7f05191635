// SlotList: the keys of a batch and their rows, kept for its backward pass. While it lives, its
// rows are pinned (see pinned_rows.h).
//
// Thread safety: rows() and watchers() are written under the table's lock; everything else never
// changes once the list is made.
//
// Invariant: rows()[i] is the row of keys()[i], or kMissingRow where the key has none, or has lost
// it since.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

class Table;

class SlotList {
 public:
  // All rows are kMissingRow.
  SlotList(std::shared_ptr<Table> table, std::span<const int64_t> keys);
  // Of n keys. The caller holds the table's lock, and writes all keys and rows before it lets go.
  SlotList(std::shared_ptr<Table> table, int64_t n);
  ~SlotList();
  SlotList(const SlotList&) = delete;
  SlotList& operator=(const SlotList&) = delete;

  Table& table() const { return *table_; }
  int64_t* keys() const { return buffer_.as<int64_t>(); }
  Row* rows() const { return reinterpret_cast<Row*>(buffer_.as<int64_t>() + n_); }
  int64_t size() const { return n_; }
  // The Table::watchers() who have heard of all rows, or 0.
  uint64_t watchers() const { return watchers_; }

 private:
  friend class Table;
  std::shared_ptr<Table> table_;
  RecycledBuffer buffer_;
  int64_t n_;
  uint64_t watchers_ = 0;
};

}  // namespace embstore
