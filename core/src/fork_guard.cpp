#include "embstore/fork_guard.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include "embstore/memory.h"
#include "embstore/table.h"

namespace embstore {
namespace {

constexpr int kPrepareSeconds = 60, kAtForkSeconds = 2;

// Weak references, in the order in which they were added.
template <typename T>
class Registry {
 public:
  void Add(const std::shared_ptr<T>& item) {
    std::lock_guard guard(mutex);
    if (items_.size() >= prune_at_) {
      std::erase_if(items_, [](const auto& weak) { return weak.expired(); });
      prune_at_ = std::max<size_t>(64, 2 * items_.size());
    }
    items_.push_back(item);
  }

  // REQUIRES mutex.
  std::vector<std::shared_ptr<T>> Alive() const {
    std::vector<std::shared_ptr<T>> alive;
    for (const auto& weak : items_) {
      if (auto item = weak.lock()) alive.push_back(std::move(item));
    }
    return alive;
  }

  std::mutex mutex;  // held briefly, and by atfork until the fork is done

 private:
  std::vector<std::weak_ptr<T>> items_;
  size_t prune_at_ = 64;
};

// Never destroyed: tables may outlive static destruction.
Registry<Table>& Tables() {
  static auto* tables = new Registry<Table>;
  return *tables;
}

Registry<RwLock>& StoreLocks() {
  static auto* locks = new Registry<RwLock>;
  return *locks;
}

thread_local bool t_prepared = false;

std::chrono::steady_clock::time_point After(int seconds) {
  return std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
}

template <typename T>
bool Contains(const std::vector<std::shared_ptr<T>>& items, const std::shared_ptr<T>& item) {
  return std::find(items.begin(), items.end(), item) != items.end();
}

}  // namespace

// What the running fork has locked.
struct ForkGuard::Held {
  RwLock mutex;        // one fork at a time
  bool owned = false;  // by this fork
  std::vector<std::shared_ptr<Table>> tables, busy;
  std::vector<std::shared_ptr<RwLock>> locks, busy_locks;
};

ForkGuard::Held*& ForkGuard::held() {
  static auto* held = new Held;
  return held;
}

// When the library is loaded, before there are threads: a child that is forked while one of them
// does it with the first table would wait for that thread, which it does not have.
const bool ForkGuard::kRegistered = ForkGuard::Register();

bool ForkGuard::Register() {
  Tables();
  StoreLocks();
  held();
  // Before a fork the newest handler runs first. A thread that works on a table may need a
  // recycled buffer, so those must register their handler before this one.
  (void)IdleBufferBytes();
  return pthread_atfork(BeforeFork, InParent, InChild) == 0;
}

void ForkGuard::Add(const std::shared_ptr<RwLock>& lock) { StoreLocks().Add(lock); }

void ForkGuard::Add(const std::shared_ptr<Table>& table) { Tables().Add(table); }

// Locks what is not locked yet. It holds no registry while it waits, since the threads it waits for
// may create or drop tables.
void ForkGuard::Acquire(int seconds) {
  Held& fork = *held();
  const auto deadline = After(seconds);
  std::vector<std::shared_ptr<Table>> tables;
  std::vector<std::shared_ptr<RwLock>> locks;
  {
    std::scoped_lock guard(Tables().mutex, StoreLocks().mutex);
    tables = Tables().Alive();
    locks = StoreLocks().Alive();
  }
  std::erase_if(tables, [&](const auto& table) { return Contains(fork.tables, table); });
  std::erase_if(locks, [&](const auto& lock) { return Contains(fork.locks, lock); });
  std::sort(tables.begin(), tables.end());  // as batches lock them
  std::reverse(locks.begin(), locks.end());
  for (const auto& table : tables) {
    (table->lock_.TryLockUntil(deadline) ? fork.tables : fork.busy).push_back(table);
  }
  for (const auto& lock : locks) {
    (lock->TryLockUntil(deadline) ? fork.locks : fork.busy_locks).push_back(lock);
  }
}

void ForkGuard::Prepare() {
  held()->mutex.lock();
  held()->owned = true;
  t_prepared = true;
  Acquire(kPrepareSeconds);
  // The fork tries again for tables that were too busy, or are new since.
  held()->busy.clear();
  held()->busy_locks.clear();
}

void ForkGuard::Release() {
  if (!t_prepared) return;
  t_prepared = false;
  UnlockAll();
}

void ForkGuard::UnlockAll() {
  Held& fork = *held();
  for (const auto& lock : fork.locks) lock->unlock();
  for (const auto& table : fork.tables) table->lock_.unlock();
  // Dropped last, and without the mutex: these may be the last references to a table.
  auto tables = std::exchange(fork.tables, {}), busy = std::exchange(fork.busy, {});
  fork.locks.clear();
  fork.busy_locks.clear();
  if (std::exchange(fork.owned, false)) fork.mutex.unlock();
}

void ForkGuard::BeforeFork() {
  Held& fork = *held();
  if (!t_prepared) fork.owned = fork.mutex.TryLockUntil(After(kAtForkSeconds));
  if (fork.owned) Acquire(kAtForkSeconds);
  Tables().mutex.lock();
  StoreLocks().mutex.lock();
  if (!fork.owned) return;
  for (const auto& table : fork.tables) table->pins_.mutex().lock();
}

void ForkGuard::InParent() {
  Held& fork = *held();
  StoreLocks().mutex.unlock();
  Tables().mutex.unlock();
  if (!fork.owned) return;
  for (const auto& table : fork.tables) table->pins_.mutex().unlock();
  if (!t_prepared) UnlockAll();
}

void ForkGuard::InChild() {
  Held& fork = *held();
  StoreLocks().mutex.unlock();
  Tables().mutex.unlock();
  // A lock knows its owner by a thread id, which differs in the child: replace them all.
  for (const auto& lock : StoreLocks().Alive()) lock->Renew();
  for (const auto& table : Tables().Alive()) {
    const bool whole = fork.owned && Contains(fork.tables, table);
    if (whole) table->pins_.mutex().unlock();
    table->AfterForkInChild(whole);
  }
  held() = new Held;  // the old one may belong to a thread of the parent
  t_prepared = false;
}

}  // namespace embstore
