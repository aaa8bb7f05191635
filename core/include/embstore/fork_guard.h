// ForkGuard: tables and stores survive fork(); the child finds them consistent and unlocked.
//
// Threads do not survive a fork, but the locks they held stay locked in the child. So a fork waits
// until no thread works on a table or inside a store, and the child starts with fresh locks. It
// waits in two places:
//
//     Prepare    called before a fork that Python announces (os.register_at_fork), without the GIL,
//                which a store written in Python needs to finish
//     atfork     called by every fork, from C too, perhaps with the GIL held: waits two seconds for
//                what Prepare has not locked
//
// A table that is busy for longer throws InvalidState in the child, and keeps working in the
// parent.
//
// Thread safety: every method may be called from any thread; one fork runs at a time.
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
  static bool Register();  // the handlers
  static const bool kRegistered;
  static void Acquire(int seconds);
  static void BeforeFork();
  static void InParent();
  static void InChild();
  static void UnlockAll();
};

// The lock of a store, which a fork waits for. The newest store is locked first, since a store that
// uses another is made after it.
class StoreLock {
 public:
  StoreLock() : lock_(std::make_shared<RwLock>()) { ForkGuard::Add(lock_); }

  void lock() { lock_->lock(); }
  void unlock() { lock_->unlock(); }
  void lock_shared() { lock_->lock_shared(); }
  void unlock_shared() { lock_->unlock_shared(); }

 private:
  std::shared_ptr<RwLock> lock_;  // shared with a fork that waits for it
};

}  // namespace embstore
