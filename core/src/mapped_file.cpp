#include "embstore/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "embstore/checksum.h"
#include "embstore/parallel.h"
#include "embstore/types.h"
#include "file_io.h"

namespace embstore {
namespace {

[[noreturn]] void Fail(const std::string& path, const char* what) {
  throw std::system_error(errno, std::generic_category(), path + ": cannot " + what);
}

}  // namespace

MappedFile::MappedFile(const std::string& path, int64_t bytes) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0 && errno == ELOOP) throw InvalidArgument(path + ": is a link");
  if (fd < 0) Fail(path, "be opened");
  const Closer file{fd};
  Map(fd, path, bytes);
}

MappedFile::MappedFile(int fd, int64_t bytes) { Map(fd, "file in memory", bytes); }

void MappedFile::Map(int fd, const std::string& path, int64_t bytes) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) Fail(path, "be examined");
  if (!S_ISREG(facts.st_mode)) throw InvalidArgument(path + ": is not a regular file");
  if (bytes >= 0 && facts.st_size != bytes) {
    throw InvalidArgument(path + ": expected " + std::to_string(bytes) + " bytes, found " +
                          std::to_string(facts.st_size));
  }
  size_ = static_cast<size_t>(facts.st_size);
  if (size_ == 0) return;
  void* data = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) Fail(path, "be mapped");
  madvise(data, size_, MADV_RANDOM);  // lookups touch scattered rows: no read-ahead
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::byte*>(data_), size_);
}

uint32_t MappedFile::Checksum() const {
  constexpr size_t kPartBytes = size_t{8} << 20;
  const size_t parts = (size_ + kPartBytes - 1) / kPartBytes;
  std::vector<uint32_t> sums(parts);
  if (data_) madvise(const_cast<std::byte*>(data_), size_, MADV_SEQUENTIAL);
  ParallelFor(static_cast<int64_t>(parts), [&](int64_t part) {
    const size_t begin = static_cast<size_t>(part) * kPartBytes;
    sums[static_cast<size_t>(part)] = Crc32(0, data_ + begin, std::min(kPartBytes, size_ - begin));
  });
  if (data_) madvise(const_cast<std::byte*>(data_), size_, MADV_RANDOM);
  uint32_t crc = 0;
  for (size_t i = 0; i < parts; ++i) {
    crc = Crc32Combine(crc, sums[i], std::min(kPartBytes, size_ - i * kPartBytes));
  }
  return crc;
}

}  // namespace embstore
