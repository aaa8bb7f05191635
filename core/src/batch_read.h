// Many small reads at once: io_uring where the kernel allows it, otherwise threads with pread.
// EMBSTORE_IO=threads in the environment forces the latter.
//
// Thread safety: ReadBatch may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace embstore {

struct ReadRequest {
  int fd = -1;
  int64_t offset = 0;
  uint32_t bytes = 0;
  // Where the bytes go. Null: to a buffer of the reader, aligned for O_DIRECT, which is passed to
  // `done` and then reused.
  std::byte* to = nullptr;
};

// Runs all requests, up to `depth` at a time, and calls done(i, data) as each completes: in any
// order, perhaps on several threads at once. Throws std::system_error for the first failure, after
// the others have ended; a file that ends early counts as EIO.
void ReadBatch(std::span<const ReadRequest> requests, int depth,
               const std::function<void(size_t i, const std::byte* data)>& done);

}  // namespace embstore
