#include "grouping.h"

#include <algorithm>
#include <bit>

namespace embstore {
namespace {

constexpr int kMaxPartitionBits = 10;
constexpr int64_t kOccurrencesPerPartition = 512;
constexpr size_t kInsertionSortBelow = 24;

// Stable by slot: occurrences of a partition start in the order of the batch.
void InsertionSort(std::span<Occurrence> items) {
  for (size_t i = 1; i < items.size(); ++i) {
    const Occurrence item = items[i];
    size_t j = i;
    for (; j > 0 && items[j - 1].slot > item.slot; --j) items[j] = items[j - 1];
    items[j] = item;
  }
}

void RadixSort(std::span<Occurrence> items, int bits) {
  thread_local std::vector<Occurrence> spare;
  spare.resize(std::max(spare.size(), items.size()));
  Occurrence* from = items.data();
  Occurrence* to = spare.data();
  const int passes = (bits + 7) / 8;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = 8 * pass;
    uint32_t counts[256] = {};
    for (size_t i = 0; i < items.size(); ++i) ++counts[(from[i].slot >> shift) & 0xff];
    uint32_t begin = 0;
    for (uint32_t& count : counts) {
      const uint32_t size = count;
      count = begin;
      begin += size;
    }
    for (size_t i = 0; i < items.size(); ++i) {
      to[counts[(from[i].slot >> shift) & 0xff]++] = from[i];
    }
    std::swap(from, to);
  }
  if (from != items.data()) std::copy(from, from + items.size(), items.data());
}

}  // namespace

Grouping::Grouping(const Slot* slots, int64_t n, int64_t capacity)
    : slots_(slots),
      n_(n),
      chunks_((n + kChunk - 1) / kChunk),
      items_(static_cast<size_t>(n) * sizeof(Occurrence)) {
  const int slot_bits = std::bit_width(static_cast<uint64_t>(capacity - 1));
  const int wanted = std::bit_width(static_cast<uint64_t>(n / kOccurrencesPerPartition));
  partition_bits_ = std::min({wanted, kMaxPartitionBits, slot_bits});
  shift_ = slot_bits - partition_bits_;
  cursors_.resize(static_cast<size_t>(chunks_ << partition_bits_));
  begins_.resize(static_cast<size_t>(partitions() + 1));
}

void Grouping::Count(int64_t chunk) {
  uint32_t* counts = &cursors_[static_cast<size_t>(chunk << partition_bits_)];
  const int64_t end = std::min((chunk + 1) * kChunk, n_);
  for (int64_t i = chunk * kChunk; i < end; ++i) {
    if (slots_[i] >= 0) ++counts[slots_[i] >> shift_];
  }
}

void Grouping::Place() {
  uint32_t begin = 0;
  for (int64_t partition = 0; partition < partitions(); ++partition) {
    begins_[static_cast<size_t>(partition)] = begin;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      uint32_t& cursor = cursors_[static_cast<size_t>((chunk << partition_bits_) + partition)];
      const uint32_t size = cursor;
      cursor = begin;
      begin += size;
    }
  }
  begins_.back() = begin;
}

void Grouping::Scatter(int64_t chunk) {
  uint32_t* cursors = &cursors_[static_cast<size_t>(chunk << partition_bits_)];
  auto* items = items_.as<Occurrence>();
  const int64_t end = std::min((chunk + 1) * kChunk, n_);
  for (int64_t i = chunk * kChunk; i < end; ++i) {
    if (slots_[i] < 0) continue;
    items[cursors[slots_[i] >> shift_]++] = {static_cast<uint32_t>(slots_[i]),
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
    RadixSort(items, shift_);
  }
  return items;
}

}  // namespace embstore
