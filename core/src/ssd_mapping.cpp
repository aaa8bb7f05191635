#include "ssd_mapping.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>

namespace embstore {
namespace {

// Where this thread goes on when its copy fails. In the static part of the thread's storage: a
// handler must not be the first to touch the other part, which would allocate it.
[[gnu::tls_model("initial-exec")]] thread_local sigjmp_buf* volatile t_copying = nullptr;
struct sigaction g_previous;

void OnBusError(int signal, siginfo_t* info, void* context) {
  if (t_copying) siglongjmp(*t_copying, 1);
  if (g_previous.sa_flags & SA_SIGINFO) {
    g_previous.sa_sigaction(signal, info, context);
  } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal);
  } else {
    sigaction(signal, &g_previous, nullptr);
    raise(signal);
  }
}

void HandleBusErrors() {
  static const bool installed = [] {
    struct sigaction action{};
    action.sa_sigaction = OnBusError;
    // Not blocked while it is handled: the handler may leave by a jump.
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    return sigaction(SIGBUS, &action, &g_previous) == 0;
  }();
  (void)installed;
}

}  // namespace

MappedFile::MappedFile(int fd, int64_t bytes) : bytes_(bytes) {
  HandleBusErrors();
  void* data =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) return;
  // Rows are asked for at random: their neighbours need not be read from the disk with them.
  madvise(data, static_cast<size_t>(bytes), MADV_RANDOM);
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::byte*>(data_), static_cast<size_t>(bytes_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool CopyMapped(std::span<const MappedCopy> copies, size_t bytes) {
  sigjmp_buf failed;
  if (sigsetjmp(failed, 0) != 0) {
    t_copying = nullptr;
    return false;
  }
  t_copying = &failed;
  // Loads and not prefetches: those do not wait for their pages, and so many may be on their way.
  for (const MappedCopy& copy : copies) (void)*static_cast<const volatile std::byte*>(copy.from);
  for (const MappedCopy& copy : copies) {
    for (size_t at = 64; at < bytes; at += 64) __builtin_prefetch(copy.from + at);
  }
  for (const MappedCopy& copy : copies) std::memcpy(copy.to, copy.from, bytes);
  t_copying = nullptr;
  return true;
}

}  // namespace embstore
