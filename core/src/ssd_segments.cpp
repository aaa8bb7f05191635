// How the rows of an SSD store reach the files.
#include <algorithm>
#include <bit>
#include <cstring>
#include <shared_mutex>

#include "embstore/parallel.h"
#include "file_io.h"
#include "invariant.h"
#include "ssd_store_impl.h"

namespace embstore {
namespace {

std::unique_ptr<std::byte, SegmentBuffer::Free> AlignedBytes(int64_t bytes) {
  constexpr size_t kAlignment = 4096;
  const size_t rounded = (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  void* data = std::aligned_alloc(kAlignment, rounded);
  if (!data) throw OutOfMemory("a segment of " + std::to_string(bytes) + " bytes");
  return std::unique_ptr<std::byte, SegmentBuffer::Free>(static_cast<std::byte*>(data));
}

}  // namespace

SegmentWriter::SegmentWriter(Write write) : write_(std::move(write)), thread_([this] { Run(); }) {}

SegmentWriter::~SegmentWriter() {
  {
    std::lock_guard guard(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SegmentWriter::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || (!queue_.empty() && !error_); });
    if (stop_) return;
    const std::shared_ptr<SegmentBuffer> buffer = queue_.front();
    busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      write_(*buffer);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    busy_ = false;
    if (error) {
      error_ = error;
    } else {
      finished_.push_back(buffer->segment);
      queue_.pop_front();
    }
    changed_.notify_all();
  }
}

// Waits until at most `queued` buffers are left. Retries an earlier failure once.
void SegmentWriter::WaitFor(std::unique_lock<std::mutex>& lock, size_t queued) {
  if (error_) {
    error_ = nullptr;
    changed_.notify_all();
  }
  changed_.wait(lock, [&] { return error_ || queue_.size() <= queued; });
  if (error_) std::rethrow_exception(error_);
}

void SegmentWriter::Push(std::shared_ptr<SegmentBuffer> buffer) {
  std::unique_lock lock(mutex_);
  WaitFor(lock, kQueuedSegments - 1);
  finished_.reserve(finished_.size() + queue_.size() + 1);  // the thread must not run out of memory
  queue_.push_back(std::move(buffer));
  changed_.notify_all();
}

void SegmentWriter::Drain() {
  std::unique_lock lock(mutex_);
  WaitFor(lock, 0);
}

void SegmentWriter::Abandon() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !busy_; });
  queue_.clear();
  finished_.clear();
  error_ = nullptr;
}

std::vector<int64_t> SegmentWriter::Finished() {
  std::lock_guard guard(mutex_);
  const std::vector<int64_t> finished = finished_;
  finished_.clear();
  return finished;
}

void SsdStoreImpl::OpenSegment() {
  const int other = 1 - generation_;
  if (readers_[other].load() == 0 && scanners_.load() == 0) {
    for (std::vector<int64_t>& retired = retired_[other]; !retired.empty(); retired.pop_back()) {
      free_.insert(retired.back());
    }
    generation_ = other;
  }
  std::shared_ptr<SegmentBuffer> buffer;
  if (spare_.empty()) {
    buffer = std::make_shared<SegmentBuffer>();
    buffer->values = AlignedBytes(layout_.segment_bytes());
    // The tails of blocks reach the file too, and must not leak old memory.
    std::memset(buffer->values.get(), 0, static_cast<size_t>(layout_.segment_bytes()));
    buffer->keys.resize(static_cast<size_t>(layout_.rows_per_segment()));
    buffer->meta.resize(static_cast<size_t>(layout_.rows_per_segment()));
  } else {
    buffer = std::move(spare_.back());
    spare_.pop_back();
    buffer->rows = buffer->flushed_blocks = buffer->synced_blocks = 0;
  }
  const bool reuse = !free_.empty();
  buffer->again = reuse;
  buffer->segment = reuse ? *free_.begin() : static_cast<int64_t>(segments_.size());
  if (layout_.FirstRow(buffer->segment) + layout_.rows_per_segment() >= int64_t{kNoRow}) {
    throw InvalidState(Describe() + " has no more places: it can hold 2^32 rows, garbage included");
  }
  std::map<int64_t, std::shared_ptr<SegmentBuffer>> opened{{buffer->segment, buffer}};
  if (reuse) {
    free_.erase(free_.begin());
  } else {
    GrowSegments(segments_.size() + 1);
  }
  // Nothing can fail from here on.
  in_memory_.merge(opened);
  Segment& segment = segments_[static_cast<size_t>(buffer->segment)];
  segment.state = State::kInMemory;
  segment.blocks = 0;
  segment.synced = segment.damaged = false;
  open_ = std::move(buffer);
}

// Retire has to work without new memory: there is always room for every segment in its lists.
void SsdStoreImpl::GrowSegments(size_t count) {
  for (std::vector<int64_t>& retired : retired_) {
    if (retired.capacity() < count) retired.reserve(std::max(count, 2 * segments_.size()));
  }
  named_.resize(static_cast<size_t>(
      (layout_.FirstRow(static_cast<int64_t>(count)) + kNamedPerWord - 1) / kNamedPerWord));
  segments_.resize(count);
}

void SsdStoreImpl::Seal() {
  Reap();
  writer_->Push(open_);
  open_ = nullptr;
  ++sealed_;
}

// Copies rows and finds their entries on several threads, as many as the open segment has room for,
// then updates the index in the order of the keys, which may repeat.
void SsdStoreImpl::Append(std::span<const int64_t> keys, const std::byte* const* rows,
                          const uint64_t* scores, Known known) {
  constexpr int64_t kRowsPerTask = 256, kRowsAhead = 4;
  const auto n = static_cast<int64_t>(keys.size());
  if (!known.checksums) {
    checksums_.resize(keys.size());
    entries_.resize(keys.size());
  }
  const uint32_t* const checksums = known.checksums ? known.checksums : checksums_.data();
  SsdIndex::Entry* const* const entries = known.entries ? known.entries : entries_.data();
  bool current = true;  // entries were found in the index as it is now
  for (int64_t begin = 0, end; begin < n; begin = end) {
    if (open_ && open_->rows == layout_.rows_per_segment()) Seal();
    if (!open_) OpenSegment();
    SegmentBuffer& to = *open_;
    const int64_t first = to.rows - begin;  // the place of row i is first + i
    const int64_t first_row = layout_.FirstRow(to.segment) + first;
    end = std::min(n, begin + layout_.rows_per_segment() - to.rows);
    ParallelFor((end - begin + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
      const int64_t from = begin + task * kRowsPerTask, until = std::min(from + kRowsPerTask, end);
      for (int64_t i = from; !known.entries && i < until; ++i) {
        if (i + kKeysAhead < until) index_.Prefetch(keys[static_cast<size_t>(i + kKeysAhead)]);
        entries_[static_cast<size_t>(i)] = index_.Find(keys[static_cast<size_t>(i)]);
      }
      for (int64_t i = from; i < until; ++i) {
        if (i + kRowsAhead < until) {
          const std::byte* next = rows[i + kRowsAhead];
          for (int64_t at = 0; at < layout_.row_bytes; at += 64) __builtin_prefetch(next + at);
        }
        const int64_t place = first + i;
        std::memcpy(to.values.get() + layout_.PlaceOffset(place), rows[i],
                    static_cast<size_t>(layout_.row_bytes));
        const int64_t key = keys[static_cast<size_t>(i)];
        to.keys[static_cast<size_t>(place)] = key;
        if (!known.checksums) {
          checksums_[static_cast<size_t>(i)] = RowChecksum(key, rows[i], layout_.row_bytes);
        }
        to.meta[static_cast<size_t>(place)] = {scores[i], MetaChecksum(checksums[i], scores[i])};
      }
    });
    to.rows = first + end;
    for (int64_t i = begin; i < end; ++i) {
      if (current && i + kKeysAhead < end && entries[i + kKeysAhead]) {
        __builtin_prefetch(&named_[entries[i + kKeysAhead]->row / kNamedPerWord], 1);
      }
      const int64_t key = keys[static_cast<size_t>(i)];
      SsdIndex::Entry* const entry = current ? entries[i] : index_.Find(key);
      // A new key may move others, and may come again.
      current = current && entry;
      Name(entry, key, static_cast<uint32_t>(first_row + i), checksums[i]);
    }
    current = true;  // the next segment's are found after this
  }
}

// Points the index to a row of the open segment for the key, whose entry may be null.
void SsdStoreImpl::Name(SsdIndex::Entry* entry, int64_t key, uint32_t row, uint32_t checksum) {
  if (entry) {
    Release(entry->row);
  } else {
    entry = &index_.Insert(key);
  }
  entry->row = row;
  entry->checksum = checksum;
  named_[row / kNamedPerWord] |= NamedBit(row);
  ++segments_[static_cast<size_t>(open_->segment)].live;
}

void SsdStoreImpl::Release(uint32_t row) {
  const int64_t number = layout_.SegmentOf(row);
  Segment& segment = segments_[static_cast<size_t>(number)];
  named_[row / kNamedPerWord] &= ~NamedBit(row);
  if (--segment.live == 0) Retire(number);
}

// Frees a segment that nothing needs any more.
void SsdStoreImpl::Retire(int64_t number) noexcept {
  Segment& segment = segments_[static_cast<size_t>(number)];
  if (segment.state != State::kWritten || segment.live || segment.checkpoints) return;
  segment.state = State::kFree;
  retired_[generation_].push_back(number);
}

// From now on, what the writer has finished is read from the files.
void SsdStoreImpl::Reap() {
  for (int64_t number : writer_->Finished()) {
    auto buffered = in_memory_.extract(number);
    if (spare_.size() < SegmentWriter::kQueuedSegments)
      spare_.push_back(std::move(buffered.mapped()));
    Segment& segment = segments_[static_cast<size_t>(number)];
    segment.state = State::kWritten;
    segment.blocks = static_cast<uint32_t>(layout_.blocks_per_segment);
    Retire(number);
  }
}

// Runs on the writer's thread, or in FlushOpen for the open segment; never both for one segment.
void SsdStoreImpl::WriteSegment(const SegmentBuffer& buffer) {
  const int64_t blocks = (buffer.rows + layout_.rows_per_block - 1) / layout_.rows_per_block;
  if (blocks == buffer.flushed_blocks) return;
  const int64_t first_place = buffer.flushed_blocks * layout_.rows_per_block;
  const auto places = static_cast<size_t>(buffer.rows - first_place);
  const int64_t row = layout_.FirstRow(buffer.segment) + first_place;
  const int64_t chunk = layout_.ChunkOf(row), in_chunk = row % layout_.rows_per_chunk();
  const auto write = [&](SsdFiles::Kind kind, const void* data, size_t bytes, int64_t offset) {
    WriteWhole(files_->Get(kind, chunk, true), data, bytes, offset, files_->NameOf(kind, chunk));
    bytes_written_ += static_cast<int64_t>(bytes);
  };
  if (layout_.key_bytes == 8) {
    write(SsdFiles::kKeys, buffer.keys.data() + first_place, places * 8, in_chunk * 8);
  } else {
    const std::vector<int32_t> narrow(buffer.keys.begin() + first_place,
                                      buffer.keys.begin() + buffer.rows);
    write(SsdFiles::kKeys, narrow.data(), places * 4, in_chunk * 4);
  }
  write(SsdFiles::kMeta, buffer.meta.data() + first_place, places * sizeof(RowMeta),
        in_chunk * static_cast<int64_t>(sizeof(RowMeta)));
  write(SsdFiles::kValues, buffer.values.get() + buffer.flushed_blocks * layout_.block_bytes,
        static_cast<size_t>((blocks - buffer.flushed_blocks) * layout_.block_bytes),
        layout_.ValueOffset(row));
  if (!files_->direct() && !buffer.again) {
    files_->Touch(SsdFiles::kValues, chunk, layout_.ValueOffset(row),
                  (blocks - buffer.flushed_blocks) * layout_.block_bytes);
  }
}

// Puts everything into the files. The open segment continues with a fresh block, since a block that
// a checkpoint may name is never written again.
void SsdStoreImpl::FlushOpen() {
  writer_->Drain();
  Reap();
  if (!open_) return;
  // Skipped places reach the file as zeros: the buffer may have been used before.
  const int64_t passed = layout_.rows_per_block - 1 -
                         (open_->rows + layout_.rows_per_block - 1) % layout_.rows_per_block;
  if (passed > 0) {
    const int64_t row = layout_.FirstRow(open_->segment) + open_->rows;
    std::memset(open_->values.get() + (layout_.ValueOffset(row) -
                                       layout_.ValueOffset(layout_.FirstRow(open_->segment))),
                0, static_cast<size_t>(passed * layout_.row_bytes));
  }
  WriteSegment(*open_);
  open_->flushed_blocks = (open_->rows + layout_.rows_per_block - 1) / layout_.rows_per_block;
  open_->rows = open_->flushed_blocks * layout_.rows_per_block;
  segments_[static_cast<size_t>(open_->segment)].blocks =
      static_cast<uint32_t>(open_->flushed_blocks);
}

// Makes everything durable. When a disk fails to write pages, Linux reports it once and may drop
// them: a second fdatasync succeeds without them. So what was not durable before is written again:
// the open segment from memory, others from what can still be read and verified.
void SsdStoreImpl::SyncRows() {
  for (size_t i = 0; i < segments_.size() && sync_failed_; ++i) {
    const Segment& segment = segments_[i];
    if (segment.state == State::kWritten && !segment.synced && segment.live > 0) {
      RewriteSegment(static_cast<int64_t>(i));
    }
  }
  try {
    files_->Sync();
  } catch (...) {
    sync_failed_ = true;
    if (open_) open_->flushed_blocks = open_->synced_blocks;
    throw;
  }
  sync_failed_ = false;
  for (Segment& segment : segments_) segment.synced = segment.state == State::kWritten;
  if (open_) open_->synced_blocks = open_->flushed_blocks;
}

void SsdStoreImpl::RewriteSegment(int64_t number) {
  LiveRows live;
  ReadLive(number, live, /*whole=*/true);
  SegmentRows& rows = live.segment;
  SegmentBuffer buffer;
  buffer.segment = number;
  buffer.rows = static_cast<int64_t>(rows.keys.size());
  buffer.values = std::move(rows.values);
  buffer.keys = std::move(rows.keys);
  for (size_t i = 0; i < rows.scores.size(); ++i) {
    buffer.meta.push_back({rows.scores[i], rows.checksums[i]});
  }
  WriteSegment(buffer);
}

void SsdStoreImpl::ReadSegment(int64_t number, SegmentRows& rows, bool with_values) const {
  if (!rows.values) rows.values = AlignedBytes(layout_.segment_bytes());
  rows.scores.clear();
  rows.checksums.clear();
  const auto buffered = in_memory_.find(number);
  if (buffered != in_memory_.end()) {
    const SegmentBuffer& buffer = *buffered->second;
    if (with_values) {
      std::memcpy(rows.values.get(), buffer.values.get(),
                  static_cast<size_t>(layout_.segment_bytes()));
    }
    rows.keys.assign(buffer.keys.begin(), buffer.keys.begin() + buffer.rows);
    for (int64_t i = 0; i < buffer.rows; ++i) {
      rows.scores.push_back(buffer.meta[static_cast<size_t>(i)].score);
      rows.checksums.push_back(buffer.meta[static_cast<size_t>(i)].checksum);
    }
    return;
  }
  const Segment& segment = segments_[static_cast<size_t>(number)];
  const int64_t row = layout_.FirstRow(number), chunk = layout_.ChunkOf(row);
  const int64_t in_chunk = row % layout_.rows_per_chunk();
  const auto read = [&](SsdFiles::Kind kind, void* data, size_t bytes, int64_t offset) {
    const int fd = files_->Get(kind, chunk, false);
    if (fd < 0) return false;
    ReadWholeAt(fd, data, bytes, offset, files_->NameOf(kind, chunk));
    return true;
  };
  const auto places = static_cast<size_t>(segment.blocks * layout_.rows_per_block);
  if (with_values) {
    read(SsdFiles::kValues, rows.values.get(),
         static_cast<size_t>(segment.blocks * layout_.block_bytes), layout_.ValueOffset(row));
  }
  // The key and meta files may end early, with the last row of a segment that is not full.
  std::vector<std::byte> raw(places * static_cast<size_t>(layout_.key_bytes));
  const auto kept = [&](SsdFiles::Kind kind, size_t width) {
    const int fd = files_->Get(kind, chunk, false);
    if (fd < 0) return size_t{0};
    const int64_t end = FileBytes(fd) - in_chunk * static_cast<int64_t>(width);
    return std::min(places, static_cast<size_t>(std::max<int64_t>(end, 0)) / width);
  };
  const size_t keys = kept(SsdFiles::kKeys, static_cast<size_t>(layout_.key_bytes));
  read(SsdFiles::kKeys, raw.data(), keys * static_cast<size_t>(layout_.key_bytes),
       in_chunk * layout_.key_bytes);
  rows.keys.resize(keys);
  for (size_t i = 0; i < keys; ++i) {
    if (layout_.key_bytes == 8) {
      std::memcpy(&rows.keys[i], raw.data() + 8 * i, 8);
    } else {
      int32_t key;
      std::memcpy(&key, raw.data() + 4 * i, 4);
      rows.keys[i] = key;
    }
  }
  const size_t known = std::min(keys, kept(SsdFiles::kMeta, sizeof(RowMeta)));
  std::vector<RowMeta> meta(known);
  read(SsdFiles::kMeta, meta.data(), known * sizeof(RowMeta),
       in_chunk * static_cast<int64_t>(sizeof(RowMeta)));
  rows.scores.assign(keys, 1);  // OneEmbedding's files have none
  rows.checksums.assign(keys, 0);
  for (size_t i = 0; i < known; ++i) {
    if (scores_have_checksums() || meta[i].score) rows.scores[i] = meta[i].score;
    rows.checksums[i] = meta[i].checksum;
  }
}

void SsdStoreImpl::ForgetRows() {
  writer_->Abandon();
  open_ = nullptr;
  in_memory_.clear();
  index_ = SsdIndex();
  std::fill(named_.begin(), named_.end(), uint64_t{0});
  for (size_t i = 0; i < segments_.size(); ++i) {
    Segment& segment = segments_[i];
    segment.live = 0;
    if (segment.state == State::kInMemory) segment.state = State::kWritten;
    Retire(static_cast<int64_t>(i));
  }
}

void SsdStoreImpl::CheckInvariants() const {
  RequireProcess();
  std::shared_lock guard(lock_);
  RequireUsable();
  std::vector<uint32_t> live(segments_.size(), 0);
  int64_t keys = 0;
  index_.ForEach([&](const SsdIndex::Entry& entry) {
    ++keys;
    RequireInvariant(index_.Find(entry.key) == &entry, "a key is found where it lies");
    const auto number = static_cast<size_t>(layout_.SegmentOf(entry.row));
    RequireInvariant(number < live.size(), "a row lies in a segment");
    ++live[number];
    RequireInvariant(IsNamed(entry.row), "a row that the index names is marked");
  });
  int64_t named = 0;
  for (const uint64_t word : named_) named += std::popcount(word);
  RequireInvariant(named == keys, "no other row is marked");
  RequireInvariant(keys == index_.size(), "size() counts the keys");
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    const auto number = static_cast<int64_t>(i);
    RequireInvariant(segment.live == live[i], "a segment counts the rows that the index names");
    RequireInvariant(segment.state != State::kFree || (!segment.live && !segment.checkpoints),
                     "nothing names rows of a free segment");
    RequireInvariant(segment.state != State::kWritten || segment.live || segment.checkpoints,
                     "a segment that nothing names is retired");
    RequireInvariant((segment.state == State::kInMemory) == in_memory_.contains(number),
                     "a segment in memory has a buffer");
    RequireInvariant(segment.state == State::kFree || !free_.contains(number),
                     "a segment that is used again is free");
  }
}

}  // namespace embstore
