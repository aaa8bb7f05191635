// The parts of an SSD store. ssd_store.cpp reads and writes rows, ssd_segments.cpp moves them to
// the files, ssd_compaction.cpp reuses their places, ssd_checkpoint.cpp keeps what survives the
// process.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "embstore/checksum.h"
#include "embstore/fork_guard.h"
#include "embstore/ssd_store.h"
#include "ssd_files.h"
#include "ssd_index.h"

namespace embstore {

inline constexpr int64_t kKeysAhead = 16;  // whose entries are prefetched

// The checksum covers the key too, so that a damaged key file is noticed.
inline uint32_t RowChecksum(int64_t key, const std::byte* row, int64_t bytes) {
  return Crc32(Crc32(0, &key, sizeof(key)), row, static_cast<size_t>(bytes));
}

// A segment in memory: being filled, or waiting to be written.
struct SegmentBuffer {
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  int64_t segment = 0;
  int64_t rows = 0;            // places taken
  int64_t flushed_blocks = 0;  // already in the files
  int64_t synced_blocks = 0;   // durable as well
  bool again = false;          // the segment was in the files before
  std::unique_ptr<std::byte, Free> values;
  std::vector<int64_t> keys;
  std::vector<RowMeta> meta;
};

// Writes buffers in order, on a thread of its own. A buffer that cannot be written stays first in
// the queue until a retry succeeds, so a full disk loses nothing.
class SegmentWriter {
 public:
  static constexpr size_t kQueuedSegments = 8;
  using Write = std::function<void(const SegmentBuffer&)>;
  explicit SegmentWriter(Write write);
  ~SegmentWriter();  // drops what is still queued: see Drain

  // While an earlier buffer cannot be written, throws its error and takes nothing.
  void Push(std::shared_ptr<SegmentBuffer> buffer);
  void Drain();                     // waits until all is written; throws as Push does
  void Abandon();                   // drops what is queued
  std::vector<int64_t> Finished();  // segments written since the last call

 private:
  void Run();
  void WaitFor(std::unique_lock<std::mutex>& lock, size_t queued);

  Write write_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<SegmentBuffer>> queue_;
  std::vector<int64_t> finished_;
  std::exception_ptr error_;  // of the first in the queue; the thread waits until it is cleared
  bool busy_ = false, stop_ = false;
  std::thread thread_;
};

class SsdStoreImpl final : public SsdStore {
 public:
  explicit SsdStoreImpl(const SsdStoreOptions& options);
  ~SsdStoreImpl() override;

  std::string Describe() const override { return "ssd store " + options_.path; }
  int64_t size() const override;
  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override;
  void Contains(std::span<const int64_t> keys, uint8_t* found) const override;
  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override;
  void PutScattered(std::span<const int64_t> keys, const std::byte* const* rows,
                    const uint64_t* scores) override;
  void Erase(std::span<const int64_t> keys) override;
  void Clear() override;
  void Flush() override;
  std::unique_ptr<StoreScanner> Scan() const override;
  std::unique_ptr<KeyScanner> ScanKeys() const override;
  void SaveCheckpoint(const std::string& name) override;
  void LoadCheckpoint(const std::string& name) override;

  SsdStoreStats stats() const override;
  std::vector<std::string> Checkpoints() const override;
  void DeleteCheckpoint(const std::string& name) override;
  void Close() override;
  void CheckInvariants() const override;

 private:
  friend class SsdScanner;
  friend class SsdKeyScanner;
  enum class State : uint8_t { kFree, kInMemory, kWritten };
  struct Segment {
    uint32_t live = 0;         // rows that the index names
    uint32_t checkpoints = 0;  // that name rows of it
    uint32_t blocks = 0;       // in the files
    State state = State::kFree;
    bool synced = false;   // durable, if it is written
    bool damaged = false;  // cannot be read: compaction leaves it alone
  };
  struct SegmentRows {  // a segment read back
    std::unique_ptr<std::byte, SegmentBuffer::Free> values;
    std::vector<int64_t> keys;
    std::vector<uint64_t> scores;
    std::vector<uint32_t> checksums;  // as in the meta file
  };
  struct LiveRows {  // those of them that the index names
    SegmentRows segment;
    std::vector<int64_t> places;
    std::vector<int64_t> keys;
    std::vector<uint64_t> scores;
    std::vector<const std::byte*> rows;
    std::vector<uint32_t> checksums;  // of the rows, as in the index
    std::vector<SsdIndex::Entry*> entries;
  };
  // What is known of rows that move; null where the caller puts new ones.
  struct Known {
    const uint32_t* checksums;
    SsdIndex::Entry* const* entries;  // valid while no key is inserted or erased
  };
  struct Wanted {
    uint32_t row, checksum, at;  // at: position in the batch
  };

  // Called before locking: in a forked child, a thread that does not exist may hold the lock.
  void RequireProcess() const;
  void RequireUsable() const;
  void RequireWritable() const;
  void RequireKeys(std::span<const int64_t> keys) const;
  void RequireRoom(std::span<const int64_t> keys) const;
  void WaitForReaders() const;
  const std::byte* InMemory(uint32_t row, uint64_t* score) const;
  std::vector<Wanted> FindAll(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
                              uint8_t* found) const;
  void ReadDirect(std::vector<Wanted>& wanted, std::span<const int64_t> keys,
                  std::byte* rows) const;
  void ReadCached(std::span<const Wanted> wanted, std::span<const int64_t> keys, std::byte* rows,
                  uint64_t* scores) const;
  void ReadScores(std::span<const Wanted> wanted, uint64_t* scores) const;
  void Verify(uint32_t row, uint32_t checksum, int64_t key, const std::byte* data) const;
  void VerifyScore(uint32_t row, uint32_t checksum, RowMeta meta) const;
  bool scores_have_checksums() const { return files_->format() >= 2; }
  // Converts the checksum of a row to the one in the meta file, and back.
  uint32_t MetaChecksum(uint32_t checksum, uint64_t score) const {
    return scores_have_checksums() ? checksum ^ Crc32(0, &score, sizeof(score)) : checksum;
  }

  // ssd_segments.cpp; the caller has exclusive access unless the method is const
  void Append(std::span<const int64_t> keys, const std::byte* const* rows, const uint64_t* scores,
              Known known = {nullptr, nullptr});
  void Name(SsdIndex::Entry* entry, int64_t key, uint32_t row, uint32_t checksum);
  void OpenSegment();
  void GrowSegments(size_t count);
  void Seal();
  void Release(uint32_t row);
  void Retire(int64_t segment) noexcept;
  void Reap();
  void FlushOpen();
  void SyncRows();
  void RewriteSegment(int64_t segment);
  void WriteSegment(const SegmentBuffer& buffer);
  // `rows` and `live` are replaced; their memory is used again.
  void ReadSegment(int64_t segment, SegmentRows& rows, bool with_values = true) const;
  void ForgetRows();
  static constexpr int64_t kNamedPerWord = 64;
  static uint64_t NamedBit(uint64_t row) { return uint64_t{1} << row % kNamedPerWord; }
  bool IsNamed(int64_t row) const {
    return named_[static_cast<size_t>(row / kNamedPerWord)] & NamedBit(static_cast<uint64_t>(row));
  }

  // ssd_compaction.cpp
  void Compact(int64_t limit) noexcept;
  std::vector<int64_t> PickVictims(int64_t limit) const;
  void ReadLive(int64_t segment, LiveRows& live, bool whole);
  void MoveRows(const LiveRows& live);

  // ssd_checkpoint.cpp
  struct CheckpointRows {
    std::vector<uint64_t> rows;  // in ascending order
    bool has_checksums;          // and so has every row
  };
  CheckpointRows ReadCheckpoint(const std::string& name) const;
  FileLock LockCheckpoint(const std::string& name) const;
  int64_t SegmentsInFiles() const;
  void LoadSegment(int64_t segment, std::span<const uint64_t> rows, bool has_checksums,
                   SsdIndex& index) const;
  std::vector<int64_t> SegmentsOf(const std::vector<uint64_t>& sorted_rows) const;
  void WriteCheckpoint(const std::string& folder, const std::vector<uint64_t>& sorted_rows);
  std::string FreshName() const;
  void Publish(const std::string& name);
  void Exchange(std::string a, std::string b) noexcept;
  void Settle(const std::string& done);
  void Refer(const std::string& name, std::vector<int64_t> segments);
  void Unrefer(const std::string& name);
  void FindCheckpoints();

  const SsdStoreOptions options_;
  const std::string checkpoints_folder_ = options_.path + "/snapshots";
  const SsdLayout layout_;
  const pid_t process_;
  mutable StoreLock lock_;
  std::unique_ptr<SsdFiles> files_;  // null once closed
  FileLock reading_;  // of a store that only reads: the checkpoint that it has loaded
  SsdIndex index_;
  std::vector<Segment> segments_;
  std::vector<uint64_t> named_;  // a bit for each row of the segments: the index names it
  std::set<int64_t> free_;
  // Segments that nothing names any more, but that a reader may still be reading. Readers count
  // themselves in the generation in which they looked up their rows. What was retired in the other
  // generation is free once that has no readers; then the generations swap.
  std::vector<int64_t> retired_[2];
  mutable std::atomic<int64_t> readers_[2] = {0, 0};
  int generation_ = 0;
  mutable std::atomic<int64_t> scanners_{0};  // while there are any, rows do not move
  std::shared_ptr<SegmentBuffer> open_;
  int64_t sealed_ = 0;  // segments that were filled
  bool sync_failed_ = false;
  std::map<int64_t, std::shared_ptr<SegmentBuffer>> in_memory_;  // by segment, the open one too
  std::vector<std::shared_ptr<SegmentBuffer>> spare_;        // fresh pages cost more than a copy
  LiveRows moving_;                                          // of compaction, kept for its memory
  std::vector<uint32_t> checksums_;                          // of Append, likewise
  std::vector<SsdIndex::Entry*> entries_;                    // of Append, likewise
  std::map<std::string, std::vector<int64_t>> checkpoints_;  // the segments that each names
  std::atomic<int64_t> bytes_put_{0}, bytes_written_{0}, moved_rows_{0};
  std::unique_ptr<SegmentWriter> writer_;
};

}  // namespace embstore
