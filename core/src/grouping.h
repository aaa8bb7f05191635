// Grouping sorts the occurrences of a batch by row, so that each row is updated once.
//
// A radix sort in two steps: occurrences are spread over partitions by the high bits of the row (in
// chunks, on several threads), then each partition is sorted on its own. So rows are visited in the
// order of their addresses.
//
// Frequent keys arrive early and have low rows, so low rows need narrow partitions. Widths follow
// the steps of a floating-point number: 2^m partitions for every doubling of the row. That balances
// uniform keys (half of them are in the last doubling) as well as keys whose frequency falls with
// their rank.
//
// Thread safety: different chunks and different partitions may be handled by different threads.
//
// Invariant: the result is the one stable order by row, whatever the number of threads.
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

  // Rows are below `limit`; negative ones are skipped.
  Grouping(const Row* rows, int64_t n, int64_t limit);

  // Call Count for every chunk, then Place once, then Scatter for every chunk, then Sort.
  int64_t chunks() const { return chunks_; }
  void Count(int64_t chunk);
  void Place();
  void Scatter(int64_t chunk);

  int64_t partitions() const { return partitions_; }
  // The occurrences of a partition, sorted by (row, index).
  std::span<Occurrence> Sort(int64_t partition);

 private:
  uint32_t PartitionOf(Row row) const;
  int LowBits(int64_t partition) const;  // in which the rows of a partition differ

  const Row* rows_;
  int64_t n_, chunks_, partitions_;
  int steps_;  // m, or below 0: one partition
  int row_bits_;
  std::vector<uint32_t> cursors_;  // chunks x partitions: counts, then where to write next
  std::vector<uint32_t> begins_;   // partitions + 1
  RecycledBuffer items_;
};

}  // namespace embstore
