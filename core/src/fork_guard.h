// Tables across fork(): the child must find them whole and unlocked.
//
// Threads do not survive a fork, but what they held stays locked in the child for ever. So a fork
// waits until no thread works on a table, and the child starts with locks of its own.
#pragma once

namespace embstore {

class Table;

class ForkGuard {
 public:
  static void Add(Table* table);
  static void Remove(Table* table);

 private:
  static void BeforeFork();
  static void InParent();
  static void InChild();
};

}  // namespace embstore
