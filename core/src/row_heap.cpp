#include "embstore/row_heap.h"

#include <algorithm>

namespace embstore {

RowHeap::RowHeap(int64_t row_bytes, int64_t capacity)
    : row_bytes_(row_bytes), rows_(static_cast<size_t>(capacity * row_bytes)) {}

void RowHeap::Require(int64_t rows, const std::string& purpose) {
  if (rows <= granted_) return;
  // The machine is asked for a stretch at a time: to ask costs more than a small batch.
  constexpr int64_t kStretchBytes = int64_t{64} << 20;
  const int64_t granted = std::max(rows, granted_ + kStretchBytes / row_bytes_ + 1);
  RequireAvailableMemory(static_cast<size_t>((granted - used_) * row_bytes_), purpose);
  granted_ = granted;
}

Row RowHeap::Next(int64_t i) const {
  const auto free = std::ssize(free_);
  return i < free ? free_[static_cast<size_t>(free - 1 - i)] : static_cast<Row>(used_ + i - free);
}

void RowHeap::Take(int64_t count) {
  const int64_t reused = std::min<int64_t>(count, std::ssize(free_));
  free_.resize(free_.size() - static_cast<size_t>(reused));
  used_ += count - reused;
}

void RowHeap::Truncate(int64_t rows) {
  rows_.Release(static_cast<size_t>(rows * row_bytes_));
  free_.clear();
  used_ = granted_ = rows;
}

void RowHeap::Clear() {
  rows_.Clear();
  free_.clear();
  used_ = granted_ = 0;
}

}  // namespace embstore
