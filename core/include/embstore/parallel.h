// Worker threads of the engine, one set a process.
//
// A call that finds the workers busy, or that comes from a worker, runs its tasks on its own
// thread, so nothing ever waits for them. After fork() the child starts its own workers.
//
// Thread safety: every function may be called from any thread.
#pragma once

#include <cstdint>
#include <type_traits>

namespace embstore {

// Threads that take part in ParallelFor, the caller included. The default is EMBSTORE_NUM_THREADS,
// else OMP_NUM_THREADS, else the number of cores this process may use.
void SetNumThreads(int threads);  // throws InvalidArgument unless 1 <= threads <= 1024
int NumThreads();

// Whether no other thread takes part in the ParallelFor that this thread is in, if it is in one.
bool RunsAlone();

namespace internal {
using TaskFunction = void (*)(void* context, int64_t task);
void RunTasks(int64_t tasks, TaskFunction function, void* context);
}  // namespace internal

// Calls fn(task) once for every task in [0, tasks), in any order, on several threads. Returns when
// all are done. If some throw, one of the exceptions is rethrown once all have ended.
template <typename Fn>
void ParallelFor(int64_t tasks, Fn&& fn) {
  using Plain = std::remove_reference_t<Fn>;
  internal::RunTasks(
      tasks, [](void* context, int64_t task) { (*static_cast<Plain*>(context))(task); },
      const_cast<void*>(static_cast<const void*>(&fn)));
}

}  // namespace embstore
