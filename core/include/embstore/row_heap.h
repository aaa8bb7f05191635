// RowHeap: rows of one size under numbers, as close together as they come.
//
// Addresses are set aside for as many rows as the owner may want; memory comes page by page as rows
// are used, so it follows the number of rows and not the capacity. No row ever moves to another
// number.
//
// Thread safety: const methods may run together; any other method needs exclusive access.
//
// Invariant: a row is in use, or free (it was in use before), or new: its number is not below
// used().
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

class RowHeap {
 public:
  RowHeap() = default;
  // Throws OutOfMemory.
  RowHeap(int64_t row_bytes, int64_t capacity);

  std::byte* data() const { return rows_.data(); }
  std::byte* at(Row row) const { return rows_.data() + row * row_bytes_; }
  // Numbers that were ever taken: all rows are below it, free ones among them.
  int64_t used() const { return used_; }
  int64_t bytes() const { return used_ * row_bytes_; }

  // Room for more numbers. Throws OutOfMemory and changes nothing.
  void Grow(int64_t capacity) { rows_.Grow(static_cast<size_t>(capacity * row_bytes_)); }
  // Throws OutOfMemory for `purpose` unless the machine has memory for so many rows in all.
  void Require(int64_t rows, const std::string& purpose);

  // The i-th of the rows that Take(count) would take: the free ones first. Their bytes are
  // undefined.
  Row Next(int64_t i) const;
  void Take(int64_t count);
  void Free(Row row) {
    assert(row >= 0 && row < used_);
    free_.push_back(row);
  }
  template <typename Visit>
  void VisitFree(const Visit& visit) const {
    for (const Row row : free_) visit(row);
  }
  void Clear();  // all rows are new again, and their memory is given back

 private:
  int64_t row_bytes_ = 0;
  mutable HugeBuffer rows_;
  std::vector<Row> free_;
  int64_t used_ = 0;
  int64_t granted_ = 0;  // the machine had memory for so many
};

}  // namespace embstore
