// Reading and writing whole files and ranges, and what is in a directory. Failures are
// std::system_error that names the path.
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace embstore {

[[noreturn]] void ThrowIo(const std::string& what);             // std::system_error with errno
[[noreturn]] void ThrowIo(int error, const std::string& what);  // the same with `error`
void WriteWhole(int fd, const void* data, size_t bytes, int64_t offset, const std::string& path);
void ReadWholeAt(int fd, void* data, size_t bytes, int64_t offset, const std::string& path);
int64_t FileBytes(int fd);
// Opens a regular file; on failure returns -1 with errno set. Throws InvalidState for anything
// else: a FIFO would block, a device may have no end, a link may lead to a file that is not ours.
int OpenRegular(const std::string& path, int flags);
// Writes a new file and fsyncs it; follows no link.
void WriteFile(const std::string& path, const void* data, size_t bytes);
// The whole file; throws InvalidState when it has more than max_bytes.
std::string ReadFile(const std::string& path, int64_t max_bytes);
void SyncDirectory(const std::string& path);

// The iterators of std::filesystem end the process when memory runs out; these throw.
// The names in a directory, in any order.
std::vector<std::string> NamesIn(const std::string& directory);
// Removes a file, a link, or a directory with all that is in it; what is not there is removed.
void RemoveAll(const std::string& path);

// Closes a descriptor at the end of a scope.
struct Closer {
  int fd;
  ~Closer();
};

}  // namespace embstore
