#include "embstore/ssd_store.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <shared_mutex>

#include "batch_read.h"
#include "embstore/memory.h"
#include "embstore/parallel.h"
#include "file_io.h"
#include "mapped_read.h"
#include "ssd_store_impl.h"

namespace embstore {
namespace {

constexpr int64_t kKeysPerTask = 2048;
constexpr int64_t kReadsPerTask = 256;
constexpr int kQueueDepth = 128;

}  // namespace

std::shared_ptr<SsdStore> SsdStore::Open(const SsdStoreOptions& options) {
  return std::make_shared<SsdStoreImpl>(options);
}

SsdStoreImpl::SsdStoreImpl(const SsdStoreOptions& options)
    : SsdStore(options.row_bytes), options_(options), layout_(options), process_(getpid()) {
  if (options.capacity_rows < 0) {
    throw InvalidArgument("capacity_rows should be at least 0 but is: " +
                          std::to_string(options.capacity_rows));
  }
  if (!options.flush_checkpoint.empty()) RequireCheckpointName(options.flush_checkpoint);
  files_ = std::make_unique<SsdFiles>(options_, layout_);
  if (options.create) FindCheckpoints();
  spare_.reserve(SegmentWriter::kQueuedSegments);
  writer_ = std::make_unique<SegmentWriter>([this](const SegmentBuffer& b) { WriteSegment(b); });
}

SsdStoreImpl::~SsdStoreImpl() {
  // A forked child has neither the thread nor the lock, and must not wait for them.
  if (getpid() != process_) (void)writer_.release();
}

void SsdStoreImpl::RequireProcess() const {
  if (getpid() == process_) return;
  throw InvalidState(Describe() + " was opened by another process and cannot be used after fork");
}

void SsdStoreImpl::RequireUsable() const {
  if (!files_) throw InvalidState(Describe() + " is closed");
}

void SsdStoreImpl::RequireWritable() const {
  RequireUsable();
  if (!options_.create) throw InvalidState(Describe() + " was opened for reading");
}

void SsdStoreImpl::RequireKeys(std::span<const int64_t> keys) const {
  if (layout_.key_bytes == 8) return;
  for (int64_t key : keys) {
    if (key < std::numeric_limits<int32_t>::min() || key > std::numeric_limits<int32_t>::max()) {
      throw InvalidArgument("keys should fit int32 in " + Describe() +
                            " but one is: " + std::to_string(key));
    }
  }
}

void SsdStoreImpl::RequireRoom(std::span<const int64_t> keys) const {
  const int64_t capacity = options_.capacity_rows;
  if (capacity == 0 || index_.size() + static_cast<int64_t>(keys.size()) <= capacity) return;
  std::vector<int64_t> fresh;
  for (int64_t key : keys) {
    if (!index_.Find(key)) fresh.push_back(key);
  }
  RequireCapacity(capacity, index_.size(), std::move(fresh));
}

// Waits until no thread reads files without the lock. The caller has exclusive access, so none
// starts.
void SsdStoreImpl::WaitForReaders() const {
  for (const auto& readers : readers_) {
    for (int64_t n; (n = readers.load()) != 0;) readers.wait(n);
  }
}

int64_t SsdStoreImpl::size() const {
  RequireProcess();
  std::shared_lock guard(lock_);
  return index_.size();
}

// The row if it is still in memory, else null.
const std::byte* SsdStoreImpl::InMemory(uint32_t row, uint64_t* score) const {
  const int64_t number = layout_.SegmentOf(row);
  if (segments_[static_cast<size_t>(number)].state != State::kInMemory) return nullptr;
  const SegmentBuffer& buffer = *in_memory_.find(number)->second;
  const int64_t first = layout_.FirstRow(number);
  if (score) *score = buffer.meta[static_cast<size_t>(row - first)].score;
  return buffer.values.get() + (layout_.ValueOffset(row) - layout_.ValueOffset(first));
}

// Copies what is in memory, and returns what must be read.
std::vector<SsdStoreImpl::Wanted> SsdStoreImpl::FindAll(std::span<const int64_t> keys,
                                                        std::byte* rows, uint64_t* scores,
                                                        uint8_t* found) const {
  const auto n = static_cast<int64_t>(keys.size());
  const int64_t tasks = (n + kKeysPerTask - 1) / kKeysPerTask;
  std::vector<std::vector<Wanted>> parts(static_cast<size_t>(tasks));
  ParallelFor(tasks, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kKeysPerTask, n);
    std::vector<Wanted>& wanted = parts[static_cast<size_t>(task)];
    wanted.reserve(static_cast<size_t>(end - task * kKeysPerTask));
    for (int64_t i = task * kKeysPerTask; i < end; ++i) {
      if (i + kKeysAhead < end) {
        index_.Prefetch(keys[static_cast<size_t>(i + kKeysAhead)]);
      }
      const SsdIndex::Entry* entry = index_.Find(keys[static_cast<size_t>(i)]);
      found[i] = entry != nullptr;
      if (!entry) continue;
      const std::byte* data = InMemory(entry->row, scores ? scores + i : nullptr);
      if (data) {
        std::memcpy(rows + i * layout_.row_bytes, data, static_cast<size_t>(layout_.row_bytes));
      } else {
        wanted.push_back({entry->row, entry->checksum, static_cast<uint32_t>(i)});
      }
    }
  });
  std::vector<Wanted> wanted;
  for (const auto& part : parts) wanted.insert(wanted.end(), part.begin(), part.end());
  return wanted;
}

void SsdStoreImpl::Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
                       uint8_t* found) const {
  RequireProcess();
  std::shared_lock guard(lock_);
  RequireUsable();
  std::vector<Wanted> wanted = FindAll(keys, rows, scores, found);
  if (wanted.empty()) return;
  // The reads need no lock: rows never change, and their places are not reused while a reader is
  // counted.
  std::atomic<int64_t>& readers = readers_[generation_];
  ++readers;
  struct Leave {
    std::atomic<int64_t>& readers;
    ~Leave() {
      if (--readers == 0) readers.notify_all();
    }
  } leave{readers};
  guard.unlock();
  if (files_->direct()) {
    if (scores) ReadScores(wanted, scores);
    ReadDirect(wanted, keys, rows);
  } else {
    ReadCached(wanted, keys, rows, scores);
  }
}

void SsdStoreImpl::Verify(uint32_t row, uint32_t checksum, int64_t key,
                          const std::byte* data) const {
  if (RowChecksum(key, data, layout_.row_bytes) == checksum) return;
  const int64_t first = row / layout_.rows_per_block * layout_.rows_per_block;
  throw InvalidState(Describe() + " is damaged: row " + std::to_string(row) + " of key " +
                     std::to_string(key) + " does not match its checksum; its block holds rows " +
                     std::to_string(first) + " to " +
                     std::to_string(first + layout_.rows_per_block - 1) + " in " +
                     files_->NameOf(SsdFiles::kValues, layout_.ChunkOf(row)));
}

void SsdStoreImpl::VerifyScore(uint32_t row, uint32_t checksum, RowMeta meta) const {
  if (!scores_have_checksums() || MetaChecksum(meta.checksum, meta.score) == checksum) return;
  throw InvalidState(Describe() + " is damaged: the score of row " + std::to_string(row) +
                     " does not match its checksum in " +
                     files_->NameOf(SsdFiles::kMeta, layout_.ChunkOf(row)));
}

// O_DIRECT reads whole sectors, so rows of one block share a read.
void SsdStoreImpl::ReadDirect(std::vector<Wanted>& wanted, std::span<const int64_t> keys,
                              std::byte* rows) const {
  std::sort(wanted.begin(), wanted.end(),
            [](const Wanted& a, const Wanted& b) { return a.row < b.row; });
  const int64_t unit = files_->alignment();
  std::vector<ReadRequest> requests;
  std::vector<size_t> first;  // of the rows of a request in `wanted`
  int64_t block = -1;
  for (size_t j = 0; j < wanted.size(); ++j) {
    const int64_t offset = layout_.ValueOffset(wanted[j].row);
    const int64_t end = (offset + layout_.row_bytes + unit - 1) / unit * unit;
    if (wanted[j].row / layout_.rows_per_block != block) {
      block = wanted[j].row / layout_.rows_per_block;
      const int fd = files_->Get(SsdFiles::kValues, layout_.ChunkOf(wanted[j].row), false);
      requests.push_back({fd, offset / unit * unit, 0, nullptr});
      first.push_back(j);
    }
    requests.back().bytes = static_cast<uint32_t>(end - requests.back().offset);
  }
  first.push_back(wanted.size());
  ReadBatch(requests, kQueueDepth, [&](size_t i, const std::byte* data) {
    for (size_t j = first[i]; j < first[i + 1]; ++j) {
      const Wanted& row = wanted[j];
      const std::byte* at = data + (layout_.ValueOffset(row.row) - requests[i].offset);
      Verify(row.row, row.checksum, keys[row.at], at);
      std::memcpy(rows + row.at * layout_.row_bytes, at, static_cast<size_t>(layout_.row_bytes));
    }
  });
}

// From the page cache: the files are mapped, since a call for each row would take ten times as
// long.
void SsdStoreImpl::ReadCached(std::span<const Wanted> wanted, std::span<const int64_t> keys,
                              std::byte* rows, uint64_t* scores) const {
  const auto n = static_cast<int64_t>(wanted.size());
  struct Files {
    const std::byte *values, *meta;
    int values_fd, meta_fd;
    std::string values_name, meta_name;
  };
  std::vector<Files> files;  // by chunk
  uint32_t last = 0;
  for (const Wanted& row : wanted) last = std::max(last, row.row);
  for (int64_t chunk = 0; chunk <= layout_.ChunkOf(last); ++chunk) {
    files.push_back(
        {files_->Map(SsdFiles::kValues, chunk), files_->Map(SsdFiles::kMeta, chunk),
         files_->Get(SsdFiles::kValues, chunk, false), files_->Get(SsdFiles::kMeta, chunk, false),
         files_->NameOf(SsdFiles::kValues, chunk), files_->NameOf(SsdFiles::kMeta, chunk)});
  }
  CatchBusErrors();
  ParallelFor((n + kReadsPerTask - 1) / kReadsPerTask, [&](int64_t task) {
    const int64_t begin = task * kReadsPerTask, end = std::min(begin + kReadsPerTask, n);
    const std::span<const Wanted> mine =
        wanted.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    std::array<MappedRead, kReadsPerTask> reads;
    for (size_t j = 0; j < mine.size(); ++j) {
      const Files& from = files[static_cast<size_t>(layout_.ChunkOf(mine[j].row))];
      const int64_t offset = layout_.ValueOffset(mine[j].row);
      reads[j] = {from.values ? from.values + offset : nullptr,
                  rows + mine[j].at * layout_.row_bytes, from.values_fd, offset, &from.values_name};
    }
    ReadMapped({reads.data(), mine.size()}, static_cast<size_t>(layout_.row_bytes));
    for (const Wanted& row : mine) {
      Verify(row.row, row.checksum, keys[row.at], rows + row.at * layout_.row_bytes);
    }
    if (!scores) return;
    std::array<RowMeta, kReadsPerTask> meta;
    size_t kept = 0;
    for (size_t j = 0; j < mine.size(); ++j) {
      const Files& from = files[static_cast<size_t>(layout_.ChunkOf(mine[j].row))];
      if (from.meta_fd < 0) continue;
      const int64_t offset =
          mine[j].row % layout_.rows_per_chunk() * static_cast<int64_t>(sizeof(RowMeta));
      reads[kept++] = {from.meta ? from.meta + offset : nullptr,
                       reinterpret_cast<std::byte*>(&meta[j]), from.meta_fd, offset,
                       &from.meta_name};
    }
    ReadMapped({reads.data(), kept}, sizeof(RowMeta));
    for (size_t j = 0; j < mine.size(); ++j) {
      uint64_t& score = scores[mine[j].at];
      score = 1;  // OneEmbedding's files have none
      if (files[static_cast<size_t>(layout_.ChunkOf(mine[j].row))].meta_fd < 0) continue;
      VerifyScore(mine[j].row, mine[j].checksum, meta[j]);
      if (meta[j].score || scores_have_checksums()) score = meta[j].score;
    }
  });
}

void SsdStoreImpl::ReadScores(std::span<const Wanted> wanted, uint64_t* scores) const {
  std::vector<ReadRequest> requests;
  std::vector<RowMeta> meta(wanted.size());
  for (size_t j = 0; j < wanted.size(); ++j) {
    const int64_t row = wanted[j].row;
    const int fd = files_->Get(SsdFiles::kMeta, layout_.ChunkOf(row), false);
    if (fd < 0) {  // OneEmbedding's files have none
      meta[j].score = 1;
      continue;
    }
    requests.push_back({fd, row % layout_.rows_per_chunk() * static_cast<int64_t>(sizeof(RowMeta)),
                        static_cast<uint32_t>(sizeof(RowMeta)),
                        reinterpret_cast<std::byte*>(&meta[j])});
  }
  ReadBatch(requests, kQueueDepth, [](size_t, const std::byte*) {});
  for (size_t j = 0; j < wanted.size(); ++j) {
    VerifyScore(wanted[j].row, wanted[j].checksum, meta[j]);
    scores[wanted[j].at] = meta[j].score;
  }
}

void SsdStoreImpl::Contains(std::span<const int64_t> keys, uint8_t* found) const {
  RequireProcess();
  std::shared_lock guard(lock_);
  RequireUsable();
  for (size_t i = 0; i < keys.size(); ++i) found[i] = index_.Find(keys[i]) != nullptr;
}

void SsdStoreImpl::Put(std::span<const int64_t> keys, const std::byte* rows,
                       const uint64_t* scores) {
  std::vector<const std::byte*> scattered(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    scattered[i] = rows + static_cast<int64_t>(i) * layout_.row_bytes;
  }
  PutScattered(keys, scattered.data(), scores);
}

void SsdStoreImpl::PutScattered(std::span<const int64_t> keys, const std::byte* const* rows,
                                const uint64_t* scores) {
  RequireProcess();
  std::unique_lock guard(lock_);
  RequireWritable();
  RequireKeys(keys);
  RequireRoom(keys);
  const int64_t before = sealed_;
  Append(keys, rows, scores);
  bytes_put_ += static_cast<int64_t>(keys.size()) * layout_.row_bytes;
  // A victim has at most half of its rows left, so two for each new segment keep pace. Four catch
  // up, and no call pays for more than it has put.
  constexpr int64_t kVictimsPerSegment = 4;
  if (sealed_ != before) Compact(kVictimsPerSegment * (sealed_ - before));
}

void SsdStoreImpl::Erase(std::span<const int64_t> keys) {
  RequireProcess();
  std::unique_lock guard(lock_);
  RequireWritable();
  for (int64_t key : keys) {
    const SsdIndex::Entry* entry = index_.Find(key);
    if (!entry) continue;
    const uint32_t row = entry->row;
    index_.Erase(key);
    Release(row);
  }
}

void SsdStoreImpl::Clear() {
  RequireProcess();
  std::unique_lock guard(lock_);
  RequireWritable();
  ForgetRows();
}

void SsdStoreImpl::Flush() {
  RequireProcess();
  std::unique_lock guard(lock_);
  RequireUsable();
  if (!options_.create) return;
  if (options_.flush_checkpoint.empty()) {
    FlushOpen();
  } else {
    Publish(options_.flush_checkpoint);
  }
}

void SsdStoreImpl::Close() {
  RequireProcess();
  std::unique_lock guard(lock_);
  if (!files_) return;
  WaitForReaders();
  writer_.reset();  // what no checkpoint names is lost anyway
  open_ = nullptr;
  in_memory_.clear();
  spare_.clear();
  index_ = SsdIndex();
  files_.reset();
  reading_ = FileLock();
}

SsdStoreStats SsdStoreImpl::stats() const {
  RequireProcess();
  std::shared_lock guard(lock_);
  SsdStoreStats stats;
  stats.rows = index_.size();
  stats.index_bytes = static_cast<int64_t>(index_.bytes());
  const auto used = std::count_if(segments_.begin(), segments_.end(), [](const Segment& segment) {
    return segment.state != State::kFree || segment.checkpoints > 0;
  });
  stats.file_bytes = used * layout_.segment_bytes();
  stats.bytes_put = bytes_put_;
  stats.bytes_written = bytes_written_;
  stats.moved_rows = moved_rows_;
  stats.direct = files_ && files_->direct();
  return stats;
}

// Segment by segment, so that files are read sequentially.
class SsdScanner final : public StoreScanner {
 public:
  explicit SsdScanner(const SsdStoreImpl& store) : store_(store) {
    store.RequireProcess();
    std::shared_lock guard(store.lock_);
    store.RequireUsable();
    ++store.scanners_;
    for (size_t i = 0; i < store.segments_.size(); ++i) {
      if (store.segments_[i].live > 0) segments_.push_back(static_cast<int64_t>(i));
    }
  }
  ~SsdScanner() override { --store_.scanners_; }

  void Next(int64_t max_rows, StoredRows& block) override {
    block = {};
    store_.RequireProcess();
    std::shared_lock guard(store_.lock_);
    store_.RequireUsable();
    while (next_ < segments_.size() && static_cast<int64_t>(block.keys.size()) < max_rows) {
      Take(segments_[next_++], block);
    }
  }

 private:
  void Take(int64_t number, StoredRows& block) {
    const SsdLayout& layout = store_.layout_;
    store_.ReadSegment(number, segment_);
    const auto& rows = segment_;
    const int64_t first = layout.FirstRow(number);
    for (size_t i = 0; i < rows.keys.size(); ++i) {
      const auto row = static_cast<uint32_t>(first + static_cast<int64_t>(i));
      const SsdIndex::Entry* entry = store_.index_.Find(rows.keys[i]);
      if (!entry || entry->row != row) continue;
      const std::byte* data =
          rows.values.get() + (layout.ValueOffset(row) - layout.ValueOffset(first));
      store_.Verify(row, entry->checksum, rows.keys[i], data);
      store_.VerifyScore(row, entry->checksum, {rows.scores[i], rows.checksums[i]});
      block.keys.push_back(rows.keys[i]);
      block.scores.push_back(rows.scores[i]);
      block.rows.insert(block.rows.end(), data, data + layout.row_bytes);
    }
  }

  const SsdStoreImpl& store_;
  std::vector<int64_t> segments_;
  SsdStoreImpl::SegmentRows segment_;  // kept for its memory
  size_t next_ = 0;
};

// One partition of the index at a time, so that no key is missed; within it, in the order of the
// files.
class SsdKeyScanner final : public KeyScanner {
 public:
  explicit SsdKeyScanner(const SsdStoreImpl& store) {
    for (size_t partition = 0; partition < SsdIndex::kPartitions; ++partition) {
      std::shared_lock guard(store.lock_);
      store.RequireUsable();
      store.index_.ForEach(partition, [&](const SsdIndex::Entry& entry) {
        places_.emplace_back(entry.row, entry.key);
      });
    }
    std::sort(places_.begin(), places_.end());
  }

  void Next(int64_t max_keys, std::vector<int64_t>& keys) override {
    keys.clear();
    for (; next_ < places_.size() && std::ssize(keys) < max_keys; ++next_) {
      keys.push_back(places_[next_].second);
    }
  }

 private:
  std::vector<std::pair<uint32_t, int64_t>> places_;  // row and key
  size_t next_ = 0;
};

std::unique_ptr<KeyScanner> SsdStoreImpl::ScanKeys() const {
  return std::make_unique<SsdKeyScanner>(*this);
}

std::unique_ptr<StoreScanner> SsdStoreImpl::Scan() const {
  return std::make_unique<SsdScanner>(*this);
}

}  // namespace embstore
