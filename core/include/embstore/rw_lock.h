// RwLock: a readers-writer lock in which a waiting writer goes before new readers, so that a stream
// of evaluation reads cannot starve a training step. A reader in the background asks now and then
// whether a writer waits for it.
#pragma once

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <chrono>

namespace embstore {

class RwLock {
 public:
  RwLock() { Init(); }
  ~RwLock() { pthread_rwlock_destroy(&lock_); }
  RwLock(const RwLock&) = delete;
  RwLock& operator=(const RwLock&) = delete;

  // The names that std::unique_lock and std::shared_lock expect.
  void lock() {
    if (pthread_rwlock_trywrlock(&lock_) == 0) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    pthread_rwlock_wrlock(&lock_);
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

  // Whether a writer waits.
  bool IsAwaited() const { return waiting_.load(std::memory_order_relaxed) > 0; }

  // Exclusive. False when the deadline passes first.
  bool TryLockUntil(std::chrono::steady_clock::time_point deadline) {
    const auto wait = deadline - std::chrono::steady_clock::now();
    const auto until = (std::chrono::system_clock::now() + wait).time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(until);
    const timespec at{seconds.count(), std::chrono::nanoseconds(until - seconds).count()};
    return pthread_rwlock_timedwrlock(&lock_, &at) == 0;
  }

  // For the child of a fork: the threads that held it or waited for it do not exist there.
  void Renew() { Init(); }

 private:
  void Init() {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
#if defined(__GLIBC__)
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
#endif
    pthread_rwlock_init(&lock_, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    waiting_.store(0, std::memory_order_relaxed);
  }

  pthread_rwlock_t lock_;
  std::atomic<int> waiting_{0};
};

}  // namespace embstore
