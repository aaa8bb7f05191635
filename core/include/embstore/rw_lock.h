// A readers-writer lock that lets a waiting writer go before new readers: a training step must not
// starve behind a stream of evaluation reads.
#pragma once

#include <pthread.h>
#include <time.h>

#include <chrono>

namespace embstore {

class RwLock {
 public:
  RwLock() { Init(); }
  ~RwLock() { pthread_rwlock_destroy(&lock_); }
  RwLock(const RwLock&) = delete;
  RwLock& operator=(const RwLock&) = delete;

  // The names that std::unique_lock and std::shared_lock ask for.
  void lock() { pthread_rwlock_wrlock(&lock_); }
  void unlock() { pthread_rwlock_unlock(&lock_); }
  void lock_shared() { pthread_rwlock_rdlock(&lock_); }
  void unlock_shared() { pthread_rwlock_unlock(&lock_); }

  // False when it could not be had by then.
  bool TryLockUntil(std::chrono::steady_clock::time_point deadline) {
    const auto wait = deadline - std::chrono::steady_clock::now();
    const auto until = (std::chrono::system_clock::now() + wait).time_since_epoch();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(until);
    const timespec at{seconds.count(), std::chrono::nanoseconds(until - seconds).count()};
    return pthread_rwlock_timedwrlock(&lock_, &at) == 0;
  }

  // In the child of a fork: whoever held it or waited for it is not there.
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
  }

  pthread_rwlock_t lock_;
};

}  // namespace embstore
