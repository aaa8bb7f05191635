// RowHeap: numbered rows of one size, packed in the order of their numbers.
//
// Addresses are reserved for as many rows as the owner may want; memory is allocated page by page
// as rows are used, so it follows the number of rows and not the capacity. A row never changes its
// number.
//
// Thread safety: const methods may run together; any other method needs exclusive access.
//
// Invariants
//  1. A number below used() is in use or free; numbers from used() on are new.
//  2. Free numbers are taken again before new ones.
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
  // How many numbers were ever taken. All rows are below it, free ones included.
  int64_t used() const { return used_; }
  int64_t bytes() const { return used_ * row_bytes_; }

  // Room for more numbers. Throws OutOfMemory and changes nothing.
  void Grow(int64_t capacity) { rows_.Grow(static_cast<size_t>(capacity * row_bytes_)); }
  // Throws OutOfMemory with `purpose` unless the machine has memory for this many rows in all.
  void Require(int64_t rows, const std::string& purpose);

  // The i-th row that Take(count) will take, free ones first. Its bytes are undefined.
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
  // Numbers from `rows` on are new again; returns their memory.
  // REQUIRES: the rows below are in use, and no others.
  void Truncate(int64_t rows);
  void Clear();  // all numbers are new again; returns the memory

 private:
  int64_t row_bytes_ = 0;
  mutable HugeBuffer rows_;
  std::vector<Row> free_;
  int64_t used_ = 0;
  int64_t granted_ = 0;  // rows that Require has found memory for
};

}  // namespace embstore
