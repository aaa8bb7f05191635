// SsdStore: rows of one size in files, an index of their places in memory.
//
// The directory (OneEmbedding's persistent table; docs/formats.md has the format in full):
//   FORMAT  LOCK  KEY_SIZE  VALUE_SIZE  PHYSICAL_BLOCK_SIZE  NUM_LOGICAL_BLOCKS_PER_CHUNK
//   values/value-<chunk>   keys/key-<chunk>   meta/meta-<chunk>   snapshots/<name>/{LIST,
//   index-<n>}
//
// Rows are appended to the open segment (about 1 MiB of blocks) and never change in place: a new
// version gets a new place, and the old one becomes garbage. A background thread writes full
// segments; until they are on disk they are read from memory. A segment without live rows is
// reused. When more than half of all places are garbage, Put moves the rows of the emptiest
// segments to the open one, a few segments for each that it fills.
//
// Only checkpoints survive the process: an opened directory is empty until LoadCheckpoint.
//
// Thread safety: as store.h says. One process may write to a directory at a time; any number may
// read its checkpoints.
//
// Invariants
//  1. Every row and score has a CRC-32, which is verified whenever it is read.
//  2. A checkpoint is a list of row numbers. The segments it names are neither reused nor emptied
//     while it exists, or while a process reads it.
//  3. A segment counts the rows in it that the index names; a free one has none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "embstore/store.h"

namespace embstore {

struct SsdStoreOptions {
  std::string path;
  int64_t row_bytes = 0;
  int64_t key_bytes = 8;                // 4: keys must fit int32
  int64_t physical_block_bytes = 4096;  // or 512
  int64_t capacity_rows = 0;            // 0: no bound
  bool direct = true;                   // bypass the page cache, where the filesystem allows it
  // false: only read the checkpoints of an existing store. Any number of processes may do so, also
  // beside the one that writes.
  bool create = true;
  // Not empty: Flush publishes the rows as the checkpoint of this name, for whoever opens the
  // directory next. Empty: Flush only writes them, so that errors show.
  std::string flush_checkpoint = {};
};

struct SsdStoreStats {
  int64_t rows = 0;  // live
  int64_t index_bytes = 0;
  int64_t file_bytes = 0;  // of segments that are in use
  int64_t bytes_put = 0;   // rows that callers gave
  int64_t bytes_written =
      0;                   // all that went to files: rows, keys, checksums, moved rows, checkpoints
  int64_t moved_rows = 0;  // by compaction
  bool direct = false;
};

class SsdStore : public Store {
 public:
  // Throws InvalidArgument for options that are wrong or differ from those of the directory, and
  // std::system_error (EWOULDBLOCK: the directory is open in some process).
  static std::shared_ptr<SsdStore> Open(const SsdStoreOptions& options);

  virtual SsdStoreStats stats() const = 0;
  virtual std::vector<std::string> Checkpoints() const = 0;
  virtual void DeleteCheckpoint(const std::string& name) = 0;
  // Waits for running reads, then releases the directory lock. Rows that no checkpoint names are
  // lost; every later call throws InvalidState.
  virtual void Close() = 0;
  // For tests: walks over the whole index, and throws std::logic_error naming what does not hold.
  virtual void CheckInvariants() const = 0;

 protected:
  using Store::Store;
};

}  // namespace embstore
