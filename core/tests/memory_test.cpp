#include "embstore/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "embstore/types.h"

namespace embstore {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

bool AllZero(const std::byte* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != std::byte{0}) return false;
  }
  return true;
}

uint8_t PatternAt(size_t i) { return static_cast<uint8_t>((i * 2654435761u) >> 13); }

TEST(A buffer that grows keeps its contents and adds zeros) {
  HugeBuffer buffer(1);
  size_t written = 0;
  for (size_t bytes :
       {size_t{1}, size_t{4097}, size_t{100000}, 2 * kMiB - 1, 2 * kMiB, 5 * kMiB + 1, 40 * kMiB}) {
    buffer.Grow(bytes);
    CHECK(buffer.size() >= bytes);
    if (bytes >= 2 * kMiB) {
      CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % (2 * kMiB), uintptr_t{0});
    }
    bool kept = true;
    for (size_t i = 0; i < written; ++i)
      kept &= static_cast<uint8_t>(buffer.data()[i]) == PatternAt(i);
    CHECK(kept);
    CHECK(AllZero(buffer.data() + written, buffer.size() - written));
    written = buffer.size();
    for (size_t i = 0; i < written; ++i) buffer.data()[i] = static_cast<std::byte>(PatternAt(i));
  }
}

TEST(Asking for less than there is changes nothing) {
  HugeBuffer buffer(10000);
  const std::byte* data = buffer.data();
  const size_t size = buffer.size();
  buffer.Grow(0);
  buffer.Grow(10);
  CHECK(buffer.data() == data);
  CHECK_EQ(buffer.size(), size);
}

TEST(A cleared buffer is zero at the same size) {
  for (size_t bytes : {size_t{5000}, 3 * kMiB}) {
    HugeBuffer buffer(bytes);
    const size_t size = buffer.size();
    std::memset(buffer.data(), 0xab, size);
    buffer.Clear();
    CHECK_EQ(buffer.size(), size);
    CHECK(AllZero(buffer.data(), size));
  }
}

TEST(A cleared buffer is zero also where its pages are locked) {
  HugeBuffer buffer(8192);
  if (mlock(buffer.data(), buffer.size()) != 0) return;  // not permitted to lock memory
  std::memset(buffer.data(), 0xab, buffer.size());
  buffer.Clear();
  CHECK(AllZero(buffer.data(), buffer.size()));
}

TEST(Moving a buffer moves its memory) {
  HugeBuffer from(5000);
  from.data()[7] = std::byte{3};
  HugeBuffer to(std::move(from));
  CHECK(from.data() == nullptr);
  CHECK(to.data()[7] == std::byte{3});
  HugeBuffer third;
  third = std::move(to);
  CHECK(third.data()[7] == std::byte{3});
}

TEST(A mapping that the system refuses leaves the buffer usable) {
  HugeBuffer buffer(3 * kMiB);
  std::memset(buffer.data(), 0x5a, buffer.size());
  const std::byte* data = buffer.data();
  const size_t size = buffer.size();
  CHECK_THROWS(OutOfMemory, "bytes", buffer.Grow(size_t{1} << 50));
  CHECK(buffer.data() == data);
  CHECK_EQ(buffer.size(), size);
  CHECK(buffer.data()[size - 1] == std::byte{0x5a});
  buffer.Grow(5 * kMiB);
  CHECK(buffer.data()[size - 1] == std::byte{0x5a});
  CHECK(AllZero(buffer.data() + size, buffer.size() - size));
}

// Sanitizers map more addresses than any limit allows.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Runs the body in a child and returns its exit status.
int InChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
}

TEST(Growing beyond a limit of the address space leaves the buffer usable) {
  const int status = InChild([] {
    HugeBuffer buffer(16 * kMiB);
    std::memset(buffer.data(), 0x77, buffer.size());
    const rlimit limit{512 * kMiB, 512 * kMiB};
    setrlimit(RLIMIT_AS, &limit);
    int refused = 0;
    for (size_t bytes = 32 * kMiB; bytes <= 1024 * kMiB; bytes *= 2) {
      try {
        buffer.Grow(bytes);
      } catch (const OutOfMemory&) {
        ++refused;
      }
      for (size_t i = 0; i < 16 * kMiB; i += 4096) {
        if (buffer.data()[i] != std::byte{0x77}) return 2;
      }
      if (!AllZero(buffer.data() + 16 * kMiB, 4096)) return 3;
    }
    return refused > 0 ? 0 : 4;
  });
  CHECK_EQ(status, 0);
}
#endif

TEST(More memory than the machine has is refused with its purpose) {
  CHECK_THROWS(OutOfMemory, "a table of dreams needs",
               RequireAvailableMemory(size_t{1} << 52, "a table of dreams"));
  RequireAvailableMemory(1, "a byte");
}

TEST(A dropped buffer is reused by the next one of its size) {
  void* first = nullptr;
  {
    RecycledBuffer buffer(100000);
    CHECK(buffer.size() >= 100000);
    CHECK(buffer.size() <= 100000 + 100000 / 8);
    CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, uintptr_t{0});
    std::memset(buffer.data(), 1, buffer.size());
    first = buffer.data();
  }
  CHECK(IdleBufferBytes() >= 100000);
  RecycledBuffer again(100000 - 1);
  CHECK(again.data() == first);
  RecycledBuffer other(100000);
  CHECK(other.data() != first);
}

TEST(A recycled buffer of any size can be written to its end) {
  for (size_t bytes = 0; bytes < 5 * kMiB; bytes = bytes * 3 / 2 + 1) {
    RecycledBuffer buffer(bytes);
    CHECK(buffer.size() >= bytes);
    std::memset(buffer.data(), 0x11, buffer.size());
    if (buffer.size() >= 2 * kMiB) {
      CHECK_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % (2 * kMiB), uintptr_t{0});
    }
  }
}

TEST(A buffer does not take the block of another use) {
  constexpr size_t kBytes = 5 * kMiB;
  const void* const step = RecycledBuffer(kBytes).data();
  const RecycledBuffer saved(kBytes, BufferUse::kSavedRows);
  CHECK(saved.data() != step);
  const void* const own = RecycledBuffer(kBytes, BufferUse::kSavedRows).data();
  CHECK(RecycledBuffer(kBytes).data() == step);
  RecycledBuffer moved;
  moved = RecycledBuffer(kBytes, BufferUse::kSavedRows);
  CHECK(moved.data() == own);
  moved = RecycledBuffer();
  CHECK(RecycledBuffer(kBytes, BufferUse::kSavedRows).data() == own);
}

TEST(Idle buffers stay within their limit) {
  {
    std::vector<RecycledBuffer> buffers;
    for (int i = 0; i < 40; ++i) buffers.emplace_back(16 * kMiB);
  }
  CHECK(IdleBufferBytes() <= kMaxIdleBufferBytes);
}

TEST(A buffer that was used lately stays when others fill the limit) {
  constexpr size_t kLarge = 16 * kMiB, kSmall = 3 * kMiB;
  {
    std::vector<RecycledBuffer> buffers;
    for (size_t i = 0; i < kMaxIdleBufferBytes / kLarge; ++i) buffers.emplace_back(kLarge);
  }
  RecycledBuffer(kMaxIdleBufferBytes + kLarge);  // too large to be kept
  CHECK_EQ(IdleBufferBytes(), kMaxIdleBufferBytes);
  RecycledBuffer{kSmall};
  CHECK_EQ(IdleBufferBytes(), kMaxIdleBufferBytes - kLarge + kSmall);
  const RecycledBuffer again(kSmall);
  CHECK_EQ(IdleBufferBytes(), kMaxIdleBufferBytes - kLarge);
}

TEST(After a failed allocation buffers can be made again) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK_THROWS(OutOfMemory, "bytes", RecycledBuffer(size_t{1} << 55));
#endif
  RecycledBuffer buffer(1000);
  std::memset(buffer.data(), 0, 1000);
}

TEST(Threads make and drop buffers at the same time) {
  std::vector<std::thread> threads;
  std::atomic<int> clashes{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&clashes, t] {
      for (int i = 0; i < 500; ++i) {
        RecycledBuffer buffer(static_cast<size_t>(64 + 700 * (i % 7)));
        std::memset(buffer.data(), t, buffer.size());
        clashes += buffer.as<uint8_t>()[buffer.size() - 1] != t;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(clashes.load(), 0);
}

// A thread of the parent may hold the mutex of the idle buffers at the moment of the fork.
TEST(A forked child makes buffers while threads of its parent do) {
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) RecycledBuffer buffer(4096);
  });
  int bad = 0;
  for (int i = 0; i < 40; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a child that hangs is ended, and counted
      for (int j = 0; j < 10; ++j) RecycledBuffer buffer(4096);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    bad += !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  busy.join();
  CHECK_EQ(bad, 0);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
