#include "embstore/pinned_rows.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "embstore/parallel.h"

namespace embstore {

void PinnedRows::Add(SlotList* list) {
  std::lock_guard guard(mutex_);
  lists_.push_back(list);
}

void PinnedRows::Remove(SlotList* list) {
  std::lock_guard guard(mutex_);
  std::erase(lists_, list);
}

void PinnedRows::RenewAfterFork() { new (&mutex_) std::mutex; }

void PinnedRows::Begin(int64_t capacity) {
  stamps_.Grow(static_cast<size_t>(capacity));
  // Two values a call: for its own rows, and for those of others.
  if (stamp_ > UINT8_MAX - 2) {
    std::fill_n(stamps(), stamps_.size(), uint8_t{0});
    stamp_ = 0;
  }
  stamp_ += 2;
}

void PinnedRows::BeginBatch(const Row* own, int64_t capacity) {
  Begin(capacity);
  std::lock_guard guard(mutex_);
  const auto stamp = [&](const SlotList* list, uint8_t value) {
    constexpr int64_t kRowsPerTask = 8192;
    ParallelFor((list->size() + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
      const int64_t begin = task * kRowsPerTask;
      const int64_t end = std::min(begin + kRowsPerTask, list->size());
      for (int64_t i = begin; i < end; ++i) {
        const Row row = list->rows()[i];
        if (row < 0) continue;
        // Several threads may stamp the same row, always with the same value.
        std::atomic_ref<uint8_t>(stamps()[row]).store(value, std::memory_order_relaxed);
      }
    });
  };
  const SlotList* mine = nullptr;
  for (const SlotList* list : lists_) {
    if (list->rows() == own) {
      mine = list;
    } else {
      stamp(list, stamp_ - 1);
    }
  }
  if (mine) stamp(mine, stamp_);
}

void PinnedRows::TakeFromLists(const Row* own) {
  std::lock_guard guard(mutex_);
  for (SlotList* list : lists_) {
    if (list->rows() == own) continue;
    for (Row *row = list->rows(), *end = row + list->size(); row != end; ++row) {
      if (*row >= 0 && IsHeldByCall(*row)) *row = kMissingRow;
    }
  }
}

void PinnedRows::TakeAllFromLists() {
  std::lock_guard guard(mutex_);
  for (SlotList* list : lists_) std::fill_n(list->rows(), list->size(), kMissingRow);
}

void PinnedRows::Renumber(std::span<const Row> number) {
  std::lock_guard guard(mutex_);
  for (SlotList* list : lists_) {
    for (Row *row = list->rows(), *end = row + list->size(); row != end; ++row) {
      if (*row >= 0) *row = number[static_cast<size_t>(*row)];
    }
  }
}

}  // namespace embstore
