// SavedRows: copies of rows that writers save until a reader takes them.
//
// The copies are in blocks of 256 KiB at most. Blocks beyond a memory limit go to a temporary file
// (in TMPDIR, else /tmp), which has no name and disappears with this object; its space is reused.
//
// Memory comes in chunks of eight blocks, a huge page as a rule, and is used again once a block was
// read: a training step that saves rows should not wait for the kernel to zero small pages.
//
// Thread safety: all methods may be called by any thread.
//
// Invariants
//  1. Every block of a shard but the last is full.
//  2. Full blocks in memory take at most the memory limit.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "embstore/memory.h"

namespace embstore {

class SavedRows {
 public:
  class Block {
   public:
    int64_t count() const { return count_; }
    int64_t key(int64_t i) const { return entries()[i].key; }
    uint64_t score(int64_t i) const { return entries()[i].score; }
    uint32_t uses(int64_t i) const { return entries()[i].uses; }
    const std::byte* row(int64_t i) const { return data_ + first_ + i * bytes_; }

   private:
    friend class SavedRows;
    struct Entry {
      int64_t key;
      uint64_t score;
      uint32_t uses;
    };
    Entry* entries() const { return reinterpret_cast<Entry*>(data_); }
    std::byte* data_ = nullptr;  // entries, then rows; null while the block is in the file
    int64_t count_ = 0, first_ = 0, bytes_ = 0;
    int64_t place_ = -1;  // in the file
  };

  // For a table of so many rows: copies of a small one take little memory.
  SavedRows(int64_t row_bytes, int64_t rows, int64_t memory_bytes);
  ~SavedRows();
  SavedRows(const SavedRows&) = delete;
  SavedRows& operator=(const SavedRows&) = delete;

  struct Original {
    int64_t key;
    uint64_t score;
    uint32_t uses;
    const std::byte* row;
  };
  // Copies `bytes` of each row, row_bytes at most. Throws OutOfMemory, or std::system_error when
  // the file cannot be written; some of the rows may then be saved.
  void Add(std::span<const Original> rows, int64_t bytes);
  // Takes a block, or with full_only one that is full; false when there is none.
  bool Take(Block& block, bool full_only);
  // Takes the memory of a block that was read; it is empty then.
  void Return(Block& block);
  // For readers, now and then: has as much memory ready as writers took since the last call, twice
  // over, so that they do not wait for fresh pages.
  void Prepare();
  // The same before there is a reader: what is made here is recycled by the SavedRows that follow.
  static void Prepare(int64_t row_bytes, int64_t rows);
  void Clear();

 private:
  struct Shard {
    std::mutex mutex;
    std::vector<Block> blocks;  // all but the last are full
  };
  static constexpr int64_t kShards = 8, kBlocksPerChunk = 8;
  static constexpr size_t kMostReady = 512;  // blocks: half a million rows of 32 floats and more

  size_t block_bytes() const;
  Shard& OwnShard();
  void Extend(Shard& shard);
  void Prepare(size_t blocks);
  RecycledBuffer NewChunk() const;
  void AddChunk(RecycledBuffer chunk);
  std::byte* TakeRoom();
  void GiveRoom(std::byte* room);
  void Spill(Block& block);
  void Fetch(Block& block);

  const int64_t row_bytes_, rows_per_block_, memory_bytes_;
  Shard shards_[kShards];
  std::atomic<int64_t> in_memory_{0};  // bytes of full blocks
  std::mutex file_mutex_;
  int fd_ = -1;
  int64_t places_ = 0;  // in the file, used and free
  std::vector<int64_t> free_places_;
  std::mutex room_mutex_;
  std::vector<RecycledBuffer> chunks_;
  std::vector<std::byte*> room_;  // free parts of chunks, a block each
  size_t taken_ = 0;              // blocks since the last Prepare
};

}  // namespace embstore
