#include "file_io.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "embstore/types.h"

namespace embstore {

Closer::~Closer() { close(fd); }

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
    if (got == 0) {
      ThrowIo(EIO, "reading " + path + ": expected " + std::to_string(bytes) + " bytes at offset " +
                       std::to_string(offset) + ", found " + std::to_string(at));
    }
    at += static_cast<size_t>(got);
  }
}

int64_t FileBytes(int fd) {
  struct stat status;
  if (fstat(fd, &status) != 0) ThrowIo("fstat");
  return status.st_size;
}

void WriteFile(const std::string& path, const void* data, size_t bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd < 0) ThrowIo("creating " + path);
  const Closer closer{fd};
  WriteWhole(fd, data, bytes, 0, path);
  if (fsync(fd) != 0) ThrowIo("fsync of " + path);
}

int OpenRegular(const std::string& path, int flags) {
  // O_NONBLOCK: without it, opening a FIFO waits for its other end.
  const int fd = open(path.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0644);
  if (fd < 0 && errno != EISDIR && errno != ENXIO && errno != ELOOP) return -1;
  struct stat status;
  if (fd < 0 || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    if (fd >= 0) close(fd);
    throw InvalidState(path + " should be a regular file but is not");
  }
  if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) != 0) {
    const int error = errno;
    close(fd);
    ThrowIo(error, "opening " + path);
  }
  return fd;
}

std::string ReadFile(const std::string& path, int64_t max_bytes) {
  const int fd = OpenRegular(path, O_RDONLY);
  if (fd < 0) ThrowIo("opening " + path);
  const Closer closer{fd};
  const int64_t bytes = FileBytes(fd);
  if (bytes > max_bytes) {
    throw InvalidState(path + ": expected at most " + std::to_string(max_bytes) + " bytes, found " +
                       std::to_string(bytes));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  ReadWholeAt(fd, text.data(), text.size(), 0, path);
  return text;
}

void SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) ThrowIo("opening " + path);
  const int failed = fsync(fd);
  const int error = errno;
  close(fd);
  if (failed) ThrowIo(error, "fsync of " + path);
}

std::vector<std::string> NamesIn(const std::string& directory) {
  struct Close {
    void operator()(DIR* opened) const { closedir(opened); }
  };
  const std::unique_ptr<DIR, Close> opened(opendir(directory.c_str()));
  if (!opened) ThrowIo("listing " + directory);
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* const entry = readdir(opened.get());
    if (!entry) break;
    names.emplace_back(entry->d_name);
  }
  if (errno != 0) ThrowIo("listing " + directory);
  std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
  return names;
}

void RemoveAll(const std::string& path) {
  if (unlink(path.c_str()) == 0 || errno == ENOENT) return;
  if (errno != EISDIR) ThrowIo("removing " + path);
  for (const std::string& name : NamesIn(path)) RemoveAll(path + "/" + name);
  if (rmdir(path.c_str()) != 0) ThrowIo("removing " + path);
}

}  // namespace embstore
