#include "grouping.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <type_traits>
#include <utility>

#include "embstore/parallel.h"

namespace embstore {
namespace {

constexpr int64_t kInsertionSortBelow = 24;
constexpr int64_t kLeastPart = 8192;  // occurrences; fewer are not worth the division
constexpr int64_t kMostParts = 32;
constexpr int kRangeBits = 12;
constexpr int64_t kOccurrencesPerPartition = 2048;
// A digit of 12 bits has 16 KiB of counters, which stay in the nearest cache. Small batches take
// smaller digits, since all counters are visited.
constexpr int kLeastDigit = 8, kMostDigit = 12, kMostPasses = (32 + kLeastDigit - 1) / kLeastDigit;
constexpr size_t kMostCounters = 2 << kMostDigit;
static_assert(kMostPasses << (32 / kMostPasses) <= kMostCounters);

// Stable: the occurrences start in the order of the batch.
void InsertionSort(std::span<Occurrence> items) {
  for (size_t i = 1; i < items.size(); ++i) {
    const Occurrence item = items[i];
    size_t j = i;
    for (; j > 0 && items[j - 1].row > item.row; --j) items[j] = items[j - 1];
    items[j] = item;
  }
}

// Calls use(occurrence) for those of [begin, end) that have a row.
template <class Use>
void ForOccurrences(const Row* rows, int64_t begin, int64_t end, const Use& use) {
  for (int64_t i = begin; i < end; ++i) {
    if (rows[i] < 0) continue;
    use(Occurrence{static_cast<uint32_t>(rows[i]), static_cast<uint32_t>(i)});
  }
}

// Sorts what for_each passes on, into items[begin..]; returns where they end. Rows have kPasses
// digits of `bits` bits.
template <int kPasses, class ForEach>
uint32_t RadixSort(const ForEach& for_each, int bits, uint32_t begin, Occurrence* items,
                   Occurrence* spare) {
  uint32_t counts[kMostCounters];
  const uint32_t digits = 1u << bits;
  const auto digit_of = [&](Occurrence one, int pass) {
    return one.row >> bits * pass & (digits - 1);
  };
  std::fill_n(counts, kPasses * digits, 0u);
  uint32_t seen = begin;
  for_each([&](Occurrence one) {
    // The passes write all over both, and would wait for every line.
    if (seen++ % (kLine / sizeof(Occurrence)) == 0) {
      __builtin_prefetch(items + seen, 1);
      __builtin_prefetch(spare + seen, 1);
    }
    for (int pass = 0; pass < kPasses; ++pass) ++counts[pass * digits + digit_of(one, pass)];
  });
  uint32_t end = begin;
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t* const cursors = counts + pass * digits;
    end = begin;
    for (uint32_t digit = 0; digit < digits; ++digit) end += std::exchange(cursors[digit], end);
    const bool odd = (kPasses - pass) % 2;
    Occurrence* const to = odd ? items : spare;
    const auto move = [&](Occurrence one) { to[cursors[digit_of(one, pass)]++] = one; };
    if (pass == 0) {
      for_each(move);
    } else {
      const Occurrence* const from = odd ? spare : items;
      for (uint32_t i = begin; i < end; ++i) move(from[i]);
    }
  }
  return end;
}

}  // namespace

Grouping::Grouping(const Row* rows, int64_t n, int64_t limit, int threads)
    : rows_(rows),
      n_(n),
      parts_(std::clamp<int64_t>(n / kLeastPart, 1, std::min<int64_t>(threads, kMostParts))),
      items_(static_cast<size_t>(n) * sizeof(Occurrence)),
      spare_(static_cast<size_t>(n) * sizeof(Occurrence)) {
  const auto bits_of = [](int64_t value) {
    return static_cast<int>(std::bit_width(static_cast<uint64_t>(value)));
  };
  const int row_bits = std::max(bits_of(std::max<int64_t>(limit - 1, 0)), 1);
  const int most = std::clamp(bits_of(n / parts_) - 4, kLeastDigit, kMostDigit);
  passes_ = (row_bits + most - 1) / most;
  digit_bits_ = (row_bits + passes_ - 1) / passes_;
  range_shift_ = std::max(row_bits - kRangeBits, 0);
  if (parts_ == 1) return;
  counts_.resize(static_cast<size_t>(parts_) << kRangeBits);
  part_of_.resize(size_t{1} << kRangeBits);
  cursors_.resize(static_cast<size_t>(parts_ * parts_));
  divided_ = RecycledBuffer(static_cast<size_t>(n) * sizeof(Occurrence));
}

void Grouping::Count(int64_t chunk) {
  uint32_t* const counts = &counts_[static_cast<size_t>(chunk) << kRangeBits];
  ForOccurrences(rows_, ChunkBegin(chunk), ChunkBegin(chunk + 1),
                 [&](Occurrence one) { ++counts[one.row >> range_shift_]; });
}

void Grouping::Place() {
  const auto parts = static_cast<size_t>(parts_);
  size_ = std::accumulate(counts_.begin(), counts_.end(), int64_t{0});
  int64_t before = 0;
  for (size_t range = 0; range < part_of_.size(); ++range) {
    const auto part =
        static_cast<size_t>(std::min(before * parts_ / std::max<int64_t>(size_, 1), parts_ - 1));
    part_of_[range] = static_cast<uint8_t>(part);
    for (size_t chunk = 0; chunk < parts; ++chunk) {
      const uint32_t count = counts_[(chunk << kRangeBits) + range];
      cursors_[chunk * parts + part] += count;
      before += count;
    }
  }
  begins_.assign(parts, 0);
  for (size_t chunk = 0; chunk < parts; ++chunk) {
    auto next = static_cast<uint32_t>(ChunkBegin(static_cast<int64_t>(chunk)));
    for (size_t part = 0; part < parts; ++part) {
      const uint32_t size = std::exchange(cursors_[chunk * parts + part], next);
      next += size;
      if (part + 1 < parts) begins_[part + 1] += size;
    }
  }
  std::partial_sum(begins_.begin(), begins_.end(), begins_.begin());
}

void Grouping::Divide(int64_t chunk) {
  // Own ones: those of other chunks are in the same cache lines.
  uint32_t cursors[kMostParts];
  uint32_t* const shared_cursors = &cursors_[static_cast<size_t>(chunk * parts_)];
  std::copy_n(shared_cursors, parts_, cursors);
  const uint8_t* const part_of = part_of_.data();
  auto* const divided = divided_.as<Occurrence>();
  ForOccurrences(rows_, ChunkBegin(chunk), ChunkBegin(chunk + 1), [&](Occurrence one) {
    Occurrence* const to = divided + cursors[part_of[one.row >> range_shift_]]++;
    __builtin_prefetch(to + 64, 1);  // other threads have read it since it was written
    *to = one;
  });
  std::copy_n(cursors, parts_, shared_cursors);
}

template <class ForEach>
int64_t Grouping::SortThese(const ForEach& for_each, uint32_t begin) {
  const auto run = [&](auto passes) {
    return RadixSort<passes.value>(for_each, digit_bits_, begin, items_.as<Occurrence>(),
                                   spare_.as<Occurrence>());
  };
  switch (passes_) {
    case 1:
      return run(std::integral_constant<int, 1>());
    case 2:
      return run(std::integral_constant<int, 2>());
    case 3:
      return run(std::integral_constant<int, 3>());
    default:
      return run(std::integral_constant<int, kMostPasses>());
  }
}

// Calls use(occurrence) for those of a part, in the order of the batch.
template <class Use>
void Grouping::ForDivided(int64_t part, const Use& use) const {
  const auto* const divided = divided_.as<const Occurrence>();
  for (int64_t chunk = 0; chunk < parts_; ++chunk) {
    // Where Divide stopped.
    const uint32_t* const ends = &cursors_[static_cast<size_t>(chunk * parts_)];
    const int64_t begin = part > 0 ? ends[part - 1] : ChunkBegin(chunk);
    for (int64_t i = begin; i < ends[part]; ++i) use(divided[i]);
  }
}

void Grouping::Sort(int64_t part) {
  auto* const items = items_.as<Occurrence>();
  if (parts_ > 1) {
    SortThese([&](const auto& use) { ForDivided(part, use); }, begins_[static_cast<size_t>(part)]);
    return;
  }
  if (n_ < kInsertionSortBelow) {
    size_ = 0;
    ForOccurrences(rows_, 0, n_, [&](Occurrence one) { items[size_++] = one; });
    InsertionSort({items, static_cast<size_t>(size_)});
    return;
  }
  size_ = SortThese([&](const auto& use) { ForOccurrences(rows_, 0, n_, use); }, 0);
}

void Grouping::SortAll(std::span<Grouping* const> batches) {
  using Step = void (Grouping::*)(int64_t);
  std::vector<std::pair<Grouping*, int64_t>> divided, all;
  for (Grouping* batch : batches) {
    for (int64_t part = 0; part < batch->parts_; ++part) {
      all.emplace_back(batch, part);
      if (batch->parts_ > 1) divided.emplace_back(batch, part);
    }
  }
  const auto run = [](const auto& tasks, Step step) {
    ParallelFor(std::ssize(tasks), [&](int64_t i) {
      const auto& [batch, part] = tasks[static_cast<size_t>(i)];
      (batch->*step)(part);
    });
  };
  run(divided, &Grouping::Count);
  for (Grouping* batch : batches) {
    if (batch->parts_ > 1) batch->Place();
  }
  run(divided, &Grouping::Divide);
  run(all, &Grouping::Sort);
}

int64_t Grouping::partitions() const {
  return (size_ + kOccurrencesPerPartition - 1) / kOccurrencesPerPartition;
}

// The first occurrence of a row, at this share of the occurrences or before it.
int64_t Grouping::BeginOf(int64_t partition) const {
  const std::span all(items_.as<const Occurrence>(), static_cast<size_t>(size_));
  const int64_t at = std::min(partition * kOccurrencesPerPartition, size_);
  if (at == size_) return size_;
  const auto row_below = [](const Occurrence& a, uint32_t row) { return a.row < row; };
  return std::lower_bound(all.begin(), all.end(), all[static_cast<size_t>(at)].row, row_below) -
         all.begin();
}

std::span<const Occurrence> Grouping::Partition(int64_t partition) const {
  const int64_t begin = BeginOf(partition), end = BeginOf(partition + 1);
  return {items_.as<const Occurrence>() + begin, static_cast<size_t>(end - begin)};
}

}  // namespace embstore
