#include "saved_rows.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "file_io.h"

namespace embstore {
namespace {

// Small enough that the blocks being filled, one for each lock, stay within the limit.
int64_t RowsPerBlock(int64_t bytes_a_row, int64_t memory_bytes, int64_t shards) {
  // Not on huge pages: a training step pays for the zeroing of those it touches first.
  constexpr int64_t kSmallest = int64_t{64} << 10, kLargest = int64_t{256} << 10;
  const int64_t bytes = std::clamp(memory_bytes / (4 * shards), kSmallest, kLargest);
  return std::max<int64_t>(16, bytes / bytes_a_row);
}

const std::string kFile = "the temporary file for copies of rows";

// A file without a name, which disappears when it is closed.
int OpenTemporary() {
  const char* chosen = std::getenv("TMPDIR");
  const std::string folder = chosen && *chosen ? chosen : "/tmp";
#if defined(O_TMPFILE)
  const int fd = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) return fd;
#endif
  std::string name = folder + "/embstore-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named < 0) ThrowIo("making " + kFile + " in " + folder);
  unlink(name.c_str());
  return named;
}

}  // namespace

SavedRows::SavedRows(int64_t row_bytes, int64_t memory_bytes)
    : row_bytes_(row_bytes),
      rows_per_block_(
          RowsPerBlock(row_bytes + int64_t{sizeof(Block::Entry)}, memory_bytes, kShards)),
      memory_bytes_(memory_bytes) {}

SavedRows::~SavedRows() {
  if (fd_ >= 0) close(fd_);
}

size_t SavedRows::block_bytes() const {
  return static_cast<size_t>(rows_per_block_ * (row_bytes_ + int64_t{sizeof(Block::Entry)}));
}

SavedRows::Block SavedRows::NewBlock() const {
  Block block;
  block.buffer_ = RecycledBuffer(block_bytes());
  block.first_ = rows_per_block_ * int64_t{sizeof(Block::Entry)};
  block.bytes_ = row_bytes_;
  return block;
}

void SavedRows::Add(int64_t number, int64_t key, uint64_t score, uint32_t uses,
                    const std::byte* row, int64_t bytes) {
  assert(bytes <= row_bytes_);
  Shard& shard = shards_[number % kShards];
  std::lock_guard guard(shard.mutex);
  if (shard.blocks.empty() || shard.blocks.back().count_ == rows_per_block_) {
    Block next = NewBlock();
    if (!shard.blocks.empty()) {
      const auto full = static_cast<int64_t>(block_bytes());
      if (in_memory_.load(std::memory_order_relaxed) + full > memory_bytes_) {
        Spill(shard.blocks.back());
      } else {
        in_memory_.fetch_add(full, std::memory_order_relaxed);
      }
    }
    shard.blocks.push_back(std::move(next));
  }
  Block& block = shard.blocks.back();
  block.buffer_.as<Block::Entry>()[block.count_] = {key, score, uses};
  std::memcpy(block.buffer_.as<std::byte>() + block.first_ + block.count_ * row_bytes_, row,
              static_cast<size_t>(bytes));
  ++block.count_;
}

bool SavedRows::Take(Block& block, bool full_only) {
  for (Shard& shard : shards_) {
    {
      std::lock_guard guard(shard.mutex);
      if (shard.blocks.empty()) continue;
      if (full_only && shard.blocks.front().count_ < rows_per_block_) continue;
      // The last block is not counted: it may not be full.
      if (shard.blocks.size() > 1 && shard.blocks.front().place_ < 0) {
        in_memory_.fetch_sub(static_cast<int64_t>(block_bytes()), std::memory_order_relaxed);
      }
      block = std::move(shard.blocks.front());
      shard.blocks.erase(shard.blocks.begin());
    }
    if (block.place_ >= 0) Fetch(block);
    return true;
  }
  return false;
}

void SavedRows::Clear() {
  for (Shard& shard : shards_) {
    std::lock_guard guard(shard.mutex);
    shard.blocks.clear();
  }
  in_memory_.store(0, std::memory_order_relaxed);
}

void SavedRows::Spill(Block& block) {
  std::lock_guard guard(file_mutex_);
  if (fd_ < 0) fd_ = OpenTemporary();
  const int64_t place = free_places_.empty() ? places_ : free_places_.back();
  WriteWhole(fd_, block.buffer_.data(), block_bytes(), place * static_cast<int64_t>(block_bytes()),
             kFile);
  if (free_places_.empty()) {
    ++places_;
  } else {
    free_places_.pop_back();
  }
  block.place_ = place;
  block.buffer_ = RecycledBuffer();
}

void SavedRows::Fetch(Block& block) {
  block.buffer_ = RecycledBuffer(block_bytes());
  std::lock_guard guard(file_mutex_);
  ReadWholeAt(fd_, block.buffer_.data(), block_bytes(),
              block.place_ * static_cast<int64_t>(block_bytes()), kFile);
  free_places_.push_back(std::exchange(block.place_, -1));
}

}  // namespace embstore
