#include "embstore/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "embstore/types.h"

namespace embstore {
namespace {

// How often every task of [0, tasks) ran.
std::vector<int> Runs(int64_t tasks) {
  std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
  ParallelFor(tasks, [&](int64_t task) { ++runs[static_cast<size_t>(task)]; });
  return {runs.begin(), runs.end()};
}

std::atomic<bool> g_worker_is_stopped{false};
std::atomic<bool> g_worker_may_go_on{false};

void StopUntilTold(int) {
  g_worker_is_stopped = true;
  const timespec pause{0, 1'000'000};
  while (!g_worker_may_go_on) nanosleep(&pause, nullptr);
}

// The first test, while there is one worker only.
TEST(A call does not wait for a worker that the system does not run) {
  SetNumThreads(2);
  const pthread_t caller = pthread_self();
  std::atomic<pthread_t> worker{caller};
  while (worker == caller) {
    ParallelFor(64, [&](int64_t) {
      if (pthread_self() != caller) worker = pthread_self();
    });
  }
  struct sigaction action = {};
  action.sa_handler = StopUntilTold;
  CHECK_EQ(sigaction(SIGUSR1, &action, nullptr), 0);
  CHECK_EQ(pthread_kill(worker, SIGUSR1), 0);
  while (!g_worker_is_stopped) sched_yield();
  for (int runs : Runs(97)) CHECK_EQ(runs, 1);  // by the caller alone
  g_worker_may_go_on = true;
  for (int runs : Runs(97)) CHECK_EQ(runs, 1);
}

TEST(Every task runs once for any number of threads) {
  for (int threads : {1, 2, 3, 4, 8}) {
    SetNumThreads(threads);
    CHECK_EQ(NumThreads(), threads);
    for (int64_t tasks : {0, 1, 2, 7, 97, 1023}) {
      for (int runs : Runs(tasks)) CHECK_EQ(runs, 1);
    }
  }
}

TEST(Many short calls in a row lose no task) {
  for (int threads : {2, 4, 2, 3}) {  // also with fewer threads than were started before
    SetNumThreads(threads);
    int64_t sum = 0;
    for (int call = 0; call < 2000; ++call) {
      std::atomic<int64_t> here{0};
      ParallelFor(5, [&](int64_t task) { here += task + 1; });
      sum += here;
    }
    CHECK_EQ(sum, int64_t{2000 * 15});
  }
}

TEST(What tasks wrote is seen after the call) {
  SetNumThreads(4);
  std::vector<int64_t> plain(1023);
  for (int64_t round = 1; round < 50; ++round) {
    ParallelFor(1023, [&](int64_t task) { plain[static_cast<size_t>(task)] += task; });
    bool all = true;
    for (int64_t i = 0; i < 1023; ++i) all &= plain[static_cast<size_t>(i)] == round * i;
    CHECK(all);
  }
}

TEST(Nested calls run all their tasks) {
  SetNumThreads(4);
  std::atomic<int> inner{0};
  ParallelFor(7, [&](int64_t) {
    ParallelFor(11, [&](int64_t) { ParallelFor(3, [&](int64_t) { ++inner; }); });
  });
  CHECK_EQ(inner.load(), 7 * 11 * 3);
}

TEST(One of the exceptions arrives after all tasks have ended) {
  for (int threads : {1, 4}) {
    SetNumThreads(threads);
    for (int round = 0; round < 50; ++round) {
      std::atomic<int> ended{0};
      const auto fail = [&] {
        ParallelFor(97, [&](int64_t task) {
          ++ended;
          if (task % 3 == 0) throw std::runtime_error("task of three");
        });
      };
      CHECK_THROWS(std::runtime_error, "task of three", fail());
      CHECK_EQ(ended.load(), 97);
    }
    for (int runs : Runs(7)) CHECK_EQ(runs, 1);  // the workers keep working
  }
}

TEST(An exception of a nested call comes out of both) {
  SetNumThreads(4);
  const auto fail = [] {
    ParallelFor(5, [](int64_t outer) {
      ParallelFor(5, [&](int64_t inner) {
        if (outer == 3 && inner == 4) throw InvalidState("deep inside");
      });
    });
  };
  CHECK_THROWS(InvalidState, "deep inside", fail());
}

TEST(Several threads call at the same time) {
  SetNumThreads(3);
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  std::atomic<int> caught{0};
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int call = 0; call < 200; ++call) {
        std::atomic<int64_t> here{0};
        try {
          ParallelFor(13, [&](int64_t task) {
            here += task;
            if (c == 3 && task == 5) throw std::runtime_error("mine");
          });
        } catch (const std::runtime_error&) {
          caught += c == 3;
        }
        total += here;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(total.load(), int64_t{4 * 200 * 78});
  CHECK_EQ(caught.load(), 200);
}

// TSan forbids new threads in the child of a process that has threads.
#if !defined(__SANITIZE_THREAD__)
TEST(A forked child has threads of its own) {
  SetNumThreads(4);
  for (int runs : Runs(97)) CHECK_EQ(runs, 1);
  std::atomic<bool> stop{false};
  std::thread busy([&] {  // the workers may be busy at the moment of the fork
    while (!stop) ParallelFor(8, [](int64_t) {});
  });
  for (int round = 0; round < 10; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);
      for (int call = 0; call < 20; ++call) {
        for (int runs : Runs(97)) {
          if (runs != 1) _exit(1);
        }
      }
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
  }
  stop = true;
  busy.join();
  for (int runs : Runs(97)) CHECK_EQ(runs, 1);
}
#endif

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(Where no thread can be started the caller does the work alone) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    SetNumThreads(8);
    const rlimit limit{1 << 20, 1 << 20};  // less than is mapped: no stack for another thread
    setrlimit(RLIMIT_AS, &limit);
    try {
      for (int call = 0; call < 20; ++call) {
        std::atomic<int> ran{0};
        ParallelFor(97, [&](int64_t) { ++ran; });
        if (ran != 97) _exit(2);
      }
    } catch (...) {
      _exit(3);
    }
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
}
#endif

TEST(An illegal number of threads is named) {
  SetNumThreads(2);
  CHECK_THROWS(InvalidArgument, "but is: 0", SetNumThreads(0));
  CHECK_THROWS(InvalidArgument, "but is: -3", SetNumThreads(-3));
  CHECK_THROWS(InvalidArgument, "but is: 1025", SetNumThreads(1025));
  CHECK_EQ(NumThreads(), 2);
}

TEST(A thread runs alone unless others take part in its call) {
  for (const int threads : {1, 2}) {
    SetNumThreads(threads);
    CHECK(RunsAlone());
    std::atomic<int> alone{0};
    ParallelFor(7, [&](int64_t) { alone += RunsAlone(); });
    CHECK_EQ(alone.load(), threads == 1 ? 7 : 0);
    CHECK(RunsAlone());
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
