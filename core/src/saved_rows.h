// SavedRows: copies of rows that writers save until a reader takes them.
//
// The copies are in blocks of 256 KiB at most. Blocks beyond a memory limit go to a temporary file
// (in TMPDIR, else /tmp), which has no name and disappears with this object; its space is reused.
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
#include <vector>

#include "embstore/memory.h"

namespace embstore {

class SavedRows {
 public:
  class Block {
   public:
    int64_t count() const { return count_; }
    int64_t key(int64_t i) const { return buffer_.as<Entry>()[i].key; }
    uint64_t score(int64_t i) const { return buffer_.as<Entry>()[i].score; }
    uint32_t uses(int64_t i) const { return buffer_.as<Entry>()[i].uses; }
    const std::byte* row(int64_t i) const { return buffer_.as<std::byte>() + first_ + i * bytes_; }

   private:
    friend class SavedRows;
    struct Entry {
      int64_t key;
      uint64_t score;
      uint32_t uses;
    };
    RecycledBuffer buffer_;  // entries, then rows; empty while the block is in the file
    int64_t count_ = 0, first_ = 0, bytes_ = 0;
    int64_t place_ = -1;  // in the file
  };

  SavedRows(int64_t row_bytes, int64_t memory_bytes);
  ~SavedRows();
  SavedRows(const SavedRows&) = delete;
  SavedRows& operator=(const SavedRows&) = delete;

  // Copies `bytes` of a row, row_bytes at most. `number` spreads threads over locks. Throws
  // OutOfMemory, or std::system_error when the file cannot be written, and then saves nothing.
  void Add(int64_t number, int64_t key, uint64_t score, uint32_t uses, const std::byte* row,
           int64_t bytes);
  // Takes a block, or with full_only one that is full; false when there is none.
  bool Take(Block& block, bool full_only);
  void Clear();

 private:
  struct Shard {
    std::mutex mutex;
    std::vector<Block> blocks;  // all but the last are full
  };
  static constexpr int64_t kShards = 8;

  size_t block_bytes() const;
  Block NewBlock() const;
  void Spill(Block& block);
  void Fetch(Block& block);

  const int64_t row_bytes_, rows_per_block_, memory_bytes_;
  Shard shards_[kShards];
  std::atomic<int64_t> in_memory_{0};  // bytes of full blocks
  std::mutex file_mutex_;
  int fd_ = -1;
  int64_t places_ = 0;  // in the file, used and free
  std::vector<int64_t> free_places_;
};

}  // namespace embstore
