// Copies out of mapped files: a tenth of the time of a pread where the page cache has the bytes.
//
// A page that cannot be read, because the disk fails or the file was cut short, is a bus error
// (SIGBUS), which ends a process. Here it only ends the copy, and pread tells what is wrong. Bus
// errors anywhere else reach the handler that was there before.
//
// Thread safety: every function may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace embstore {

struct MappedRead {
  const std::byte* from = nullptr;  // in a mapping of the file; null: there is none
  std::byte* to = nullptr;
  int fd = -1;
  int64_t offset = 0;
  const std::string* path = nullptr;  // for messages
};

// Call before ReadMapped, once for a batch: whoever set a handler later is put behind ours.
void CatchBusErrors();

// Reads `bytes` for each of these. Throws std::system_error that names the path.
void ReadMapped(std::span<const MappedRead> reads, size_t bytes);

}  // namespace embstore
