// A fork while another thread uses the engine for the first time in the process. So this program
// has one test, and overrides pthread_atfork to make that first time long.
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "check.h"
#include "embstore/parallel.h"
#include "table_oracle.h"

extern "C" {

int __register_atfork(void (*before)(), void (*in_parent)(), void (*in_child)(), void* library);

int pthread_atfork(void (*before)(), void (*in_parent)(), void (*in_child)()) {
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return __register_atfork(before, in_parent, in_child, nullptr);
}
}

namespace embstore {
namespace {

void UseTheEngine() {
  SetNumThreads(2);
  const auto table = Table::Create(SmallTable(4, 1 << 14));
  LookUpOne(table, Range(0, 10'000));
}

TEST(A child that is forked while a thread makes the first table makes tables too) {
  std::thread first(UseTheEngine);
  int bad = 0;
  for (int i = 0; i < 12; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(7));
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a child that hangs is ended, and counted
      UseTheEngine();
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    bad += !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  first.join();
  CHECK_EQ(bad, 0);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
