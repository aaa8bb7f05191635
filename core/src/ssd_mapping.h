// Reads of a file through a mapping: no call of the kernel for a row that is in the page cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace embstore {

// A file that is mapped for reading, from its beginning and beyond its end, so that it may grow.
class MappedFile {
 public:
  MappedFile() = default;
  // Maps nothing where the file cannot be mapped.
  MappedFile(int fd, int64_t bytes);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  // Null: nothing is mapped. To be read by CopyMapped only.
  const std::byte* data() const { return data_; }

 private:
  const std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct MappedCopy {
  std::byte* to;
  const std::byte* from;
};

// Copies rows of `bytes` each, a few at a time so that their misses overlap. False: some are not
// there, since the file was cut short or the disk failed. The kernel tells by SIGBUS, for which
// there is a handler that passes on whatever does not come from here.
bool CopyMapped(std::span<const MappedCopy> copies, size_t bytes);

}  // namespace embstore
