// Tables and stores across fork(): the child must find them whole and unlocked.
//
// Threads do not survive a fork, but what they held stays locked in the child. So a fork
// waits until no thread works on a table or inside a store, and the child starts with locks of its
// own. It waits in two places:
//
//     Prepare    called before a fork that is announced (os.register_at_fork), without the GIL: a
//                store written in Python needs it to get done
//     atfork     every fork, from C too, perhaps with the GIL held: what Prepare has not locked is
//                tried for two seconds
//
// A table that is in use for longer than that throws InvalidState in the child, and works on in the
// parent.
#pragma once

#include <memory>

#include "embstore/rw_lock.h"

namespace embstore {

class Table;

class ForkGuard {
 public:
  static void Add(const std::shared_ptr<Table>& table);
  static void Add(const std::shared_ptr<RwLock>& lock);

  static void Prepare();
  static void Release();  // in the parent, by the thread that called Prepare

 private:
  struct Held;
  static Held*& held();
  static void Acquire(int seconds);
  static void BeforeFork();
  static void InParent();
  static void InChild();
  static void UnlockAll();
};

// The lock of a store, which a fork waits for. Stores are locked from the latest to the first: a
// store that uses another is made after it.
class StoreLock {
 public:
  StoreLock() : lock_(std::make_shared<RwLock>()) { ForkGuard::Add(lock_); }

  void lock() { lock_->lock(); }
  void unlock() { lock_->unlock(); }
  void lock_shared() { lock_->lock_shared(); }
  void unlock_shared() { lock_->unlock_shared(); }

 private:
  std::shared_ptr<RwLock> lock_;  // kept by a fork that waits for it
};

}  // namespace embstore
