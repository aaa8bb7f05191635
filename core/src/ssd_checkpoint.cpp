// Checkpoints of an SSD store: lists of row numbers, published by rename.
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <shared_mutex>

#include "file_io.h"
#include "ssd_store_impl.h"

namespace embstore {
namespace {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "files hold little-endian numbers");

constexpr const char* kSums = "CHECKSUMS";
// Drafts, and deleted or replaced checkpoints that some process still reads.
constexpr const char* kUnnamed = ".unfinished-";

std::string Folder(const std::string& path, const std::string& name) {
  return path + "/snapshots/" + name;
}

std::string Line(const std::string& name, size_t bytes, uint32_t checksum) {
  char text[64];
  std::snprintf(text, sizeof(text), " %zu %08" PRIx32 "\n", bytes, checksum);
  return name + text;
}

// Removes the folder of a checkpoint, unless some process reads it.
bool RemoveUnread(const std::string& folder) {
  const std::string list = folder + "/LIST";
  FileLock lock;
  if (fs::is_regular_file(fs::symlink_status(list))) {
    const int fd = OpenRegular(list, O_RDWR);
    if (fd < 0) ThrowIo("opening " + list);
    try {
      lock = FileLock(fd, LOCK_EX | LOCK_NB, list);
    } catch (const std::system_error& error) {
      if (error.code().value() == EWOULDBLOCK) return false;
      throw;
    }
  }
  RemoveAll(folder);
  return true;
}

}  // namespace

// Throws InvalidState for a damaged checkpoint, std::system_error for one that cannot be read.
SsdStoreImpl::CheckpointRows SsdStoreImpl::ReadCheckpoint(const std::string& name) const {
  const std::string folder = Folder(options_.path, name);
  if (!fs::is_directory(folder)) {
    ThrowIo(ENOENT, Describe() + " has no snapshot '" + name + "'");
  }
  const auto damaged = [&](const std::string& why) {
    throw InvalidState("snapshot '" + name + "' of " + Describe() + " is damaged: " + why);
  };
  const auto read = [&](const std::string& file, int64_t max_bytes) {
    const std::string path = folder + "/" + file;
    try {
      return ReadFile(path, max_bytes);
    } catch (const std::system_error& error) {
      if (error.code().value() == ENOENT) damaged(path + " is missing");
      throw;
    } catch (const InvalidState& error) {
      damaged(error.what());
      throw;
    }
  };
  const std::map<int64_t, int64_t> values = files_->ValueBytes();
  const int64_t max_list_bytes = 64 * (static_cast<int64_t>(values.size()) + 64);
  int64_t places = 0;
  for (const auto& [chunk, bytes] : values) {
    places += (bytes / layout_.block_bytes + 1) * layout_.rows_per_block;
  }
  const std::string list = read("LIST", max_list_bytes);
  // Only OneEmbedding's checkpoints have no checksums.
  const bool has_sums = files_->format() >= 2 || fs::exists(folder + "/" + kSums);
  const std::string sums = has_sums ? "\n" + read(kSums, max_list_bytes) : std::string();
  const auto check = [&](const std::string& file, const std::string& data) {
    const std::string line = Line(file, data.size(), Crc32(0, data.data(), data.size()));
    if (has_sums && sums.find("\n" + line) == std::string::npos) {
      damaged(folder + "/" + file + " does not match its checksum");
    }
  };
  check("LIST", list);
  std::vector<uint64_t> rows;
  // Not by a stream: it would take running out of memory for the end of the list.
  for (size_t begin = 0, end; begin < list.size(); begin = end + 1) {
    end = std::min(list.find('\n', begin), list.size());
    const std::string file = list.substr(begin, end - begin);
    if (file.empty()) continue;
    if (file.find('/') != std::string::npos) damaged(folder + "/LIST names a path: " + file);
    const std::string data = read(file, 8 * places);
    check(file, data);
    if (data.size() % 8 != 0) {
      damaged(folder + "/" + file + " should hold numbers of 8 bytes but has " +
              std::to_string(data.size()) + " bytes");
    }
    if (data.empty()) continue;  // there may be no memory to copy to
    const size_t at = rows.size();
    rows.resize(at + data.size() / 8);
    std::memcpy(rows.data() + at, data.data(), data.size());
  }
  std::sort(rows.begin(), rows.end());
  if (!rows.empty() && (rows.back() >= kNoRow || layout_.SegmentOf(static_cast<int64_t>(
                                                     rows.back())) >= SegmentsInFiles())) {
    damaged("it names row " + std::to_string(rows.back()) + ", which the values files do not have");
  }
  return {std::move(rows), has_sums};
}

int64_t SsdStoreImpl::SegmentsInFiles() const {
  int64_t segments = 0;
  for (const auto& [chunk, bytes] : files_->ValueBytes()) {
    if (chunk > int64_t{kNoRow} / layout_.rows_per_chunk()) continue;  // no row lies there
    const int64_t used = (bytes + layout_.segment_bytes() - 1) / layout_.segment_bytes();
    segments = std::max(
        segments, chunk * layout_.segments_per_chunk + std::min(used, layout_.segments_per_chunk));
  }
  return segments;
}

std::vector<int64_t> SsdStoreImpl::SegmentsOf(const std::vector<uint64_t>& sorted_rows) const {
  std::vector<int64_t> segments;
  for (uint64_t row : sorted_rows) {
    const int64_t segment = layout_.SegmentOf(static_cast<int64_t>(row));
    if (segments.empty() || segments.back() != segment) segments.push_back(segment);
  }
  return segments;
}

void SsdStoreImpl::Refer(const std::string& name, std::vector<int64_t> segments) {
  std::vector<int64_t>& referred = checkpoints_[name];  // first: from here on, Unrefer undoes it
  if (!segments.empty() && segments.back() >= static_cast<int64_t>(segments_.size())) {
    const size_t old = segments_.size();
    GrowSegments(static_cast<size_t>(segments.back()) + 1);
    for (size_t i = old; i < segments_.size(); ++i) free_.insert(static_cast<int64_t>(i));
  }
  for (int64_t number : segments) {
    Segment& segment = segments_[static_cast<size_t>(number)];
    ++segment.checkpoints;
    if (segment.state == State::kFree) {
      free_.erase(number);
      segment.state = State::kWritten;
      segment.synced = true;
    }
  }
  referred = std::move(segments);
}

void SsdStoreImpl::Unrefer(const std::string& name) {
  const auto found = checkpoints_.find(name);
  if (found == checkpoints_.end()) return;
  for (int64_t number : found->second) {
    --segments_[static_cast<size_t>(number)].checkpoints;
    Retire(number);
  }
  checkpoints_.erase(found);
}

// Finds the checkpoints of a directory that is being opened. Rows that a checkpoint names must not
// be overwritten: a damaged checkpoint protects every segment, and one that cannot be read now (too
// many open files, a failing disk) is an error.
void SsdStoreImpl::FindCheckpoints() {
  for (const std::string& name : NamesIn(checkpoints_folder_)) {
    const std::string folder = Folder(options_.path, name);
    if (!fs::is_directory(folder)) continue;
    if (name.starts_with('.') && RemoveUnread(folder)) continue;
    std::vector<int64_t> segments;
    try {
      segments = SegmentsOf(ReadCheckpoint(name).rows);
    } catch (const InvalidState&) {
      segments.resize(static_cast<size_t>(SegmentsInFiles()));
      std::iota(segments.begin(), segments.end(), 0);
    }
    Refer(name, std::move(segments));
  }
}

std::vector<std::string> SsdStoreImpl::Checkpoints() const {
  RequireProcess();
  std::shared_lock guard(lock_);
  std::vector<std::string> names;
  if (options_.create) {
    for (const auto& [name, segments] : checkpoints_) names.push_back(name);
  } else {  // a writer may add some at any time
    names = NamesIn(checkpoints_folder_);
    std::erase_if(names, [&](const std::string& name) {
      return !fs::is_directory(Folder(options_.path, name));
    });
  }
  std::erase_if(names, [](const std::string& name) { return name.starts_with('.'); });
  std::sort(names.begin(), names.end());
  return names;
}

void SsdStoreImpl::WriteCheckpoint(const std::string& folder,
                                   const std::vector<uint64_t>& sorted_rows) {
  std::string list, sums;
  for (size_t begin = 0, end; begin < sorted_rows.size(); begin = end) {
    const int64_t chunk = layout_.ChunkOf(static_cast<int64_t>(sorted_rows[begin]));
    const auto next = static_cast<uint64_t>((chunk + 1) * layout_.rows_per_chunk());
    end = static_cast<size_t>(
        std::lower_bound(sorted_rows.begin() + static_cast<std::ptrdiff_t>(begin),
                         sorted_rows.end(), next) -
        sorted_rows.begin());
    char name[32];
    std::snprintf(name, sizeof(name), "index-%012" PRId64, chunk);
    const size_t bytes = 8 * (end - begin);
    WriteFile(folder + "/" + name, sorted_rows.data() + begin, bytes);
    bytes_written_ += static_cast<int64_t>(bytes);
    list += std::string(name) + "\n";
    sums += Line(name, bytes, Crc32(0, sorted_rows.data() + begin, bytes));
  }
  sums += Line("LIST", list.size(), Crc32(0, list.data(), list.size()));
  WriteFile(folder + "/LIST", list.data(), list.size());
  WriteFile(folder + "/" + kSums, sums.data(), sums.size());
  SyncDirectory(folder);
}

// A name that is unused both in memory and in the directory.
std::string SsdStoreImpl::FreshName() const {
  for (int64_t i = 0;; ++i) {
    std::string name = kUnnamed + std::to_string(i);
    if (!checkpoints_.contains(name) && !fs::exists(Folder(options_.path, name))) return name;
  }
}

void SsdStoreImpl::SaveCheckpoint(const std::string& name) {
  RequireCheckpointName(name);
  RequireProcess();
  std::unique_lock guard(lock_);
  RequireWritable();
  Publish(name);
}

void SsdStoreImpl::Publish(const std::string& name) {
  FlushOpen();
  SyncRows();
  std::vector<uint64_t> rows;
  rows.reserve(static_cast<size_t>(index_.size()));
  index_.ForEach([&](const SsdIndex::Entry& entry) { rows.push_back(entry.row); });
  std::sort(rows.begin(), rows.end());
  const std::string folder = Folder(options_.path, name);
  const std::string draft = FreshName(), draft_folder = Folder(options_.path, draft);
  // Once it is published, running out of memory must not look like a failure.
  const std::string done = "snapshot '" + name + "' of " + Describe() + " is published";
  std::string published = name, unnamed = draft;
  try {
    fs::create_directory(draft_folder);
    WriteCheckpoint(draft_folder, rows);
    Refer(draft, SegmentsOf(rows));
    // Atomic in either case: the older checkpoint of this name exists until the new one does.
    const unsigned exchange = fs::exists(folder) ? RENAME_EXCHANGE : 0;
    if (renameat2(AT_FDCWD, draft_folder.c_str(), AT_FDCWD, folder.c_str(), exchange) != 0) {
      ThrowIo("renaming " + draft_folder);
    }
  } catch (...) {
    Unrefer(draft);
    try {
      RemoveAll(draft_folder);
    } catch (const std::exception&) {
      // Whoever opens the store next removes it.
    }
    throw;
  }
  Exchange(std::move(published), std::move(unnamed));
  Settle(done);
}

// Follows the directory, which has exchanged two names. One of them may have been free.
void SsdStoreImpl::Exchange(std::string a, std::string b) noexcept {
  auto first = checkpoints_.extract(a), second = checkpoints_.extract(b);
  if (first && second) {
    std::swap(first.key(), second.key());
  } else if (first) {
    first.key() = std::move(b);
  } else if (second) {
    second.key() = std::move(a);
  }
  if (first) checkpoints_.insert(std::move(first));
  if (second) checkpoints_.insert(std::move(second));
}

// Makes new names durable, then removes checkpoints that nobody can load any more. Their segments
// stay until then: after a power failure the old names may be back.
void SsdStoreImpl::Settle(const std::string& done) {
  try {
    SyncDirectory(checkpoints_folder_);
  } catch (const std::system_error& error) {
    ThrowIo(error.code().value(),
            done + ", but a power failure may undo that: fsync of " + checkpoints_folder_);
  }
  for (auto next = checkpoints_.begin(); next != checkpoints_.end();) {
    const std::string& name = (next++)->first;
    if (!name.starts_with('.')) continue;
    try {
      if (RemoveUnread(Folder(options_.path, name))) Unrefer(name);
    } catch (const std::exception&) {
      // The next call tries again.
    }
  }
}

void SsdStoreImpl::DeleteCheckpoint(const std::string& name) {
  RequireCheckpointName(name);
  RequireProcess();
  std::unique_lock guard(lock_);
  RequireWritable();
  if (!checkpoints_.contains(name)) {
    ThrowIo(ENOENT, Describe() + " has no snapshot '" + name + "'");
  }
  std::string deleted = name, unnamed = FreshName();
  const std::string done = "snapshot '" + name + "' of " + Describe() + " is deleted";
  fs::rename(Folder(options_.path, name), Folder(options_.path, unnamed));
  Exchange(std::move(deleted), std::move(unnamed));
  Settle(done);
}

// While the lock is held, no writer reuses the segments of the checkpoint.
FileLock SsdStoreImpl::LockCheckpoint(const std::string& name) const {
  const std::string list = Folder(options_.path, name) + "/LIST";
  while (true) {
    const int fd = OpenRegular(list, O_RDONLY);
    if (fd < 0 && errno == ENOENT) {
      ThrowIo(ENOENT, Describe() + " has no snapshot '" + name + "'");
    }
    if (fd < 0) ThrowIo("opening " + list);
    FileLock lock(fd, LOCK_SH, list);
    struct stat locked, named;
    if (fstat(fd, &locked) == 0 && stat(list.c_str(), &named) == 0 &&
        locked.st_ino == named.st_ino && locked.st_dev == named.st_dev) {
      return lock;
    }
    // A writer replaced or deleted it between open and lock.
  }
}

// Reads the keys and checksums of one segment's rows into the index. OneEmbedding's rows have no
// checksum: their present bytes count as right, and a store that writes gives them one.
void SsdStoreImpl::LoadSegment(int64_t segment, std::span<const uint64_t> rows, bool has_checksums,
                               SsdIndex& index) const {
  const int64_t first = layout_.FirstRow(segment), chunk = layout_.ChunkOf(first);
  const int64_t in_chunk = first % layout_.rows_per_chunk();
  const auto last = static_cast<int64_t>(rows.back());
  const auto places = static_cast<size_t>(last - first + 1);
  // How much of a file there is, up to `end` bytes.
  const auto kept = [&](SsdFiles::Kind kind, int64_t end, bool required) {
    const int fd = files_->Get(kind, chunk, false);
    const int64_t there = fd < 0 ? 0 : std::min(FileBytes(fd), end);
    if (there < end && required) {
      throw InvalidState(Describe() + " is damaged: " + files_->NameOf(kind, chunk) +
                         (fd < 0 ? " is missing" : " ends before row " + std::to_string(last)));
    }
    return there;
  };
  const auto read = [&](SsdFiles::Kind kind, void* data, int64_t bytes, int64_t offset) {
    if (bytes <= 0) return;
    ReadWholeAt(files_->Get(kind, chunk, false), data, static_cast<size_t>(bytes), offset,
                files_->NameOf(kind, chunk));
  };
  kept(SsdFiles::kValues, layout_.ValueOffset(last) + layout_.row_bytes, true);
  const int64_t key_end = (in_chunk + last - first + 1) * layout_.key_bytes;
  kept(SsdFiles::kKeys, key_end, true);
  std::vector<std::byte> keys(places * static_cast<size_t>(layout_.key_bytes));
  read(SsdFiles::kKeys, keys.data(), static_cast<int64_t>(keys.size()),
       in_chunk * layout_.key_bytes);
  constexpr auto kMetaBytes = static_cast<int64_t>(sizeof(RowMeta));
  std::vector<RowMeta> meta(places);
  const int64_t meta_there =
      kept(SsdFiles::kMeta, (in_chunk + last - first + 1) * kMetaBytes, has_checksums);
  read(SsdFiles::kMeta, meta.data(), meta_there - in_chunk * kMetaBytes, in_chunk * kMetaBytes);
  SegmentRows whole;
  for (uint64_t row : rows) {
    const auto place = static_cast<size_t>(static_cast<int64_t>(row) - first);
    int64_t key;
    if (layout_.key_bytes == 8) {
      std::memcpy(&key, keys.data() + 8 * place, 8);
    } else {
      int32_t narrow;
      std::memcpy(&narrow, keys.data() + 4 * place, 4);
      key = narrow;
    }
    if (index.Find(key)) {
      throw InvalidState(Describe() + " is damaged: key " + std::to_string(key) +
                         " is in a snapshot twice, again at row " + std::to_string(row));
    }
    if (!has_checksums && meta[place].checksum == 0) {
      if (!whole.values) ReadSegment(segment, whole);
      const std::byte* data = whole.values.get() + layout_.PlaceOffset(static_cast<int64_t>(place));
      meta[place] = {1, MetaChecksum(RowChecksum(key, data, layout_.row_bytes), 1)};
    }
    SsdIndex::Entry& entry = index.Insert(key);
    entry.row = static_cast<uint32_t>(row);
    entry.checksum = MetaChecksum(meta[place].checksum, meta[place].score);
  }
  if (whole.values && options_.create) {
    WriteWhole(files_->Get(SsdFiles::kMeta, chunk, true), meta.data(), places * sizeof(RowMeta),
               in_chunk * kMetaBytes, files_->NameOf(SsdFiles::kMeta, chunk));
  }
}

void SsdStoreImpl::LoadCheckpoint(const std::string& name) {
  RequireCheckpointName(name);
  RequireProcess();
  std::unique_lock guard(lock_);
  RequireUsable();
  FileLock reading;
  if (!options_.create) reading = LockCheckpoint(name);
  const auto [rows, has_checksums] = ReadCheckpoint(name);
  const std::vector<int64_t> segments = SegmentsOf(rows);
  if (options_.create) {
    const auto known = checkpoints_.find(name);
    if (known == checkpoints_.end() || !std::includes(known->second.begin(), known->second.end(),
                                                      segments.begin(), segments.end())) {
      throw InvalidState(
          "snapshot '" + name + "' of " + Describe() +
          " was put there or changed while the store was open: open the store again");
    }
  } else if (!segments.empty() && segments.back() >= static_cast<int64_t>(segments_.size())) {
    GrowSegments(static_cast<size_t>(segments.back()) + 1);
  }
  SsdIndex index;
  std::vector<std::pair<int64_t, uint32_t>> live;
  for (size_t begin = 0, end; begin < rows.size(); begin = end) {
    const int64_t segment = layout_.SegmentOf(static_cast<int64_t>(rows[begin]));
    const auto next = static_cast<uint64_t>(layout_.FirstRow(segment) + layout_.rows_per_segment());
    end = static_cast<size_t>(
        std::lower_bound(rows.begin() + static_cast<std::ptrdiff_t>(begin), rows.end(), next) -
        rows.begin());
    // ReadSegment needs the number of blocks.
    Segment& place = segments_[static_cast<size_t>(segment)];
    const auto blocks = static_cast<uint32_t>(
        (static_cast<int64_t>(rows[end - 1]) - layout_.FirstRow(segment)) / layout_.rows_per_block +
        1);
    place.blocks = std::max(place.blocks, blocks);
    LoadSegment(segment, {rows.data() + begin, end - begin}, has_checksums, index);
    live.emplace_back(segment, static_cast<uint32_t>(end - begin));
  }
  ForgetRows();
  index_ = std::move(index);
  for (const uint64_t row : rows) named_[row / kNamedPerWord] |= NamedBit(row);
  for (const auto& [segment, count] : live) {
    Segment& place = segments_[static_cast<size_t>(segment)];
    place.live = count;
    place.state = State::kWritten;
    if (!has_checksums) place.synced = false;  // LoadSegment may have given it some
  }
  if (options_.create) return;
  WaitForReaders();  // of the rows before
  reading_ = std::move(reading);
}

}  // namespace embstore
