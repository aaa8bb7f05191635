#include "ssd_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "file_io.h"

namespace embstore {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 30;
constexpr int64_t kSegmentBytes = int64_t{1} << 20;

constexpr int64_t kMaxSizeFileBytes = 64;

// Never leaves a partial file under its name.
void WriteWholeFile(const std::string& path, const std::string& text) {
  const std::string draft = path + ".unfinished";
  WriteFile(draft, text.data(), text.size());
  std::filesystem::rename(draft, path);
}

}  // namespace

void RequireCheckpointName(const std::string& name) {
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    throw InvalidArgument(
        "name of a snapshot should be a file name that does not begin with a dot "
        "but is: '" +
        name + "'");
  }
}

SsdLayout::SsdLayout(const SsdStoreOptions& options)
    : row_bytes(options.row_bytes), key_bytes(options.key_bytes) {
  const int64_t physical = options.physical_block_bytes;
  if (physical != 512 && physical != 4096) {
    throw InvalidArgument("physical_block_bytes should be 512 or 4096 but is: " +
                          std::to_string(physical));
  }
  if (key_bytes != 4 && key_bytes != 8) {
    throw InvalidArgument("key_bytes should be 4 or 8 but is: " + std::to_string(key_bytes));
  }
  if (row_bytes < 1 || row_bytes > (int64_t{1} << 24)) {
    throw InvalidArgument("row_bytes should be between 1 and 2^24 but is: " +
                          std::to_string(row_bytes));
  }
  block_bytes = std::max(physical, (row_bytes + physical - 1) / physical * physical);
  rows_per_block = block_bytes / row_bytes;
  blocks_per_chunk = kChunkBytes / block_bytes;
  blocks_per_segment = std::max<int64_t>(1, kSegmentBytes / block_bytes);
  segments_per_chunk = blocks_per_chunk / blocks_per_segment;
  segments_fill_chunks = segments_per_chunk * blocks_per_segment == blocks_per_chunk;
}

SsdFiles::SsdFiles(const SsdStoreOptions& options, const SsdLayout& layout)
    : path_(options.path),
      layout_(layout),
      direct_(options.direct && options.create),
      writable_(options.create),
      process_(getpid()) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (path_.empty()) throw InvalidArgument("path should be a directory but is empty");
  if (!options.create && !fs::is_regular_file(path_ + "/LOCK", error)) {
    ThrowIo(ENOENT, "opening the store " + path_);
  }
  for (const char* folder : {"", "/values", "/keys", "/meta", "/snapshots"}) {
    if (!options.create) break;
    fs::create_directories(path_ + folder, error);
    if (error) ThrowIo(error.value(), "creating " + path_ + folder);
  }
  if (options.create) {
    const std::string lock = path_ + "/LOCK";
    const int fd = OpenRegular(lock, O_RDWR | O_CREAT);
    if (fd < 0) ThrowIo("opening " + lock);
    try {
      lock_ = FileLock(fd, LOCK_EX | LOCK_NB, lock);
    } catch (const std::system_error& failed) {
      if (failed.code().value() != EWOULDBLOCK) throw;
      ThrowIo(EWOULDBLOCK,
              "the store " + path_ + " is locked: some process has it open for writing");
    }
  }
  CheckFormat();
  CheckSizes(options, layout);
  LearnAlignment();
  if (layout.block_bytes % alignment_ != 0) {
    direct_ = false;
    alignment_ = 1;
  }
}

SsdFiles::~SsdFiles() {
  if (getpid() != process_) return;
  for (const Chunk& chunk : chunks_) {
    for (const Kind kind : {kValues, kKeys, kMeta}) {
      if (chunk.maps[kind]) munmap(chunk.maps[kind], static_cast<size_t>(MappedBytes(kind)));
      if (chunk.fds[kind] >= 0) close(chunk.fds[kind]);
    }
  }
}

// A new directory gets its FORMAT file before anything else. If the file is lost later, rows no
// longer match their checksums and are refused as damaged.
void SsdFiles::CheckFormat() {
  const std::string file = path_ + "/FORMAT";
  if (writable_ && !std::filesystem::exists(path_ + "/KEY_SIZE")) {
    WriteWholeFile(file, "2\n");
  } else if (!std::filesystem::exists(file)) {
    return;
  }
  const std::string text = ReadFile(file, kMaxSizeFileBytes);
  if (text != "2\n") {
    throw InvalidArgument("the store " + path_ + " has the format " +
                          text.substr(0, text.find('\n')) +
                          " but this version of embstore reads only: 2");
  }
  format_ = 2;
}

void SsdFiles::CheckSizes(const SsdStoreOptions& options, const SsdLayout& layout) {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"KEY_SIZE", layout.key_bytes},
               {"VALUE_SIZE", layout.row_bytes},
               {"PHYSICAL_BLOCK_SIZE", options.physical_block_bytes},
               {"NUM_LOGICAL_BLOCKS_PER_CHUNK", layout.blocks_per_chunk}};
  for (const auto& [name, value] : sizes) {
    const std::string file = path_ + "/" + name;
    const std::string text = std::to_string(value) + "\n";
    if (options.create && !std::filesystem::exists(file)) {
      WriteWholeFile(file, text);
    } else if (const std::string there = ReadFile(file, kMaxSizeFileBytes);
               std::atoll(there.c_str()) != value) {
      throw InvalidArgument("the store " + path_ + " was made with " + name + " " +
                            there.substr(0, there.find('\n')) +
                            " but is opened with: " + std::to_string(value));
    }
  }
}

// O_DIRECT needs aligned offsets, and some filesystems lack it: a trial file tells.
void SsdFiles::LearnAlignment() {
  if (!direct_) return;
  const std::string trial = path_ + "/.direct";
  const int fd = open(trial.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_DIRECT | O_CLOEXEC, 0644);
  direct_ = false;
  if (fd < 0) {
    unlink(trial.c_str());
    return;
  }
  alignas(4096) std::byte page[4096] = {};
  if (pwrite(fd, page, sizeof(page), 0) == static_cast<ssize_t>(sizeof(page))) {
    direct_ = true;
    alignment_ = pread(fd, page, 512, 512) == 512 ? 512 : 4096;
  }
  close(fd);
  unlink(trial.c_str());
}

std::string SsdFiles::NameOf(Kind kind, int64_t chunk) const {
  constexpr const char* kFolders[] = {"/values/value-", "/keys/key-", "/meta/meta-"};
  char number[32];
  std::snprintf(number, sizeof(number), "%012lld", static_cast<long long>(chunk));
  return path_ + kFolders[kind] + number;
}

int SsdFiles::Get(Kind kind, int64_t chunk, bool create) {
  std::lock_guard guard(mutex_);
  if (static_cast<size_t>(chunk) >= chunks_.size()) chunks_.resize(static_cast<size_t>(chunk) + 1);
  int& fd = chunks_[static_cast<size_t>(chunk)].fds[kind];
  if (fd < 0) {
    const std::string name = NameOf(kind, chunk);
    const int direct = kind == kValues && direct_ ? O_DIRECT : 0;
    fd = OpenRegular(name, (writable_ ? O_RDWR : O_RDONLY) | direct | (create ? O_CREAT : 0));
    if (fd < 0 && (create || errno != ENOENT)) ThrowIo("opening " + name);
  }
  return fd;
}

int64_t SsdFiles::MappedBytes(Kind kind) const {
  if (kind == kValues) return layout_.blocks_per_chunk * layout_.block_bytes;
  const int64_t width = kind == kKeys ? layout_.key_bytes : int64_t{sizeof(RowMeta)};
  return layout_.rows_per_chunk() * width;
}

const std::byte* SsdFiles::Map(Kind kind, int64_t chunk) {
  const int fd = Get(kind, chunk, false);
  if (fd < 0) return nullptr;
  std::lock_guard guard(mutex_);
  std::byte*& map = chunks_[static_cast<size_t>(chunk)].maps[kind];
  if (!map) {
    const auto bytes = static_cast<size_t>(MappedBytes(kind));
    void* const data = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) return nullptr;
    madvise(data, bytes, MADV_RANDOM);    // rows are scattered: no read-ahead
    madvise(data, bytes, MADV_DONTFORK);  // the child of a fork cannot use the store
    map = static_cast<std::byte*>(data);
  }
  return map;
}

void SsdFiles::Touch(Kind kind, int64_t chunk, int64_t offset, int64_t bytes) {
#if defined(MADV_POPULATE_READ)
  const std::byte* const map = Map(kind, chunk);
  constexpr int64_t kPage = 4096;
  const int64_t begin = offset / kPage * kPage;
  if (!map) return;
  madvise(const_cast<std::byte*>(map) + begin, static_cast<size_t>(offset + bytes - begin),
          MADV_POPULATE_READ);  // a hint: older kernels lack it
#endif
}

std::map<int64_t, int64_t> SsdFiles::ValueBytes() const {
  constexpr std::string_view kPrefix = "value-";
  std::map<int64_t, int64_t> sizes;
  for (const std::string& name : NamesIn(path_ + "/values")) {
    int64_t chunk = 0;
    const char* end = name.data() + name.size();
    if (!name.starts_with(kPrefix)) continue;
    const auto number = std::from_chars(name.data() + kPrefix.size(), end, chunk);
    if (number.ec != std::errc() || number.ptr != end) continue;
    const std::string file = path_ + "/values/" + name;
    struct stat status;
    if (stat(file.c_str(), &status) != 0) ThrowIo("looking at " + file);
    if (S_ISREG(status.st_mode)) sizes[chunk] = status.st_size;
  }
  return sizes;
}

void SsdFiles::Sync() {
  std::vector<Chunk> chunks;
  {
    std::lock_guard guard(mutex_);  // released before the slow part
    chunks = chunks_;
  }
  for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
    for (int kind = 0; kind < 3; ++kind) {
      const int fd = chunks[chunk].fds[kind];
      if (fd >= 0 && fdatasync(fd) != 0) {
        ThrowIo("fdatasync of " + NameOf(static_cast<Kind>(kind), static_cast<int64_t>(chunk)));
      }
    }
  }
  for (const char* folder : {"", "/values", "/keys", "/meta"}) SyncDirectory(path_ + folder);
}

}  // namespace embstore
