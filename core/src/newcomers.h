// The missing keys of a batch while they are inserted into a table.
#pragma once

#include <cstdint>
#include <vector>

#include "embstore/memory.h"
#include "embstore/table.h"

namespace embstore {

// The distinct missing keys, and what happens to them.
struct Table::Newcomers {
  std::vector<uint32_t> first;   // first occurrences, ascending
  std::vector<uint32_t> number;  // which of them missing[i] is
  std::vector<int64_t> keys;
  std::vector<uint64_t> hashes, scores;
  std::vector<uint32_t> order;  // about that of their hashes, so that the index is read in order
  int order_bits = 0;           // so many leading bits of the hashes are sorted
  std::vector<Row> rows;
  std::vector<Evicted> evicted;  // of the newcomers from `plain` on; slot == kNoSlot: none
  std::vector<uint8_t> aside;    // its stripe has no room for it
  int64_t plain = 0;             // the first ones get free rows
  RecycledBuffer scratch;        // a vector for each task of FillRows

  int64_t size() const { return std::ssize(first); }
};

}  // namespace embstore
