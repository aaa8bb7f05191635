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

// Those that may be alive, in the order in which they came.
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

  std::mutex mutex;  // held for a moment, and by atfork until the fork is done

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

// What the fork that is under way has locked.
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

void ForkGuard::Add(const std::shared_ptr<RwLock>& lock) {
  static const int registered = [] {
    // Handlers run from the latest to the first before a fork. A thread that works on a table may
    // need the pool of buffers, so the pool has to register its own before this one.
    (void)IdleBufferBytes();
    return pthread_atfork(BeforeFork, InParent, InChild);
  }();
  (void)registered;
  if (lock) StoreLocks().Add(lock);
}

void ForkGuard::Add(const std::shared_ptr<Table>& table) {
  Add(std::shared_ptr<RwLock>());  // the handlers
  Tables().Add(table);
}

// Locks what is not locked yet. Registries are left alone while it waits, since whoever is waited
// for may make or drop tables.
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
  // Tables that are new since, or were too busy, have another chance at the fork.
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
  // Dropped last, and without the mutex: they may be the last to hold a table.
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
  // Locks know their owner by a thread id, which is another one in the child: all are made again.
  for (const auto& lock : StoreLocks().Alive()) lock->Renew();
  for (const auto& table : Tables().Alive()) {
    const bool whole = fork.owned && Contains(fork.tables, table);
    if (whole) table->pins_.mutex().unlock();
    table->AfterForkInChild(whole);
  }
  held() = new Held;  // the old one may belong to a thread that is not here
  t_prepared = false;
}

}  // namespace embstore
