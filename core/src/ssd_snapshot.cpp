// Snapshots of an SSD store: lists of row numbers, published by rename.
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <filesystem>
#include <limits>
#include <shared_mutex>
#include <sstream>
#include <unordered_set>

#include "ssd_store_impl.h"

namespace embstore {
namespace {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "files hold little-endian numbers");

constexpr const char* kSums = "CHECKSUMS";
constexpr const char* kUnfinished = ".unfinished-";

std::string Folder(const std::string& path, const std::string& name) {
  return path + "/snapshots/" + name;
}

std::string Line(const std::string& name, size_t bytes, uint32_t checksum) {
  char text[64];
  std::snprintf(text, sizeof(text), " %zu %08" PRIx32 "\n", bytes, checksum);
  return name + text;
}

}  // namespace

// Row numbers in ascending order. A damaged file of a snapshot is named in the exception.
std::vector<uint64_t> SsdStoreImpl::ReadSnapshot(const std::string& name, bool verify) const {
  const std::string folder = Folder(options_.path, name);
  if (!fs::is_directory(folder)) {
    ThrowIo(ENOENT, Describe() + " has no snapshot '" + name + "'");
  }
  const std::string list = ReadFile(folder + "/LIST");
  // Of the original's snapshots there are no checksums.
  const bool has_sums = fs::exists(folder + "/" + kSums);
  const std::string sums = has_sums && verify ? ReadFile(folder + "/" + kSums) : std::string();
  const auto check = [&](const std::string& file, const std::string& data) {
    const std::string line = Line(file, data.size(), Crc32(0, data.data(), data.size()));
    if (has_sums && verify && ("\n" + sums).find("\n" + line) == std::string::npos) {
      throw InvalidState("snapshot '" + name + "' of " + Describe() + " is damaged: " + folder +
                         "/" + file + " does not match its checksum");
    }
  };
  check("LIST", list);
  std::vector<uint64_t> rows;
  std::istringstream lines(list);
  for (std::string file; std::getline(lines, file);) {
    if (file.empty()) continue;
    const std::string data = ReadFile(folder + "/" + file);
    check(file, data);
    if (data.size() % 8 != 0) {
      throw InvalidState("snapshot '" + name + "' of " + Describe() + " is damaged: " + folder +
                         "/" + file + " has a broken size: " + std::to_string(data.size()));
    }
    const size_t at = rows.size();
    rows.resize(at + data.size() / 8);
    std::memcpy(rows.data() + at, data.data(), data.size());
  }
  std::sort(rows.begin(), rows.end());
  if (!rows.empty() && rows.back() >= kNoRow) {
    throw InvalidState("snapshot '" + name + "' of " + Describe() +
                       " names a row beyond 2^32: " + std::to_string(rows.back()));
  }
  return rows;
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
  for (int64_t number : segments) {
    if (static_cast<size_t>(number) >= segments_.size()) {
      const size_t old = segments_.size();
      segments_.resize(static_cast<size_t>(number) + 1);
      for (size_t i = old; i < segments_.size(); ++i) free_.insert(static_cast<int64_t>(i));
    }
    Segment& segment = segments_[static_cast<size_t>(number)];
    ++segment.snapshots;
    if (segment.state == State::kFree) {
      free_.erase(number);
      segment.state = State::kWritten;
    }
  }
  snapshots_[name] = std::move(segments);
}

void SsdStoreImpl::Unrefer(const std::string& name) {
  const auto found = snapshots_.find(name);
  if (found == snapshots_.end()) return;
  for (int64_t number : found->second) {
    --segments_[static_cast<size_t>(number)].snapshots;
    Retire(number);
  }
  snapshots_.erase(found);
}

// What is there when the directory is opened. A snapshot that cannot be read is left for
// LoadSnapshot to complain about; what can be read of it is kept.
void SsdStoreImpl::FindSnapshots() {
  for (const auto& entry : fs::directory_iterator(options_.path + "/snapshots")) {
    const std::string name = entry.path().filename();
    if (name.starts_with(kUnfinished)) {
      if (options_.create) fs::remove_all(entry.path());
      continue;
    }
    std::vector<uint64_t> rows;
    try {
      rows = ReadSnapshot(name, /*verify=*/false);
    } catch (const std::runtime_error&) {
    }
    Refer(name, SegmentsOf(rows));
  }
}

std::vector<std::string> SsdStoreImpl::Snapshots() const {
  std::shared_lock guard(lock_);
  std::vector<std::string> names;
  for (const auto& [name, segments] : snapshots_) names.push_back(name);
  return names;
}

void SsdStoreImpl::WriteSnapshot(const std::string& folder,
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

void SsdStoreImpl::Snapshot(const std::string& name) {
  RequireSnapshotName(name);
  std::unique_lock guard(lock_);
  RequireWritable();
  FlushOpen();
  files_->Sync();
  std::vector<uint64_t> rows;
  rows.reserve(static_cast<size_t>(index_.size()));
  index_.ForEach([&](const SsdIndex::Entry& entry) { rows.push_back(entry.row); });
  std::sort(rows.begin(), rows.end());
  const std::string snapshots = options_.path + "/snapshots";
  const std::string unfinished = Folder(options_.path, kUnfinished + name);
  const std::string folder = Folder(options_.path, name);
  fs::remove_all(unfinished);
  fs::create_directory(unfinished);
  WriteSnapshot(unfinished, rows);
  // One step in either case: an older snapshot of this name is there until the new one is.
  const unsigned exchange = fs::exists(folder) ? RENAME_EXCHANGE : 0;
  if (renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, folder.c_str(), exchange) != 0) {
    ThrowIo("renaming " + unfinished);
  }
  SyncDirectory(snapshots);
  const std::vector<int64_t> segments = SegmentsOf(rows);
  Unrefer(name);
  Refer(name, segments);
  if (exchange) fs::remove_all(unfinished);
}

void SsdStoreImpl::DeleteSnapshot(const std::string& name) {
  RequireSnapshotName(name);
  std::unique_lock guard(lock_);
  RequireWritable();
  if (!snapshots_.contains(name)) {
    ThrowIo(ENOENT, Describe() + " has no snapshot '" + name + "'");
  }
  const std::string doomed = Folder(options_.path, kUnfinished + name);
  fs::remove_all(doomed);
  fs::rename(Folder(options_.path, name), doomed);
  SyncDirectory(options_.path + "/snapshots");
  fs::remove_all(doomed);
  Unrefer(name);
}

// Reads keys and checksums of the rows of one segment into the index.
void SsdStoreImpl::LoadSegment(int64_t segment, std::span<const uint64_t> rows,
                               SsdIndex& index) const {
  const int64_t first = layout_.FirstRow(segment), chunk = layout_.ChunkOf(first);
  const int64_t in_chunk = first % layout_.rows_per_chunk();
  const auto places = static_cast<size_t>(static_cast<int64_t>(rows.back()) - first + 1);
  const auto read = [&](SsdFiles::Kind kind, void* data, size_t bytes, int64_t offset) {
    const int fd = files_->Get(kind, chunk, false);
    if (fd < 0) ThrowIo(ENOENT, "opening " + files_->NameOf(kind, chunk));
    ReadWholeAt(fd, data, bytes, offset, files_->NameOf(kind, chunk));
  };
  const int values = files_->Get(SsdFiles::kValues, chunk, false);
  const int64_t end = layout_.ValueOffset(static_cast<int64_t>(rows.back())) + layout_.row_bytes;
  if (values < 0 || FileBytes(values) < end) {
    throw InvalidState(Describe() + " is damaged: " + files_->NameOf(SsdFiles::kValues, chunk) +
                       " ends before row " + std::to_string(rows.back()));
  }
  std::vector<std::byte> keys(places * static_cast<size_t>(layout_.key_bytes));
  read(SsdFiles::kKeys, keys.data(), keys.size(), in_chunk * layout_.key_bytes);
  std::vector<RowMeta> meta;
  SegmentRows whole;
  if (files_->Get(SsdFiles::kMeta, chunk, false) >= 0) {
    meta.resize(places);
    read(SsdFiles::kMeta, meta.data(), places * sizeof(RowMeta),
         in_chunk * static_cast<int64_t>(sizeof(RowMeta)));
  } else {
    whole = ReadSegment(segment);  // files of the original: what is there now is taken as right
  }
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
    SsdIndex::Entry& entry = index.Insert(key);
    entry.row = static_cast<uint32_t>(row);
    const int64_t offset = layout_.ValueOffset(static_cast<int64_t>(row));
    entry.checksum =
        meta.empty() ? RowChecksum(key, whole.values.get() + (offset - layout_.ValueOffset(first)),
                                   layout_.row_bytes)
                     : meta[place].checksum;
  }
}

void SsdStoreImpl::LoadSnapshot(const std::string& name) {
  RequireSnapshotName(name);
  std::unique_lock guard(lock_);
  RequireUsable();
  const std::vector<uint64_t> rows = ReadSnapshot(name, /*verify=*/true);
  SsdIndex index;
  std::vector<std::pair<int64_t, uint32_t>> live;
  for (size_t begin = 0, end; begin < rows.size(); begin = end) {
    const int64_t segment = layout_.SegmentOf(static_cast<int64_t>(rows[begin]));
    const auto next = static_cast<uint64_t>(layout_.FirstRow(segment) + layout_.rows_per_segment());
    end = static_cast<size_t>(
        std::lower_bound(rows.begin() + static_cast<std::ptrdiff_t>(begin), rows.end(), next) -
        rows.begin());
    // ReadSegment wants to know how much of it there is.
    Segment& place = segments_[static_cast<size_t>(segment)];
    const auto blocks = static_cast<uint32_t>(
        (static_cast<int64_t>(rows[end - 1]) - layout_.FirstRow(segment)) / layout_.rows_per_block +
        1);
    place.blocks = std::max(place.blocks, blocks);
    LoadSegment(segment, {rows.data() + begin, end - begin}, index);
    live.emplace_back(segment, static_cast<uint32_t>(end - begin));
  }
  ForgetRows();
  index_ = std::move(index);
  for (const auto& [segment, count] : live) {
    segments_[static_cast<size_t>(segment)].live = count;
  }
}

}  // namespace embstore
