// MappedFile: a whole file as read-only memory. Processes that map the same file share its pages.
//
// The file may be unlinked or renamed while it is mapped. It must not be truncated: reading beyond
// its end is a bus error. Map only files that are written once and published by rename.
//
// Thread safety: immutable after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace embstore {

class MappedFile {
 public:
  // Throws InvalidArgument when `path` is a link or not a regular file of exactly `bytes` bytes
  // (-1: any), and std::system_error when it cannot be opened or mapped.
  MappedFile(const std::string& path, int64_t bytes);
  // An open file, whose descriptor stays the caller's.
  MappedFile(int fd, int64_t bytes);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

  // CRC-32 of the bytes, computed on several threads.
  uint32_t Checksum() const;

 private:
  void Map(int fd, const std::string& path, int64_t bytes);

  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace embstore
