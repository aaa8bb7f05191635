// The missing keys of a batch while they are inserted into a table.
#pragma once

#include <cstdint>
#include <vector>

#include "embstore/memory.h"
#include "embstore/table.h"

namespace embstore {

// A table of up to so many rows searches all of them for the one to give up.
inline constexpr int64_t kSmallTable = 1024;

// The distinct missing keys, and what happens to them.
struct Table::Newcomers {
  std::vector<uint32_t> first;   // first occurrences, ascending
  std::vector<uint32_t> number;  // which of them missing[i] is
  std::vector<uint64_t> hashes, scores;
  std::vector<Row> rows;
  std::vector<Evicted> evicted;  // of the newcomers from `plain` on; slot == kNoSlot: none
  std::vector<uint8_t> aside;    // its stripe has no room for it
  int64_t plain = 0;             // the first ones get free rows
  const Row* batch = nullptr;    // rows of the whole batch
  // A row with a smaller score is in no live batch; 0: nothing is known.
  uint64_t batch_score = 0;
  bool stamped = false;    // pins_ knows the rows of live batches
  RecycledBuffer scratch;  // a vector for each task of FillRows

  int64_t size() const { return std::ssize(first); }
};

}  // namespace embstore
