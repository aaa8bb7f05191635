#include "ssd_files.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <system_error>

namespace embstore {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 30;
constexpr int64_t kSegmentBytes = int64_t{1} << 20;

// A flock belongs to the open file, which a forked child shares: without this the directory would
// stay locked for as long as, say, a worker of a data loader lives.
class ForkedLocks {
 public:
  static void Add(int fd) {
    std::lock_guard guard(Mutex());
    static const int registered = pthread_atfork(nullptr, nullptr, CloseInChild);
    (void)registered;
    Open().insert(fd);
  }
  static void Remove(int fd) {
    std::lock_guard guard(Mutex());
    Open().erase(fd);
  }

 private:
  static std::mutex& Mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::set<int>& Open() {
    static auto* open = new std::set<int>;
    return *open;
  }
  static void CloseInChild() {
    for (int fd : Open()) close(fd);
  }
};

}  // namespace

void ThrowIo(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

void ThrowIo(const std::string& what) { ThrowIo(errno, what); }

void WriteWhole(int fd, const void* data, size_t bytes, int64_t offset, const std::string& path) {
  const auto* from = static_cast<const std::byte*>(data);
  for (size_t at = 0; at < bytes;) {
    const ssize_t put = pwrite(fd, from + at, bytes - at, offset + static_cast<int64_t>(at));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) ThrowIo("writing " + path);
    at += static_cast<size_t>(put);
  }
}

void ReadWholeAt(int fd, void* data, size_t bytes, int64_t offset, const std::string& path) {
  auto* to = static_cast<std::byte*>(data);
  for (size_t at = 0; at < bytes;) {
    const ssize_t got = pread(fd, to + at, bytes - at, offset + static_cast<int64_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) ThrowIo("reading " + path);
    if (got == 0) ThrowIo(EIO, path + " ends early, reading");
    at += static_cast<size_t>(got);
  }
}

int64_t FileBytes(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) ThrowIo("fstat");
  return status.st_size;
}

void WriteFile(const std::string& path, const void* data, size_t bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) ThrowIo("creating " + path);
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  } closer{fd};
  WriteWhole(fd, data, bytes, 0, path);
  if (fsync(fd) != 0) ThrowIo("fsync of " + path);
}

std::string ReadFile(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) ThrowIo(errno ? errno : ENOENT, "opening " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) ThrowIo("opening " + path);
  const int failed = fsync(fd);
  const int error = errno;
  close(fd);
  if (failed) ThrowIo(error, "fsync of " + path);
}

void RequireSnapshotName(const std::string& name) {
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
}

SsdFiles::SsdFiles(const SsdStoreOptions& options, const SsdLayout& layout)
    : path_(options.path),
      direct_(options.direct && options.create),
      writable_(options.create),
      chunk_bytes_(layout.chunk_bytes()) {
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
  const std::string lock = path_ + "/LOCK";
  lock_fd_ = open(lock.c_str(), (options.create ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC, 0644);
  if (lock_fd_ < 0) ThrowIo("opening " + lock);
  try {
    if (flock(lock_fd_, (options.create ? LOCK_EX : LOCK_SH) | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        ThrowIo(EWOULDBLOCK, "the store " + path_ + " is locked: some process has it open");
      }
      ThrowIo("locking " + lock);
    }
    CheckSizes(options, layout);
    LearnAlignment();
    if (layout.block_bytes % alignment_ != 0) {
      direct_ = false;
      alignment_ = 1;
    }
  } catch (...) {
    close(lock_fd_);
    throw;
  }
  ForkedLocks::Add(lock_fd_);
}

SsdFiles::~SsdFiles() {
  for (const Chunk& chunk : chunks_) {
    for (int fd : chunk.fds) {
      if (fd >= 0) close(fd);
    }
  }
  ForkedLocks::Remove(lock_fd_);
  close(lock_fd_);
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
      WriteFile(file, text.data(), text.size());
    } else if (const std::string there = ReadFile(file); std::atoll(there.c_str()) != value) {
      throw InvalidArgument("the store " + path_ + " was made with " + name + " " +
                            there.substr(0, there.find('\n')) +
                            " but is opened with: " + std::to_string(value));
    }
  }
}

// O_DIRECT needs aligned offsets, and some filesystems do not have it: a trial file tells.
void SsdFiles::LearnAlignment() {
  if (!direct_) return;
  const std::string trial = path_ + "/.direct";
  const int fd = open(trial.c_str(), O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0644);
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
    fd = open(name.c_str(),
              (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC | direct | (create ? O_CREAT : 0), 0644);
    if (fd < 0 && (create || errno != ENOENT)) ThrowIo("opening " + name);
  }
  return fd;
}

const std::byte* SsdFiles::Mapped(int64_t chunk) {
  const int fd = Get(kValues, chunk, false);
  if (fd < 0) return nullptr;
  std::lock_guard guard(mutex_);
  auto& mapped = chunks_[static_cast<size_t>(chunk)].mapped;
  if (!mapped) mapped.emplace(fd, chunk_bytes_);
  return mapped->data();
}

void SsdFiles::Sync() {
  std::lock_guard guard(mutex_);
  for (size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    for (int kind = 0; kind < 3; ++kind) {
      const int fd = chunks_[chunk].fds[kind];
      if (fd >= 0 && fdatasync(fd) != 0) {
        ThrowIo("fsync of " + NameOf(static_cast<Kind>(kind), static_cast<int64_t>(chunk)));
      }
    }
  }
  for (const char* folder : {"/values", "/keys", "/meta"}) SyncDirectory(path_ + folder);
}

}  // namespace embstore
