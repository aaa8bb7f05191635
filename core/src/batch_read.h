// Many small reads at once: io_uring where the kernel allows it, else threads with pread.
// EMBSTORE_IO=threads in the environment asks for the latter.
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
  // Where the bytes go. Null: into a buffer of the reader, aligned for O_DIRECT, that is handed to
  // `done` and used again afterwards.
  std::byte* to = nullptr;
};

// Runs all requests with up to `depth` of them on their way, and calls done(i, data) for each as it
// completes, in any order; calls may come from several threads at once. Throws std::system_error
// for the first failure, after the others have ended; a file that ends early counts as EIO.
void ReadBatch(std::span<const ReadRequest> requests, int depth,
               const std::function<void(size_t i, const std::byte* data)>& done);

}  // namespace embstore
