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
int64_t RowsPerBlock(int64_t bytes_a_row, int64_t rows, int64_t memory_bytes, int64_t shards) {
  constexpr int64_t kSmallest = int64_t{64} << 10, kLargest = int64_t{256} << 10;
  const int64_t bytes = std::clamp(memory_bytes / (4 * shards), kSmallest, kLargest);
  return std::max<int64_t>(16, std::min(bytes / bytes_a_row, rows / shards));
}

constexpr size_t kPage = 4096;

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

SavedRows::SavedRows(int64_t row_bytes, int64_t rows, int64_t memory_bytes)
    : row_bytes_(row_bytes),
      rows_per_block_(
          RowsPerBlock(row_bytes + int64_t{sizeof(Block::Entry)}, rows, memory_bytes, kShards)),
      memory_bytes_(memory_bytes) {}

SavedRows::~SavedRows() {
  if (fd_ >= 0) close(fd_);
}

size_t SavedRows::block_bytes() const {
  const int64_t bytes = rows_per_block_ * (row_bytes_ + int64_t{sizeof(Block::Entry)});
  return static_cast<size_t>((bytes + 63) / 64 * 64);  // blocks of a chunk are aligned
}

RecycledBuffer SavedRows::NewChunk() const {
  return RecycledBuffer(kBlocksPerChunk * block_bytes(), BufferUse::kSavedRows);
}

// REQUIRES: room_mutex_.
void SavedRows::AddChunk(RecycledBuffer chunk) {
  room_.reserve((chunks_.size() + 1) * kBlocksPerChunk);  // so that GiveRoom never allocates
  auto* const begin = chunk.as<std::byte>();
  chunks_.push_back(std::move(chunk));
  for (size_t i = kBlocksPerChunk; i-- > 0;) room_.push_back(begin + i * block_bytes());
}

std::byte* SavedRows::TakeRoom() {
  std::lock_guard guard(room_mutex_);
  if (room_.empty()) AddChunk(NewChunk());
  std::byte* const room = room_.back();
  room_.pop_back();
  ++taken_;
  return room;
}

void SavedRows::GiveRoom(std::byte* room) {
  std::lock_guard guard(room_mutex_);
  room_.push_back(room);
}

void SavedRows::Prepare() {
  size_t wanted = 0;
  {
    std::lock_guard guard(room_mutex_);
    wanted = std::min(2 * std::exchange(taken_, 0), kMostReady);
  }
  Prepare(wanted);
}

void SavedRows::Prepare(int64_t row_bytes, int64_t rows) {
  SavedRows saved(row_bytes, rows, /*memory_bytes=*/INT64_MAX);
  const int64_t most = rows / saved.rows_per_block_ + 1;
  saved.Prepare(std::min(static_cast<size_t>(most), kMostReady));
}

void SavedRows::Prepare(size_t blocks) {
  for (;;) {
    {
      std::lock_guard guard(room_mutex_);
      if (room_.size() >= blocks) return;
    }
    RecycledBuffer chunk = NewChunk();
    for (size_t at = 0; at < chunk.size(); at += kPage) chunk.as<volatile char>()[at] = 0;
    std::lock_guard guard(room_mutex_);
    AddChunk(std::move(chunk));
  }
}

// Threads keep to their shards.
SavedRows::Shard& SavedRows::OwnShard() {
  static std::atomic<uint32_t> threads{0};
  thread_local const uint32_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return shards_[number % kShards];
}

// Begins a block. REQUIRES: the lock of the shard.
void SavedRows::Extend(Shard& shard) {
  Block next;
  next.data_ = TakeRoom();
  next.first_ = rows_per_block_ * int64_t{sizeof(Block::Entry)};
  next.bytes_ = row_bytes_;
  try {
    shard.blocks.reserve(shard.blocks.size() + 1);
    if (!shard.blocks.empty()) {
      const auto full = static_cast<int64_t>(block_bytes());
      if (in_memory_.load(std::memory_order_relaxed) + full > memory_bytes_) {
        Spill(shard.blocks.back());
      } else {
        in_memory_.fetch_add(full, std::memory_order_relaxed);
      }
    }
  } catch (...) {
    GiveRoom(next.data_);
    throw;
  }
  shard.blocks.push_back(next);
}

void SavedRows::Add(std::span<const Original> rows, int64_t bytes) {
  assert(bytes <= row_bytes_);
  constexpr size_t kAhead = 8;
  Shard& shard = OwnShard();
  std::lock_guard guard(shard.mutex);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i + kAhead < rows.size()) {
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows[i + kAhead].row + at);
    }
    if (shard.blocks.empty() || shard.blocks.back().count_ == rows_per_block_) Extend(shard);
    Block& block = shard.blocks.back();
    block.entries()[block.count_] = {rows[i].key, rows[i].score, rows[i].uses};
    std::memcpy(block.data_ + block.first_ + block.count_ * row_bytes_, rows[i].row,
                static_cast<size_t>(bytes));
    ++block.count_;
  }
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
      block = shard.blocks.front();
      shard.blocks.erase(shard.blocks.begin());
    }
    if (block.place_ >= 0) {
      try {
        Fetch(block);
      } catch (...) {
        Return(block);
        throw;
      }
    }
    return true;
  }
  return false;
}

void SavedRows::Return(Block& block) {
  if (block.data_) GiveRoom(block.data_);
  block = {};
}

void SavedRows::Clear() {
  for (Shard& shard : shards_) {
    std::lock_guard guard(shard.mutex);
    for (Block& block : shard.blocks) Return(block);
    shard.blocks.clear();
  }
  in_memory_.store(0, std::memory_order_relaxed);
}

void SavedRows::Spill(Block& block) {
  std::lock_guard guard(file_mutex_);
  if (fd_ < 0) fd_ = OpenTemporary();
  const int64_t place = free_places_.empty() ? places_ : free_places_.back();
  WriteWhole(fd_, block.data_, block_bytes(), place * static_cast<int64_t>(block_bytes()), kFile);
  if (free_places_.empty()) {
    ++places_;
  } else {
    free_places_.pop_back();
  }
  block.place_ = place;
  GiveRoom(std::exchange(block.data_, nullptr));
}

void SavedRows::Fetch(Block& block) {
  block.data_ = TakeRoom();
  std::lock_guard guard(file_mutex_);
  ReadWholeAt(fd_, block.data_, block_bytes(), block.place_ * static_cast<int64_t>(block_bytes()),
              kFile);
  free_places_.push_back(std::exchange(block.place_, -1));
}

}  // namespace embstore
