// What memory can do: the two loops of machine.py, which compiles this file.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kLine = 64, kHugePage = size_t{2} << 20;
constexpr int kRounds = 7;

// Touched memory on huge pages where the kernel grants them, as tables have it.
class Buffer {
 public:
  explicit Buffer(size_t bytes) : bytes_(bytes + kHugePage) {
    raw_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw_ == MAP_FAILED) return;
    const auto address = reinterpret_cast<uintptr_t>(raw_);
    data_ = reinterpret_cast<char*>((address + kHugePage - 1) / kHugePage * kHugePage);
    madvise(data_, bytes, MADV_HUGEPAGE);
    std::memset(data_, 1, bytes);
  }
  ~Buffer() {
    if (data_) munmap(raw_, bytes_);
  }
  char* data() const { return data_; }

 private:
  size_t bytes_;
  void* raw_;
  char* data_ = nullptr;
};

// The least seconds of several rounds of work(thread) on so many threads.
template <typename Work>
double Seconds(int threads, const Work& work) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
    work(0);
    for (std::thread& other : others) other.join();
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    best = std::min(best, spent.count());
  }
  return best;
}

}  // namespace

// Bytes copied a second, or 0 without memory. Each thread copies its part of `bytes`.
extern "C" double copied_bytes(int threads, int64_t bytes) {
  const Buffer from(bytes), to(bytes);
  if (!from.data() || !to.data()) return 0;
  const int64_t part = bytes / threads;
  const double seconds = Seconds(threads, [&](int thread) {
    std::memcpy(to.data() + thread * part, from.data() + thread * part, part);
  });
  return static_cast<double>(part * threads) / seconds;
}

// Cache lines read a second in random order from so many bytes, prefetched as the engine does.
extern "C" double random_lines(int threads, int64_t bytes) {
  constexpr int64_t kReads = 1 << 21;
  constexpr int kAhead = 64;
  const Buffer buffer(bytes);
  if (!buffer.data()) return 0;
  const auto lines = static_cast<uint64_t>(bytes) / kLine;
  const auto line_of = [lines](uint64_t i) {
    i = (i + 1) * 0x9e3779b97f4a7c15ULL;
    return ((i ^ (i >> 32)) * 0xd6e8feb86659fd93ULL >> 20) % lines;
  };
  std::vector<std::vector<uint64_t>> order(static_cast<size_t>(threads));
  for (size_t thread = 0; thread < order.size(); ++thread) {
    for (int64_t i = 0; i < kReads + kAhead; ++i) {
      order[thread].push_back(line_of(thread * (kReads + kAhead) + static_cast<uint64_t>(i)));
    }
  }
  std::vector<uint64_t> sums(static_cast<size_t>(threads) * kLine);
  const double seconds = Seconds(threads, [&](int thread) {
    const uint64_t* const at = order[static_cast<size_t>(thread)].data();
    uint64_t sum = 0;
    for (int64_t i = 0; i < kReads; ++i) {
      __builtin_prefetch(buffer.data() + at[i + kAhead] * kLine);
      sum += static_cast<uint64_t>(buffer.data()[at[i] * kLine]);
    }
    static_cast<volatile uint64_t&>(sums[static_cast<size_t>(thread) * kLine]) = sum;
  });
  return static_cast<double>(threads) * kReads / seconds;
}
