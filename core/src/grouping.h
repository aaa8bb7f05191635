// Grouping sorts the occurrences of a batch by row, so that each row is updated once.
//
// A radix sort, from the lowest digit of the row to the highest: few digits of many bits, so that
// there are few passes. Several threads first divide the occurrences into as many parts, by ranges
// of rows, of about the same size; each part is then sorted on its own, so no two threads write to
// the same cache lines. Rows are then visited in the order of their addresses.
//
// Thread safety: different chunks, parts and partitions may be handled by different threads.
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
  // Rows are below `limit`; negative ones are skipped. `threads` share the work.
  Grouping(const Row* rows, int64_t n, int64_t limit, int threads);

  // Sorts batches together, on all threads.
  static void SortAll(std::span<Grouping* const> batches);

  // Once it is sorted: about equal shares of the occurrences, each with all that have its rows, in
  // the order of (row, index).
  int64_t partitions() const;
  std::span<const Occurrence> Partition(int64_t partition) const;

 private:
  // Count for every chunk, then Place, then Divide for every chunk, then Sort for every part. With
  // one part, only Sort.
  void Count(int64_t chunk);
  void Place();
  void Divide(int64_t chunk);
  void Sort(int64_t part);

  // Sorts what for_each(use) passes to `use`, into items_[begin..]; returns where they end.
  template <class ForEach>
  int64_t SortThese(const ForEach& for_each, uint32_t begin);
  template <class Use>
  void ForDivided(int64_t part, const Use& use) const;
  int64_t BeginOf(int64_t partition) const;
  // Chunk i of the batch has the occurrences [ChunkBegin(i), ChunkBegin(i + 1)).
  int64_t ChunkBegin(int64_t chunk) const { return n_ * chunk / parts_; }

  const Row* rows_;
  int64_t n_;
  int64_t parts_;     // and chunks of the batch
  int64_t size_ = 0;  // occurrences that have a row; known once all are sorted or divided
  int passes_, digit_bits_;
  int range_shift_;                // rows of a range differ in so many low bits
  std::vector<uint32_t> counts_;   // chunks x ranges
  std::vector<uint8_t> part_of_;   // ranges
  std::vector<uint32_t> cursors_;  // chunks x parts: where to write next
  std::vector<uint32_t> begins_;   // parts: where they begin in items_
  // Sorted; what other passes write; chunks by part. Each thread writes to its own stretch. Made in
  // this order and dropped in the other, so that the next batch gets the same blocks for the same
  // use: lines that another thread has read are slow to write.
  RecycledBuffer items_, spare_, divided_;
};

}  // namespace embstore
