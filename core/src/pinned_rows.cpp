#include "embstore/pinned_rows.h"

#include <algorithm>
#include <new>

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
  own_ = nullptr;
  own_stamped_.store(true, std::memory_order_relaxed);
}

void PinnedRows::BeginBatch(const Row* own, int64_t capacity, uint64_t least_score) {
  Begin(capacity);
  std::lock_guard guard(mutex_);
  for (const SlotList* list : lists_) {
    if (list->rows() == own) {
      own_ = list;
    } else {
      Stamp(*list, stamp_ - 1);
    }
  }
  least_own_score_ = least_score;
  own_stamped_.store(own_ == nullptr, std::memory_order_relaxed);
}

// On one thread: two that stamp the same frequent rows would wait for each other's cache lines.
void PinnedRows::Stamp(const SlotList& list, uint8_t value) {
  for (int64_t i = 0; i < list.size(); ++i) {
    if (const Row row = list.rows()[i]; row >= 0) stamps()[row] = value;
  }
}

void PinnedRows::StampOwnRows() {
  std::lock_guard guard(stamping_);
  if (own_stamped_.load(std::memory_order_relaxed)) return;
  Stamp(*own_, stamp_);
  own_stamped_.store(true, std::memory_order_release);
}

void PinnedRows::TakeFromLists(const Row* own) {
  std::lock_guard guard(mutex_);
  for (SlotList* list : lists_) {
    if (list->rows() == own) continue;
    for (Row *row = list->rows(), *end = row + list->size(); row != end; ++row) {
      if (*row >= 0 && stamps()[*row] == stamp_) *row = kMissingRow;
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
