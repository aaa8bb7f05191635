// The files of an SSD store: names, sizes and offsets. See embstore/ssd_store.h.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "embstore/ssd_store.h"
#include "file_lock.h"

namespace embstore {

// What the meta file keeps for each place, packed as in the file.
struct [[gnu::packed]] RowMeta {
  uint64_t score;
  uint32_t checksum;
};
static_assert(sizeof(RowMeta) == 12);

// Where each row is stored. A segment is a run of blocks in one chunk.
struct SsdLayout {
  int64_t row_bytes, key_bytes;
  int64_t block_bytes;  // logical
  int64_t rows_per_block;
  int64_t blocks_per_chunk;
  int64_t blocks_per_segment;
  int64_t segments_per_chunk;
  bool segments_fill_chunks;  // so that they follow each other without a gap

  explicit SsdLayout(const SsdStoreOptions& options);

  int64_t rows_per_segment() const { return blocks_per_segment * rows_per_block; }
  int64_t rows_per_chunk() const { return blocks_per_chunk * rows_per_block; }
  int64_t segment_bytes() const { return blocks_per_segment * block_bytes; }
  int64_t ChunkOf(int64_t row) const { return row / rows_per_chunk(); }
  int64_t SegmentOf(int64_t row) const {
    if (segments_fill_chunks) return row / rows_per_segment();
    return ChunkOf(row) * segments_per_chunk + row % rows_per_chunk() / rows_per_segment();
  }
  int64_t FirstRow(int64_t segment) const {
    return segment / segments_per_chunk * rows_per_chunk() +
           segment % segments_per_chunk * rows_per_segment();
  }
  // Byte offset of a row in the values file of its chunk.
  int64_t ValueOffset(int64_t row) const { return PlaceOffset(row % rows_per_chunk()); }
  // Byte offset of a place in its segment or chunk.
  int64_t PlaceOffset(int64_t place) const {
    return place / rows_per_block * block_bytes + place % rows_per_block * row_bytes;
  }
};

void RequireCheckpointName(const std::string& name);

// The open files of a directory.
//
// Thread safety: every method may be called from any thread. In a forked child only the destructor
// may be called; it leaves the descriptors alone, since their numbers may belong to other files.
class SsdFiles {
 public:
  enum Kind { kValues, kKeys, kMeta };

  // With `create`, locks the directory for this process. Checks or writes its size files.
  SsdFiles(const SsdStoreOptions& options, const SsdLayout& layout);
  ~SsdFiles();
  SsdFiles(const SsdFiles&) = delete;
  SsdFiles& operator=(const SsdFiles&) = delete;

  const std::string& path() const { return path_; }
  // 2: rows and checkpoints have checksums. 1: written by OneEmbedding, which has none.
  int format() const { return format_; }
  bool direct() const { return direct_; }
  int64_t alignment() const { return alignment_; }  // of offsets and sizes; 1 when not direct
  // Opens the file of a chunk. If there is none, creates it or, without `create`, returns -1.
  int Get(Kind kind, int64_t chunk, bool create);
  // The file of a chunk as memory, for ReadMapped; null if it cannot be mapped. Beyond the end of
  // the file there is nothing to read, but it may grow.
  const std::byte* Map(Kind kind, int64_t chunk);
  // Prepares the mapping of bytes that are in the page cache, so that reads need no page faults.
  void Touch(Kind kind, int64_t chunk, int64_t offset, int64_t bytes);
  std::string NameOf(Kind kind, int64_t chunk) const;
  // The size of each values file, by chunk.
  std::map<int64_t, int64_t> ValueBytes() const;
  void Sync();

 private:
  struct Chunk {
    int fds[3] = {-1, -1, -1};
    std::byte* maps[3] = {nullptr, nullptr, nullptr};
  };
  int64_t MappedBytes(Kind kind) const;
  void CheckFormat();
  void CheckSizes(const SsdStoreOptions& options, const SsdLayout& layout);
  void LearnAlignment();

  std::string path_;
  const SsdLayout layout_;
  bool direct_;
  bool writable_;
  int format_ = 1;
  int64_t alignment_ = 1;
  const pid_t process_;
  FileLock lock_;
  std::mutex mutex_;
  std::vector<Chunk> chunks_;
};

}  // namespace embstore
