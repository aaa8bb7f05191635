// Rows in and out of a table by key, outside of training.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "embstore/parallel.h"
#include "embstore/table.h"
#include "grouping.h"

namespace embstore {
namespace {

constexpr int64_t kKeysPerTask = 4096;

// Calls visit(i, slots, m) for blocks of at most kProbeBlock keys, on several threads.
template <typename Visit>
void ForBlocks(const Table& table, std::span<const int64_t> keys, const RowsView* prefetch,
               const Visit& visit) {
  const auto n = static_cast<int64_t>(keys.size());
  const IndexView index = table.index();
  ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kKeysPerTask, n);
    Slot slots[kProbeBlock];
    for (int64_t i = task * kKeysPerTask; i < end; i += kProbeBlock) {
      const int64_t m = std::min(kProbeBlock, end - i);
      ActiveKernels().find(index, keys.data() + i, m, slots, ScoreUpdate::kKeep, 0, prefetch);
      visit(i, slots, m);
    }
  });
}

}  // namespace

void Table::Contains(std::span<const int64_t> keys, uint8_t* found) const {
  std::shared_lock guard(lock_);
  RequireOpen();
  ForBlocks(*this, keys, nullptr, [&](int64_t i, const Slot* slots, int64_t m) {
    for (int64_t j = 0; j < m; ++j) found[i + j] = slots[j] != kNoSlot;
  });
}

void Table::Read(std::span<const int64_t> keys, float* values, float* states, uint64_t* scores,
                 uint8_t* found) const {
  std::shared_lock guard(lock_);
  RequireOpen();
  const RowsView view = rows();
  const int64_t width = state_width_;
  ForBlocks(*this, keys, values ? &view : nullptr, [&](int64_t i, const Slot* slots, int64_t m) {
    if (values) {
      ActiveKernels().gather(view, slots, m, nullptr, values + i * options_.dim, DType::kFloat32,
                             options_.dim);
    }
    for (int64_t j = 0; j < m; ++j) {
      const Slot slot = slots[j];
      if (found) found[i + j] = slot != kNoSlot;
      if (scores) scores[i + j] = slot == kNoSlot ? 0 : index_->entry(slot).score;
      if (!states) continue;
      float* out = states + (i + j) * width;
      if (slot == kNoSlot) {
        std::fill_n(out, width, 0.0f);
      } else {
        std::copy_n(state(slot), width, out);
      }
    }
  });
}

int64_t Table::Assign(std::span<const int64_t> keys, const float* values, const float* states,
                      const uint64_t* scores) {
  const auto n = static_cast<int64_t>(keys.size());
  if (scores) {
    const auto* zero = std::find(scores, scores + n, uint64_t{0});
    if (zero != scores + n) {
      throw InvalidArgument("scores should be at least 1 but scores[" +
                            std::to_string(zero - scores) + "] is: 0");
    }
  }
  const auto list = std::make_unique<SlotList>(shared_from_this(), n);
  std::unique_lock guard(lock_);
  RequireOpen();
  const BatchScore batch = scores ? BatchScore{ScoreUpdate::kKeep, 1} : NextBatchScore();
  Slot* slots = list->data();
  for (int64_t i = 0; i < n; i += kProbeBlock) {
    ActiveKernels().find(index(), keys.data() + i, std::min(kProbeBlock, n - i), slots + i,
                         batch.update, batch.score, nullptr);
  }
  std::vector<uint32_t> missing;
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] == kNoSlot) missing.push_back(static_cast<uint32_t>(i));
  }
  const int64_t refused = InsertMissing(keys.data(), slots, missing, batch.score);
  Grouping grouping(slots, n, index_->capacity());
  ParallelFor(grouping.chunks(), [&](int64_t chunk) { grouping.Count(chunk); });
  grouping.Place();
  ParallelFor(grouping.chunks(), [&](int64_t chunk) { grouping.Scatter(chunk); });
  ParallelFor(grouping.partitions(), [&](int64_t partition) {
    const std::span<Occurrence> sorted = grouping.Sort(partition);
    for (size_t j = 0; j < sorted.size(); ++j) {
      if (j + 1 < sorted.size() && sorted[j + 1].slot == sorted[j].slot) continue;
      const auto slot = static_cast<Slot>(sorted[j].slot);
      const int64_t i = sorted[j].index;
      ActiveKernels().store_vector(values + i * options_.dim, options_.dim, options_.dtype,
                                   row(slot));
      if (states) std::copy_n(states + i * state_width_, state_width_, state(slot));
      if (scores) index_->set_score(slot, scores[i]);
    }
  });
  return refused;
}

int64_t Table::Erase(std::span<const int64_t> keys) {
  std::unique_lock guard(lock_);
  RequireOpen();
  NextStamp();
  int64_t erased = 0;
  for (int64_t key : keys) {
    const Slot slot = index_->Find(key);
    if (slot == kNoSlot) continue;
    index_->Erase(slot);
    Stamp(slot);
    ++erased;
  }
  index_->AddSize(-erased);
  if (erased == 0) return 0;
  std::lock_guard lists_guard(lists_mutex_);
  for (SlotList* list : lists_) {
    for (Slot *slot = list->data(), *end = slot + list->size(); slot != end; ++slot) {
      if (*slot >= 0 && IsStamped(*slot)) *slot = kNoSlot;
    }
  }
  return erased;
}

void Table::Clear() {
  std::unique_lock guard(lock_);
  RequireOpen();
  index_->Clear();
  rows_.Clear();
  ++layout_;
  std::lock_guard lists_guard(lists_mutex_);
  for (SlotList* list : lists_) std::fill_n(list->data(), list->size(), kNoSlot);
}

RowBlock Table::Export(Cursor& cursor, int64_t max_rows, uint64_t min_score, bool with_values,
                       bool with_states) const {
  if (max_rows < 1) {
    throw InvalidArgument("max_rows should be at least 1 but is: " + std::to_string(max_rows));
  }
  std::shared_lock guard(lock_);
  RequireOpen();
  if (!cursor.started) cursor = {0, layout_, true};
  if (cursor.layout != layout_) {
    throw InvalidState("table '" + options_.name + "' was grown or cleared during an export");
  }
  std::vector<Slot> slots;
  int64_t next = cursor.next;
  for (; next < index_->capacity() && static_cast<int64_t>(slots.size()) < max_rows; ++next) {
    const auto slot = static_cast<Slot>(next);
    if (index_->IsUsed(slot) && index_->entry(slot).score >= min_score) slots.push_back(slot);
  }
  cursor.next = next < index_->capacity() ? next : -1;
  const auto n = static_cast<int64_t>(slots.size());
  RowBlock block;
  block.keys.resize(slots.size());
  block.scores.resize(slots.size());
  if (with_values) block.values.resize(slots.size() * static_cast<size_t>(options_.dim));
  if (with_states) block.states.resize(slots.size() * static_cast<size_t>(state_width_));
  const RowsView view = rows();
  ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
    const int64_t begin = task * kKeysPerTask, end = std::min(begin + kKeysPerTask, n);
    if (with_values) {
      ActiveKernels().gather(view, slots.data() + begin, end - begin, nullptr,
                             block.values.data() + begin * options_.dim, DType::kFloat32,
                             options_.dim);
    }
    for (int64_t i = begin; i < end; ++i) {
      const IndexEntry& entry = index_->entry(slots[static_cast<size_t>(i)]);
      block.keys[static_cast<size_t>(i)] = entry.key;
      block.scores[static_cast<size_t>(i)] = entry.score;
      if (with_states) {
        std::copy_n(state(slots[static_cast<size_t>(i)]), state_width_,
                    block.states.data() + i * state_width_);
      }
    }
  });
  return block;
}

RowBlock Table::DrainEvictions() {
  std::unique_lock guard(lock_);
  return std::exchange(log_, {});
}

void Table::set_eviction_log(EvictionLog log) {
  std::unique_lock guard(lock_);
  options_.eviction_log = log;
  log_ = {};
}

}  // namespace embstore
