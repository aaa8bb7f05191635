// Occurrences of a batch grouped by slot, so that each row is updated once.
//
// A radix sort in two steps: occurrences are spread over partitions by the high bits of the slot
// (in chunks, by several threads), then each partition is sorted by itself. Rows are thus met in
// the order of their addresses. The result is the one stable order, whatever the number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "embstore/kernels.h"
#include "embstore/memory.h"

namespace embstore {

class Grouping {
 public:
  static constexpr int64_t kChunk = 16384;

  Grouping(const Slot* slots, int64_t n, int64_t capacity);

  // Call Count for every chunk, then Place once, then Scatter for every chunk, then Sort.
  int64_t chunks() const { return chunks_; }
  void Count(int64_t chunk);
  void Place();
  void Scatter(int64_t chunk);

  int64_t partitions() const { return int64_t{1} << partition_bits_; }
  // The occurrences of a partition, sorted by (slot, index).
  std::span<Occurrence> Sort(int64_t partition);

 private:
  const Slot* slots_;
  int64_t n_, chunks_;
  int partition_bits_, shift_;
  std::vector<uint32_t> cursors_;  // chunks x partitions: counts, then where to write next
  std::vector<uint32_t> begins_;   // partitions + 1
  PooledBuffer items_;
};

}  // namespace embstore
