#include "embstore/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include "embstore/types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace embstore {
namespace {

constexpr int kMaxThreads = 1024;
// A step is many short phases; a worker that slept between them would cost a wake-up each time. A
// pause takes 20 to 60 ns.
constexpr int kSpinsBeforeSleep = 3000;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

int ThreadsFromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  if (!text) return 0;
  const long value = std::strtol(text, nullptr, 10);
  return value >= 1 && value <= kMaxThreads ? static_cast<int>(value) : 0;
}

int DefaultThreads() {
  for (const char* name : {"EMBSTORE_NUM_THREADS", "OMP_NUM_THREADS"}) {
    if (int threads = ThreadsFromEnvironment(name)) return threads;
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return 1;
}

constinit std::atomic<int> g_threads{0};  // 0: the default, which is looked up when it is needed

thread_local bool t_in_task = false;

// Raising `generation_` publishes work. The tasks are divided into as many ranges as there are
// threads. A thread starts with the range of its own number, so that tasks of the same number meet
// the memory that they used in the last call in the caches of their core; then it helps with the
// other ranges.
class Workers {
 public:
  void Run(int64_t tasks, internal::TaskFunction function, void* context, int helpers) {
    helpers = StartWorkers(helpers);
    function_ = function;
    context_ = context;
    ranges_used_ = helpers + 1;
    for (int64_t i = 0; i < ranges_used_; ++i) {
      ranges_[i].next.store(tasks * i / ranges_used_, std::memory_order_relaxed);
      ranges_[i].end = tasks * (i + 1) / ranges_used_;
    }
    running_.store(helpers, std::memory_order_relaxed);
    // A late worker of the previous call may join from here on; it reads only what is set above.
    invited_.store(helpers, std::memory_order_release);
    {
      std::lock_guard lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    Work(0);
    // Every task is taken. Helpers that have not come yet, because another process has their core,
    // are not waited for: their invitations are void.
    if (const int left = invited_.exchange(0, std::memory_order_acq_rel); left > 0) {
      running_.fetch_sub(left, std::memory_order_relaxed);
    }
    for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) {
      // A helper may be waiting for the core that this thread spins on.
      if (spins < kSpinsBeforeSleep) {
        Pause();
      } else {
        std::this_thread::yield();
      }
    }
    std::exception_ptr error;
    std::swap(error, error_);
    if (error) std::rethrow_exception(error);
  }

  std::mutex& busy() { return busy_; }

 private:
  // Returns how many helpers there are: fewer than requested if the system starts no more threads.
  int StartWorkers(int helpers) {
    while (workers_ < helpers) {
      const uint64_t seen = generation_.load(std::memory_order_relaxed);
      try {
        std::thread([this, seen, number = workers_ + 1] { WorkerLoop(seen, number); }).detach();
      } catch (const std::exception&) {
        return workers_;
      }
      ++workers_;
    }
    return helpers;
  }

  void WorkerLoop(uint64_t seen, int64_t number) {
    t_in_task = true;
    for (;;) {
      int spins = 0;
      while (generation_.load(std::memory_order_acquire) == seen) {
        if (++spins < kSpinsBeforeSleep) {
          Pause();
        } else {
          std::unique_lock lock(mutex_);
          wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        }
      }
      seen = generation_.load(std::memory_order_acquire);
      // A call may need fewer workers than there are; the others wait again.
      if (invited_.fetch_sub(1, std::memory_order_acq_rel) <= 0) continue;
      Work(number);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  void Work(int64_t number) {
    for (int64_t i = 0; i < ranges_used_; ++i) {
      Range& range = ranges_[(number + i) % ranges_used_];
      for (;;) {
        const int64_t task = range.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= range.end) break;
        try {
          function_(context_, task);
        } catch (...) {
          std::lock_guard lock(mutex_);
          if (!error_) error_ = std::current_exception();
        }
      }
    }
  }

  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  std::mutex busy_;  // held by the call that uses the workers
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};
  Range ranges_[kMaxThreads];  // here, as a call must not run out of memory half-way
  int64_t ranges_used_ = 0;
  std::atomic<int> invited_{0};
  std::atomic<int> running_{0};
  internal::TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr error_;
  int workers_ = 0;
};

std::atomic<Workers*> g_workers{nullptr};

// Threads do not survive fork(), and their mutexes may be held: the child leaves the old workers
// alone and starts its own.
void ForgetWorkersInChild() {
  g_workers.store(nullptr, std::memory_order_relaxed);
  t_in_task = false;
}

// When the library is loaded, for the reason that ForkGuard::kRegistered has.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, ForgetWorkersInChild);

Workers& CurrentWorkers() {
  Workers* workers = g_workers.load(std::memory_order_acquire);
  if (!workers) {
    Workers* fresh =
        new Workers;  // never destroyed: detached workers use it until the process ends
    if (g_workers.compare_exchange_strong(workers, fresh)) return *fresh;
    delete fresh;
  }
  return *workers;
}

}  // namespace

void SetNumThreads(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw InvalidArgument("threads should be between 1 and 1024 but is: " +
                          std::to_string(threads));
  }
  g_threads.store(threads, std::memory_order_relaxed);
}

bool RunsAlone() { return !t_in_task; }

int NumThreads() {
  int threads = g_threads.load(std::memory_order_relaxed);
  if (threads > 0) return threads;
  const int wanted = DefaultThreads();
  return g_threads.compare_exchange_strong(threads, wanted) ? wanted : threads;
}

void internal::RunTasks(int64_t tasks, TaskFunction function, void* context) {
  const int helpers = static_cast<int>(std::min<int64_t>(NumThreads(), tasks)) - 1;
  if (helpers > 0 && !t_in_task) {
    Workers& workers = CurrentWorkers();
    std::unique_lock lock(workers.busy(), std::try_to_lock);
    if (lock.owns_lock()) {
      t_in_task = true;  // a task that calls ParallelFor again runs it alone
      struct Leave {
        ~Leave() { t_in_task = false; }
      } leave;
      workers.Run(tasks, function, context, helpers);
      return;
    }
  }
  std::exception_ptr error;
  for (int64_t task = 0; task < tasks; ++task) {
    try {
      function(context, task);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace embstore
