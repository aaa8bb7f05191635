#include "grouping.h"

#include <algorithm>
#include <bit>
#include <cassert>

namespace embstore {
namespace {

constexpr int kMaxPartitionBits = 10;
constexpr int64_t kOccurrencesPerPartition = 512;
constexpr size_t kInsertionSortBelow = 24;

// Stable: the occurrences of a partition start in the order of the batch.
void InsertionSort(std::span<Occurrence> items) {
  for (size_t i = 1; i < items.size(); ++i) {
    const Occurrence item = items[i];
    size_t j = i;
    for (; j > 0 && items[j - 1].row > item.row; --j) items[j] = items[j - 1];
    items[j] = item;
  }
}

// bits: in which rows differ, at most 32.
void RadixSort(std::span<Occurrence> items, int bits) {
  thread_local std::vector<Occurrence> spare;
  spare.resize(std::max(spare.size(), items.size()));
  Occurrence* from = items.data();
  Occurrence* to = spare.data();
  constexpr int kDigit = 9, kMost = (32 + kDigit - 1) / kDigit;
  constexpr uint32_t kMask = (1u << kDigit) - 1;
  const int passes = (bits + kDigit - 1) / kDigit;
  uint32_t counts[kMost][kMask + 1];
  std::fill_n(counts[0], (kMask + 1) * static_cast<uint32_t>(passes), 0u);
  for (const Occurrence& item : items) {
    for (int pass = 0; pass < passes; ++pass) ++counts[pass][(item.row >> kDigit * pass) & kMask];
  }
  for (int pass = 0; pass < passes; ++pass) {
    uint32_t begin = 0;
    for (uint32_t& count : counts[pass]) {
      const uint32_t size = count;
      count = begin;
      begin += size;
    }
    for (size_t i = 0; i < items.size(); ++i) {
      to[counts[pass][(from[i].row >> kDigit * pass) & kMask]++] = from[i];
    }
    std::swap(from, to);
  }
  if (from != items.data()) std::copy(from, from + items.size(), items.data());
}

}  // namespace

Grouping::Grouping(const Row* rows, int64_t n, int64_t limit)
    : rows_(rows),
      n_(n),
      chunks_((n + kChunk - 1) / kChunk),
      row_bits_(std::bit_width(static_cast<uint64_t>(std::max<int64_t>(limit - 1, 0)))),
      items_(static_cast<size_t>(n) * sizeof(Occurrence)) {
  const int wanted_bits = std::bit_width(static_cast<uint64_t>(n / kOccurrencesPerPartition));
  // Few enough that their ends stay in the nearest cache, where occurrences are spread over them.
  steps_ = std::max(std::min(wanted_bits, kMaxPartitionBits) - 5, std::min(wanted_bits - 2, 3));
  partitions_ = limit > 0 ? PartitionOf(static_cast<Row>(limit - 1)) + int64_t{1} : 1;
  cursors_.resize(static_cast<size_t>(chunks_ * partitions_));
  begins_.resize(static_cast<size_t>(partitions_ + 1));
}

uint32_t Grouping::PartitionOf(Row row) const {
  assert(row >= 0);
  if (steps_ < 0) return 0;
  const auto number = static_cast<uint32_t>(row);
  const int shift = std::bit_width(number | 1u << steps_) - 1 - steps_;
  return (static_cast<uint32_t>(shift) << steps_) + (number >> shift);
}

int Grouping::LowBits(int64_t partition) const {
  if (steps_ < 0) return row_bits_;
  return std::max(static_cast<int>(partition >> steps_) - 1, 0);
}

void Grouping::Count(int64_t chunk) {
  uint32_t* counts = &cursors_[static_cast<size_t>(chunk * partitions_)];
  const int64_t end = std::min((chunk + 1) * kChunk, n_);
  for (int64_t i = chunk * kChunk; i < end; ++i) {
    if (rows_[i] >= 0) ++counts[PartitionOf(rows_[i])];
  }
}

void Grouping::Place() {
  uint32_t begin = 0;
  for (int64_t partition = 0; partition < partitions(); ++partition) {
    begins_[static_cast<size_t>(partition)] = begin;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      uint32_t& cursor = cursors_[static_cast<size_t>(chunk * partitions_ + partition)];
      const uint32_t size = cursor;
      cursor = begin;
      begin += size;
    }
  }
  begins_.back() = begin;
}

void Grouping::Scatter(int64_t chunk) {
  uint32_t* cursors = &cursors_[static_cast<size_t>(chunk * partitions_)];
  auto* items = items_.as<Occurrence>();
  const int64_t end = std::min((chunk + 1) * kChunk, n_);
  for (int64_t i = chunk * kChunk; i < end; ++i) {
    if (rows_[i] < 0) continue;
    items[cursors[PartitionOf(rows_[i])]++] = {static_cast<uint32_t>(rows_[i]),
                                               static_cast<uint32_t>(i)};
  }
}

std::span<Occurrence> Grouping::Sort(int64_t partition) {
  const auto p = static_cast<size_t>(partition);
  const std::span<Occurrence> items(items_.as<Occurrence>() + begins_[p],
                                    begins_[p + 1] - begins_[p]);
  if (items.size() < kInsertionSortBelow) {
    InsertionSort(items);
  } else {
    RadixSort(items, LowBits(partition));
  }
  return items;
}

}  // namespace embstore
