#include "embstore/snapshot.h"

#include <algorithm>
#include <cstring>
#include <shared_mutex>
#include <string>
#include <utility>

#include "embstore/table.h"

namespace embstore {
namespace {

constexpr int64_t kBlockBytes = int64_t{2} << 20;

}  // namespace

struct Snapshot::Output {
  int64_t* keys;
  float* values;
  float* states;
  uint64_t* scores;
  int64_t count = 0;
};

Snapshot::Snapshot(std::shared_ptr<Table> table) : table_(std::move(table)) {
  std::unique_lock guard(table_->lock_);
  table_->RequireOpen();
  if (table_->snapshot_) {
    throw InvalidState("table '" + table_->options_.name + "' has a snapshot already");
  }
  marks_ = HugeBuffer(static_cast<size_t>(table_->row_capacity_));
  rows_ = table_->index_->size();
  rows_per_block_ = std::max<int64_t>(
      16, kBlockBytes / (table_->row_stride_ + static_cast<int64_t>(sizeof(IndexEntry))));
  table_->snapshot_ = this;
}

Snapshot::~Snapshot() {
  std::unique_lock guard(table_->lock_);
  table_->snapshot_ = nullptr;
}

void Snapshot::Preserve(const IndexEntry& entry) {
  std::atomic_ref<uint8_t> state = mark(entry.row);
  uint8_t seen = state.load(std::memory_order_acquire);
  while (seen != kSettled) {
    if (seen == kSaving) {  // another thread copies this row; it must be done before it changes
      seen = state.load(std::memory_order_acquire);
      continue;
    }
    if (!state.compare_exchange_weak(seen, kSaving, std::memory_order_acq_rel)) continue;
    const int64_t stride = table_->row_stride_;
    {
      Shard& shard = shards_[entry.row % kShards];
      std::lock_guard guard(shard.mutex);
      if (shard.blocks.empty() || shard.blocks.back().count == rows_per_block_) {
        shard.blocks.push_back({PooledBuffer(static_cast<size_t>(
                                    rows_per_block_ * (stride + int64_t{sizeof(IndexEntry)}))),
                                0});
      }
      Saved& block = shard.blocks.back();
      block.buffer.as<IndexEntry>()[block.count] = entry;
      std::memcpy(block.buffer.as<std::byte>() + rows_per_block_ * int64_t{sizeof(IndexEntry)} +
                      block.count * stride,
                  table_->rows_.at(entry.row), static_cast<size_t>(stride));
      ++block.count;
    }
    state.store(kSettled, std::memory_order_release);
    return;
  }
}

bool Snapshot::TakeSaved(Saved& block, bool full_only) {
  for (Shard& shard : shards_) {
    std::lock_guard guard(shard.mutex);
    if (shard.blocks.empty()) continue;
    if (full_only && shard.blocks.front().count < rows_per_block_) continue;
    block = std::move(shard.blocks.front());
    shard.blocks.erase(shard.blocks.begin());
    return true;
  }
  return false;
}

void Snapshot::Emit(const Saved& block, int64_t first, int64_t count, Output& out) const {
  const Table& table = *table_;
  const auto* rows = block.buffer.as<std::byte>() + rows_per_block_ * int64_t{sizeof(IndexEntry)};
  for (int64_t i = first; i < first + count; ++i, ++out.count) {
    const IndexEntry& entry = block.buffer.as<IndexEntry>()[i];
    const std::byte* row = rows + i * table.row_stride_;
    out.keys[out.count] = entry.key;
    out.scores[out.count] = entry.score;
    if (out.values) {
      ActiveKernels().load_vector(row, table.options_.dim, table.options_.dtype,
                                  out.values + out.count * table.options_.dim);
    }
    if (out.states) {
      std::memcpy(out.states + out.count * table.state_width_, row + table.state_offset_,
                  static_cast<size_t>(table.state_width_) * sizeof(float));
    }
  }
}

// Reads the next few rows. False when there are none.
bool Snapshot::Walk(Output& out, int64_t room) {
  std::shared_lock guard(table_->lock_);
  table_->RequireOpen();
  const auto is_unread = [&](const IndexEntry& entry) {
    return mark(entry.row).load(std::memory_order_relaxed) != kSettled;
  };
  std::vector<Row> numbers;
  {
    std::lock_guard walk_guard(walk_mutex_);
    if (walk_.ended) return false;
    table_->index_->Advance(walk_, room, is_unread, [&](const IndexEntry& entry) {
      mark(entry.row).store(kSettled, std::memory_order_relaxed);
      const int64_t to = out.count + std::ssize(numbers);
      out.keys[to] = entry.key;
      out.scores[to] = entry.score;
      numbers.push_back(entry.row);
    });
  }
  table_->CopyRows(numbers.data(), std::ssize(numbers),
                   out.values ? out.values + out.count * table_->options_.dim : nullptr,
                   out.states ? out.states + out.count * table_->state_width_ : nullptr);
  out.count += std::ssize(numbers);
  return true;
}

int64_t Snapshot::Read(int64_t max_rows, int64_t* keys, float* values, float* states,
                       uint64_t* scores) {
  if (max_rows < 1) {
    throw InvalidArgument("max_rows should be at least 1 but is: " + std::to_string(max_rows));
  }
  Output out{keys, values, states, scores};
  bool walked_all = false;
  while (out.count < max_rows) {
    {
      std::lock_guard guard(rest_mutex_);
      // Saved rows first, so that their memory is free again soon.
      if (rest_first_ == rest_.count) {
        rest_ = {};
        rest_first_ = 0;
        TakeSaved(rest_, /*full_only=*/!walked_all);
      }
      const int64_t n = std::min(rest_.count - rest_first_, max_rows - out.count);
      Emit(rest_, rest_first_, n, out);
      rest_first_ += n;
      if (n > 0) continue;
    }
    if (walked_all) break;
    walked_all = !Walk(out, max_rows - out.count);
  }
  return out.count;
}

}  // namespace embstore
