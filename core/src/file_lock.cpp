#include "file_lock.h"

#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "file_io.h"

namespace embstore {

// Descriptors of locks. The list only grows, so that the child of a fork can walk it whatever
// another thread of the parent was doing.
struct FileLock::Held {
  std::atomic<int> fd{-1};  // -1: free
  Held* next = nullptr;
};

namespace {

std::atomic<FileLock::Held*> held_locks{nullptr};

void CloseLocksInChild() {
  for (auto* held = held_locks.load(); held; held = held->next) {
    const int fd = held->fd.exchange(-1);
    if (fd >= 0) close(fd);
  }
}

// When the library is loaded, for the reason that ForkGuard::kRegistered has.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, CloseLocksInChild);

FileLock::Held* Keep(int fd) {
  for (auto* held = held_locks.load(); held; held = held->next) {
    int free = -1;
    if (held->fd.compare_exchange_strong(free, fd)) return held;
  }
  auto* held = new FileLock::Held;
  held->fd = fd;
  held->next = held_locks.load();
  while (!held_locks.compare_exchange_weak(held->next, held)) {
  }
  return held;
}

}  // namespace

FileLock::FileLock(int fd, int operation, const std::string& path) {
  int failed;
  while ((failed = flock(fd, operation)) != 0 && errno == EINTR) {
  }
  if (failed) {
    const int error = errno;
    close(fd);
    ThrowIo(error, "locking " + path);
  }
  held_ = Keep(fd);
  process_ = getpid();
}

void FileLock::Release() noexcept {
  Held* held = std::exchange(held_, nullptr);
  if (!held || process_ != getpid()) return;  // a forked child has closed it already
  const int fd = held->fd.exchange(-1);
  flock(fd, LOCK_UN);  // also for a child that was forked before the lock was listed
  close(fd);
}

}  // namespace embstore
