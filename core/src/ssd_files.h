// The files of an SSD store: names, sizes, locks and offsets. See embstore/ssd_store.h.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "embstore/ssd_store.h"

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

  explicit SsdLayout(const SsdStoreOptions& options);

  int64_t rows_per_segment() const { return blocks_per_segment * rows_per_block; }
  int64_t rows_per_chunk() const { return blocks_per_chunk * rows_per_block; }
  int64_t segment_bytes() const { return blocks_per_segment * block_bytes; }
  int64_t ChunkOf(int64_t row) const { return row / rows_per_chunk(); }
  int64_t SegmentOf(int64_t row) const {
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

[[noreturn]] void ThrowIo(const std::string& what);             // std::system_error with errno
[[noreturn]] void ThrowIo(int error, const std::string& what);  // the same with `error`
void WriteWhole(int fd, const void* data, size_t bytes, int64_t offset, const std::string& path);
void ReadWholeAt(int fd, void* data, size_t bytes, int64_t offset, const std::string& path);
int64_t FileBytes(int fd);
// Opens a regular file; on failure returns -1 with errno set. Throws InvalidState for anything
// else: a FIFO would block, a device may have no end.
int OpenRegular(const std::string& path, int flags);
// Writes a new file and fsyncs it.
void WriteFile(const std::string& path, const void* data, size_t bytes);
// The whole file; throws InvalidState when it has more than max_bytes.
std::string ReadFile(const std::string& path, int64_t max_bytes);
void SyncDirectory(const std::string& path);
void RequireCheckpointName(const std::string& name);

// A flock, held until the object is destroyed or the process ends. A flock belongs to the open
// file, which a forked child shares. So the child closes its copy at once; otherwise a data
// loader's worker that outlives its parent would keep the directory locked.
class FileLock {
 public:
  FileLock() = default;
  // Owns the descriptor from here on, even when it throws. `operation` is one of flock(2).
  FileLock(int fd, int operation, const std::string& path);
  ~FileLock() { Release(); }
  FileLock(FileLock&& other) noexcept { *this = std::move(other); }
  FileLock& operator=(FileLock&& other) noexcept {
    std::swap(held_, other.held_);
    std::swap(process_, other.process_);
    other.Release();
    return *this;
  }

  struct Held;

 private:
  void Release() noexcept;

  Held* held_ = nullptr;
  pid_t process_ = 0;
};

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
  std::string NameOf(Kind kind, int64_t chunk) const;
  // The size of each values file, by chunk.
  std::map<int64_t, int64_t> ValueBytes() const;
  void Sync();

 private:
  struct Chunk {
    int fds[3] = {-1, -1, -1};
  };
  void CheckFormat();
  void CheckSizes(const SsdStoreOptions& options, const SsdLayout& layout);
  void LearnAlignment();

  std::string path_;
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
