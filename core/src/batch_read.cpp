#include "batch_read.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

namespace embstore {
namespace {

constexpr size_t kAlignment = 4096;
constexpr unsigned kRingEntries = 256;

using Done = std::function<void(size_t, const std::byte*)>;

struct Free {
  void operator()(std::byte* data) const { std::free(data); }
};
using AlignedBytes = std::unique_ptr<std::byte, Free>;

AlignedBytes Allocate(size_t bytes) {
  void* data = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (!data) throw std::bad_alloc();
  return AlignedBytes(static_cast<std::byte*>(data));
}

[[noreturn]] void ThrowRead(int error) {
  throw std::system_error(error, std::generic_category(), "reading rows");
}

// A submission and a completion queue, shared with the kernel. For one thread at a time.
class Ring {
 public:
  // Null when the kernel has no io_uring, or forbids it.
  static std::unique_ptr<Ring> Open() {
    io_uring_params params{};
    const auto fd = static_cast<int>(syscall(__NR_io_uring_setup, kRingEntries, &params));
    if (fd < 0) return nullptr;
    auto ring = std::unique_ptr<Ring>(new Ring(fd));
    return ring->Map(params) ? std::move(ring) : nullptr;
  }

  ~Ring() {
    if (rings_ != MAP_FAILED) munmap(rings_, rings_bytes_);
    if (entries_ != MAP_FAILED) munmap(entries_, kRingEntries * sizeof(io_uring_sqe));
    close(fd_);
  }

  void Run(std::span<const ReadRequest> requests, int depth, const Done& done) {
    const auto limit = static_cast<size_t>(std::min<int>(depth, kRingEntries));
    uint32_t largest = 0;
    for (const ReadRequest& request : requests) {
      if (!request.to) largest = std::max(largest, request.bytes);
    }
    const size_t stride = (largest + kAlignment - 1) / kAlignment * kAlignment;
    const AlignedBytes buffers = stride ? Allocate(stride * limit) : nullptr;
    std::vector<Read> reads(limit);
    std::vector<uint32_t> idle;
    for (uint32_t slot = 0; slot < limit; ++slot) idle.push_back(slot);
    size_t next = 0, ended = 0, started = 0;
    int error = 0;
    std::exception_ptr failure;
    while (ended < started || (next < requests.size() && !error)) {
      unsigned submitted = 0;
      while (next < requests.size() && !idle.empty() && !error) {
        const uint32_t slot = idle.back();
        idle.pop_back();
        const ReadRequest& request = requests[next];
        reads[slot] = {next++, 0, request.to ? request.to : buffers.get() + slot * stride};
        Prepare(request, reads[slot], slot);
        ++submitted;
        ++started;
      }
      Enter(submitted);
      ForCompletions([&](uint32_t slot, int result) {
        Read& read = reads[slot];
        const ReadRequest& request = requests[read.request];
        if (result > 0 && read.done + static_cast<uint32_t>(result) < request.bytes && !error) {
          read.done += static_cast<uint32_t>(result);  // a short read resumes where it stopped
          Prepare(request, read, slot);
          Enter(1, /*wait=*/false);
          return;
        }
        if (result <= 0 && !error) error = result < 0 ? -result : EIO;
        ++ended;
        idle.push_back(slot);
        if (error) return;
        try {
          done(read.request, read.to);
        } catch (...) {
          failure = std::current_exception();
          error = ECANCELED;
        }
      });
    }
    if (failure) std::rethrow_exception(failure);
    if (error) ThrowRead(error);
  }

 private:
  struct Read {
    size_t request = 0;
    uint32_t done = 0;
    std::byte* to = nullptr;
  };

  explicit Ring(int fd) : fd_(fd) {}

  bool Map(const io_uring_params& params) {
    if (!(params.features & IORING_FEAT_SINGLE_MMAP)) return false;
    rings_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                            params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    rings_ = mmap(nullptr, rings_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                  IORING_OFF_SQ_RING);
    entries_ = mmap(nullptr, kRingEntries * sizeof(io_uring_sqe), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQES);
    if (rings_ == MAP_FAILED || entries_ == MAP_FAILED) return false;
    auto* base = static_cast<std::byte*>(rings_);
    const auto at = [&](uint32_t offset) { return reinterpret_cast<unsigned*>(base + offset); };
    sq_tail_ = at(params.sq_off.tail);
    sq_mask_ = *at(params.sq_off.ring_mask);
    sq_array_ = at(params.sq_off.array);
    cq_head_ = at(params.cq_off.head);
    cq_tail_ = at(params.cq_off.tail);
    cq_mask_ = *at(params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    return true;
  }

  void Prepare(const ReadRequest& request, const Read& read, uint32_t slot) {
    const unsigned tail = *sq_tail_;
    io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[tail & sq_mask_];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = IORING_OP_READ;
    entry.fd = request.fd;
    entry.off = static_cast<uint64_t>(request.offset) + read.done;
    entry.addr = reinterpret_cast<uint64_t>(read.to + read.done);
    entry.len = request.bytes - read.done;
    entry.user_data = slot;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    std::atomic_ref<unsigned>(*sq_tail_).store(tail + 1, std::memory_order_release);
  }

  // Submits what was prepared and waits for at least one completion.
  void Enter(unsigned submitted, bool wait = true) {
    while (true) {
      const long taken = syscall(__NR_io_uring_enter, fd_, submitted, wait ? 1 : 0,
                                 IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= static_cast<long>(submitted)) return;
      if (taken > 0) submitted -= static_cast<unsigned>(taken);
      if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY) ThrowRead(errno);
    }
  }

  template <typename Visit>
  void ForCompletions(const Visit& visit) {
    unsigned head = *cq_head_;
    while (head != std::atomic_ref<unsigned>(*cq_tail_).load(std::memory_order_acquire)) {
      const io_uring_cqe completion = completions_[head & cq_mask_];
      std::atomic_ref<unsigned>(*cq_head_).store(++head, std::memory_order_release);
      visit(static_cast<uint32_t>(completion.user_data), completion.res);
    }
  }

  int fd_;
  size_t rings_bytes_ = 0;
  void* rings_ = MAP_FAILED;
  void* entries_ = MAP_FAILED;
  unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

// Idle rings. They belong to the process that made them: the child of a fork starts without any,
// and with a lock that no thread of its parent holds.
class Rings {
 public:
  static Rings& OfProcess() {
    static std::atomic<Rings*> rings{nullptr};  // never destroyed: threads may read until the end
    Rings* current = rings.load();
    while (!current || current->process_ != getpid()) {
      auto* fresh = new Rings;
      if (rings.compare_exchange_strong(current, fresh)) return *fresh;
      delete fresh;
    }
    return *current;
  }

  std::unique_ptr<Ring> Take() {
    std::lock_guard guard(mutex_);
    if (idle_.empty()) return Ring::Open();
    auto ring = std::move(idle_.back());
    idle_.pop_back();
    return ring;
  }

  void Give(std::unique_ptr<Ring> ring) {
    std::lock_guard guard(mutex_);
    idle_.push_back(std::move(ring));
  }

 private:
  std::mutex mutex_;
  const pid_t process_ = getpid();
  std::vector<std::unique_ptr<Ring>> idle_;
};

void ReadWhole(const ReadRequest& request, std::byte* to) {
  for (uint32_t at = 0; at < request.bytes;) {
    const ssize_t got = pread(request.fd, to + at, request.bytes - at, request.offset + at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) ThrowRead(got < 0 ? errno : EIO);
    at += static_cast<uint32_t>(got);
  }
}

void RunOnThreads(std::span<const ReadRequest> requests, int depth, const Done& done) {
  constexpr size_t kReadsPerThread = 32, kMaxThreads = 16;
  const size_t threads = std::clamp(requests.size() / kReadsPerThread, size_t{1},
                                    std::min(static_cast<size_t>(depth), kMaxThreads));
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    AlignedBytes buffer;
    size_t room = 0;
    try {
      for (size_t i; (i = next.fetch_add(1)) < requests.size();) {
        const ReadRequest& request = requests[i];
        if (!request.to && room < request.bytes) {
          buffer = Allocate(request.bytes);
          room = request.bytes;
        }
        std::byte* to = request.to ? request.to : buffer.get();
        ReadWhole(request, to);
        done(i, to);
      }
    } catch (...) {
      std::lock_guard guard(mutex);
      if (!failure) failure = std::current_exception();
      next = requests.size();
    }
  };
  std::vector<std::thread> helpers;
  helpers.reserve(threads);
  try {
    while (helpers.size() + 1 < threads) helpers.emplace_back(work);
  } catch (const std::exception&) {
    // The system starts no more of them: the others do the work.
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

bool WantsThreads() {
  const char* method = std::getenv("EMBSTORE_IO");
  return method && std::string_view(method) == "threads";
}

}  // namespace

void ReadBatch(std::span<const ReadRequest> requests, int depth, const Done& done) {
  if (requests.empty()) return;
  if (!WantsThreads()) {
    if (auto ring = Rings::OfProcess().Take()) {
      ring->Run(requests, depth, done);  // a ring that fails may have reads in flight: drop it
      Rings::OfProcess().Give(std::move(ring));
      return;
    }
  }
  RunOnThreads(requests, depth, done);
}

}  // namespace embstore
