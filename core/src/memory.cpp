#include "embstore/memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "embstore/types.h"

namespace embstore {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

[[noreturn]] void ThrowOutOfMemory(size_t bytes) {
  throw OutOfMemory("the system refused a mapping of " + std::to_string(bytes) + " bytes");
}

// An address range of `bytes` without memory, aligned to huge pages if it can hold one.
std::byte* ReserveAddresses(size_t bytes) {
  const size_t slack = bytes >= kHugePage ? kHugePage : 0;
  void* raw =
      mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  auto begin = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = slack ? RoundUp(begin, kHugePage) : begin;
  if (aligned > begin) munmap(raw, aligned - begin);
  const uintptr_t end = begin + bytes + slack;
  if (end > aligned + bytes)
    munmap(reinterpret_cast<void*>(aligned + bytes), end - aligned - bytes);
  return reinterpret_cast<std::byte*>(aligned);
}

void AskForHugePages(void* data, size_t bytes) {
  // A hint: if the kernel refuses, the table is slower, not wrong.
  if (bytes >= kHugePage) (void)madvise(data, bytes, MADV_HUGEPAGE);
}

// MemAvailable of the machine, or less if the cgroup allows less.
size_t AvailableMemory() {
  size_t available = SIZE_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kib) == 1) {
      available = static_cast<size_t>(kib) << 10;
      break;
    }
  }
  size_t limit = 0, used = 0;
  std::ifstream max_file("/sys/fs/cgroup/memory.max"), now_file("/sys/fs/cgroup/memory.current");
  if (max_file >> limit && now_file >> used) {
    // Cached files count as used, but can be reclaimed.
    size_t cached = 0, value = 0;
    std::ifstream stat_file("/sys/fs/cgroup/memory.stat");
    for (std::string name; stat_file >> name >> value;) {
      if (name == "inactive_file") cached = value;
    }
    used -= std::min(used, cached);
    available = std::min(available, limit > used ? limit - used : size_t{0});
  }
  return available;
}

}  // namespace

void RequireAvailableMemory(size_t bytes, const std::string& purpose) {
  constexpr size_t kTooSmallToAsk = size_t{64} << 20;  // reading /proc costs more than it saves
  if (bytes < kTooSmallToAsk) return;
  const size_t available = AvailableMemory();
  if (bytes > available) {
    throw OutOfMemory(purpose + " needs " + std::to_string(bytes) + " more bytes but only " +
                      std::to_string(available) + " are available");
  }
}

HugeBuffer::HugeBuffer(size_t bytes) { Grow(bytes); }

HugeBuffer::~HugeBuffer() {
  if (data_) munmap(data_, reserved_);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      reserved_(std::exchange(other.reserved_, 0)) {}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(reserved_, other.reserved_);
  return *this;
}

size_t HugeBuffer::SizeFor(size_t bytes) {
  return RoundUp(std::max(bytes, kPage), bytes >= kHugePage ? kHugePage : kPage);
}

void HugeBuffer::Grow(size_t bytes) {
  bytes = SizeFor(bytes);
  if (bytes <= size_) return;
  if (bytes > reserved_) {
    size_t reserved = data_ ? std::max(bytes, 2 * size_) : bytes;
    std::byte* target = ReserveAddresses(reserved);
    if (!target) target = ReserveAddresses(reserved = bytes);
    if (!target) ThrowOutOfMemory(bytes);
    if (data_ && mremap(data_, size_, size_, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) {
      // Pages that the kernel treats differently (some are locked, say) cannot move together.
      if (mprotect(target, size_, PROT_READ | PROT_WRITE) != 0) {
        munmap(target, reserved);
        ThrowOutOfMemory(bytes);
      }
      std::memcpy(target, data_, size_);
      munmap(data_, size_);
    }
    if (reserved_ > size_) munmap(data_ + size_, reserved_ - size_);
    data_ = target;
    reserved_ = reserved;
  }
  if (mprotect(data_ + size_, bytes - size_, PROT_READ | PROT_WRITE) != 0) ThrowOutOfMemory(bytes);
  size_ = bytes;
  AskForHugePages(data_, size_);
}

void HugeBuffer::Clear() { Release(0); }

void HugeBuffer::Release(size_t from) {
  if (from >= size_) return;
  const size_t page = std::min(RoundUp(from, kPage), size_);
  std::memset(data_ + from, 0, page - from);
  // Locked pages cannot be returned.
  if (madvise(data_ + page, size_ - page, MADV_DONTNEED) != 0) {
    std::memset(data_ + page, 0, size_ - page);
  }
}

namespace {

// Idle blocks by size class. The latest is reused first, since its pages are warmest. When there
// are too many, blocks of the class that was not used for longest go first: what every step uses
// stays, whatever a load or an evaluation has left behind.
class FreeBuffers {
 public:
  // Never destroyed: buffers held by Python objects may outlive static destruction.
  static FreeBuffers& Global() {
    static FreeBuffers* buffers = [] {
      auto* fresh = new FreeBuffers;
      // If another thread held the mutex at a fork, the child could never lock it.
      pthread_atfork([] { Global().mutex_.lock(); }, [] { Global().mutex_.unlock(); },
                     [] { Global().mutex_.unlock(); });
      return fresh;
    }();
    return *buffers;
  }

  // Classes of an eighth of a power of two waste at most 12 %.
  static size_t ClassOf(size_t bytes) {
    bytes = std::max(bytes, size_t{256});
    const size_t step = std::max(std::bit_floor(bytes) / 8, size_t{64});
    return RoundUp(bytes, step);
  }

  void* Take(size_t bytes, BufferUse use) {
    {
      std::lock_guard lock(mutex_);
      Idle& idle = free_[{bytes, use}];
      idle.used = ++clock_;
      if (!idle.blocks.empty()) {
        void* data = idle.blocks.back();
        idle.blocks.pop_back();
        idle_bytes_ -= bytes;
        return data;
      }
    }
    const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    void* data = std::aligned_alloc(alignment, RoundUp(bytes, alignment));
    if (!data) ThrowOutOfMemory(bytes);
    AskForHugePages(data, RoundUp(bytes, alignment));
    return data;
  }

  void Give(void* data, size_t bytes, BufferUse use) noexcept {
    if (bytes > kMaxIdleBufferBytes) {  // it would drive all others out
      std::free(data);
      return;
    }
    std::unique_lock lock(mutex_);
    try {
      Idle& idle = free_[{bytes, use}];
      idle.blocks.push_back(data);
      idle.used = ++clock_;
      idle_bytes_ += bytes;
    } catch (const std::bad_alloc&) {  // no room to remember it
      lock.unlock();
      std::free(data);
      return;
    }
    while (idle_bytes_ > kMaxIdleBufferBytes) {
      void* const oldest = TakeOldest();
      lock.unlock();
      std::free(oldest);
      lock.lock();
    }
  }

  size_t idle_bytes() {
    std::lock_guard lock(mutex_);
    return idle_bytes_;
  }

 private:
  struct Idle {
    std::vector<void*> blocks;
    uint64_t used = 0;  // when a block was last taken or given
  };

  // REQUIRES: there is an idle block.
  void* TakeOldest() {
    auto oldest = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at) {
      if (at->second.blocks.empty()) continue;
      if (oldest == free_.end() || at->second.used < oldest->second.used) oldest = at;
    }
    auto& [kind, idle] = *oldest;
    void* const data = idle.blocks.front();
    idle.blocks.erase(idle.blocks.begin());
    idle_bytes_ -= kind.first;
    return data;
  }

  std::mutex mutex_;
  std::map<std::pair<size_t, BufferUse>, Idle> free_;
  size_t idle_bytes_ = 0;
  uint64_t clock_ = 0;
};

// Made when the library is loaded, for the reason that ForkGuard::kRegistered has.
[[maybe_unused]] const FreeBuffers& made_at_start = FreeBuffers::Global();

}  // namespace

RecycledBuffer::RecycledBuffer(size_t bytes, BufferUse use)
    : size_(FreeBuffers::ClassOf(bytes)), use_(use) {
  data_ = FreeBuffers::Global().Take(size_, use);
}

RecycledBuffer::~RecycledBuffer() {
  if (data_) FreeBuffers::Global().Give(data_, size_, use_);
}

RecycledBuffer::RecycledBuffer(RecycledBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      use_(other.use_) {}

RecycledBuffer& RecycledBuffer::operator=(RecycledBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(use_, other.use_);
  return *this;
}

size_t IdleBufferBytes() { return FreeBuffers::Global().idle_bytes(); }

}  // namespace embstore
