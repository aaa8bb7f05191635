#include "mapped_read.h"

#include <ucontext.h>

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstring>

#include "file_io.h"

namespace embstore {
namespace {

// The copy that runs on a thread.
struct Copying {
  sigjmp_buf back;
  const std::byte* volatile from = nullptr;
  size_t bytes = 0;
  volatile size_t done = 0;
};

// initial-exec: a handler must not allocate, as the first access of a thread may do otherwise.
__attribute__((tls_model("initial-exec"))) thread_local Copying* volatile t_copying = nullptr;

std::atomic<const struct sigaction*> g_previous{nullptr};
std::atomic<bool> g_passed_on{false};

void OnBusError(int number, siginfo_t* info, void* context) {
  Copying* const copying = t_copying;
  const auto* const address = static_cast<const std::byte*>(info->si_addr);
  if (copying && address >= copying->from && address < copying->from + copying->bytes) {
    // The jump leaves signals blocked as they are here, which is not only up to us: a handler that
    // calls this one, as that of ThreadSanitizer does, may block all, and then the next bus error
    // ends the process.
    pthread_sigmask(SIG_SETMASK, &static_cast<const ucontext_t*>(context)->uc_sigmask, nullptr);
    siglongjmp(copying->back, 1);
  }
  // The instruction runs again once this returns, under the handler that was there before. If that
  // one comes back here, the default ends the process.
  struct sigaction fallback = {};
  fallback.sa_handler = SIG_DFL;
  const struct sigaction* const previous = g_previous.load();
  const bool again = g_passed_on.exchange(true);
  sigaction(SIGBUS, previous && !again ? previous : &fallback, nullptr);
  if (info->si_code <= 0) raise(number);  // somebody sent it
}

// Copies until one fails; returns how many it has copied.
size_t CopyMapped(std::span<const MappedRead> reads, size_t bytes) {
  constexpr size_t kAhead = 6, kLine = 64;
  Copying copying;
  copying.bytes = bytes;
  if (sigsetjmp(copying.back, 0) == 0) {
    t_copying = &copying;
    for (size_t i = 0; i < reads.size() && reads[i].from; ++i) {
      if (i + kAhead < reads.size() && reads[i + kAhead].from) {
        for (size_t at = 0; at < bytes; at += kLine) {
          __builtin_prefetch(reads[i + kAhead].from + at);
        }
      }
      copying.from = reads[i].from;
      std::atomic_signal_fence(std::memory_order_seq_cst);
      std::memcpy(reads[i].to, reads[i].from, bytes);
      std::atomic_signal_fence(std::memory_order_seq_cst);
      copying.done = i + 1;
    }
  }
  t_copying = nullptr;
  return copying.done;
}

}  // namespace

void CatchBusErrors() {
  struct sigaction now;
  if (sigaction(SIGBUS, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == OnBusError) return;
  g_previous.store(new struct sigaction(now));  // kept: a handler may be reading the one before
  g_passed_on.store(false);
  struct sigaction ours = {};
  ours.sa_sigaction = OnBusError;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGBUS, &ours, nullptr);
}

void ReadMapped(std::span<const MappedRead> reads, size_t bytes) {
  for (size_t next = 0; next < reads.size();) {
    next += CopyMapped(reads.subspan(next), bytes);
    if (next == reads.size()) return;
    const MappedRead& read = reads[next++];
    ReadWholeAt(read.fd, read.to, bytes, read.offset, *read.path);
  }
}

}  // namespace embstore
