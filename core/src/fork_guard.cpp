#include "fork_guard.h"

#include <pthread.h>

#include <mutex>
#include <set>

#include "embstore/memory.h"
#include "embstore/table.h"

namespace embstore {
namespace {

// Never destroyed: tables may outlive static destruction.
std::mutex& Mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// In the order of their addresses, which is the order in which batches lock tables.
std::set<Table*>& Tables() {
  static auto* tables = new std::set<Table*>;
  return *tables;
}

}  // namespace

void ForkGuard::Add(Table* table) {
  static const int registered = [] {
    // Handlers run from the latest to the first before a fork. A thread that works on a table may
    // need the pool of buffers, so the pool has to register its own before this one.
    (void)IdlePoolBytes();
    return pthread_atfork(BeforeFork, InParent, InChild);
  }();
  (void)registered;
  std::lock_guard guard(Mutex());
  Tables().insert(table);
}

void ForkGuard::Remove(Table* table) {
  std::lock_guard guard(Mutex());
  Tables().erase(table);
}

void ForkGuard::BeforeFork() {
  Mutex().lock();
  for (Table* table : Tables()) table->lock_.lock();
  for (Table* table : Tables()) table->lists_mutex_.lock();
}

void ForkGuard::InParent() {
  for (Table* table : Tables()) {
    table->lists_mutex_.unlock();
    table->lock_.unlock();
  }
  Mutex().unlock();
}

void ForkGuard::InChild() {
  for (Table* table : Tables()) {
    table->lists_mutex_.unlock();
    table->lock_.Renew();  // it knows its writer by a thread id, which is another one in the child
  }
  Mutex().unlock();
}

}  // namespace embstore
