// FileLock: a flock(2) that forks cannot extend.
#pragma once

#include <sys/types.h>

#include <string>
#include <utility>

namespace embstore {

// A flock, held until the object is destroyed or the process ends. A flock belongs to the open
// file, which a forked child shares. So the child closes its copy at once; otherwise a data
// loader's worker that outlives its parent would keep the directory locked.
class FileLock {
 public:
  FileLock() = default;
  // Owns the descriptor from here on, even when it throws. `operation` is one of flock(2).
  FileLock(int fd, int operation, const std::string& path);
  ~FileLock() { Release(); }
  FileLock(FileLock&& other) noexcept { *this = std::move(other); }
  FileLock& operator=(FileLock&& other) noexcept {
    std::swap(held_, other.held_);
    std::swap(process_, other.process_);
    other.Release();
    return *this;
  }

  struct Held;

 private:
  void Release() noexcept;

  Held* held_ = nullptr;
  pid_t process_ = 0;
};

}  // namespace embstore
