// Random reads a second of a device, past the page cache: device_reads BLOCK DEPTH SECONDS FILE...
//
// io_uring with DEPTH reads always on their way, and nothing else: no index, no checksum, no copy.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

int main(int count, char** arguments) {
  if (count < 5) return 2;
  const auto block = static_cast<unsigned>(std::atoi(arguments[1]));
  const auto depth = static_cast<unsigned>(std::atoi(arguments[2]));
  const double seconds = std::atof(arguments[3]);
  std::vector<int> files;
  std::vector<uint64_t> last;  // the number of blocks up to and with each file
  for (int i = 4; i < count; ++i) {
    files.push_back(open(arguments[i], O_RDONLY | O_DIRECT));
    struct stat status;
    if (files.back() < 0 || fstat(files.back(), &status) != 0) return 1;
    last.push_back((last.empty() ? 0 : last.back()) +
                   static_cast<uint64_t>(status.st_size) / block);
  }
  io_uring_params params{};
  const int ring = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
  if (ring < 0) return 1;
  const auto map = [&](size_t bytes, off_t offset) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, offset);
    if (at == MAP_FAILED) std::exit(1);
    return static_cast<char*>(at);
  };
  char* queue = map(params.sq_off.array + params.sq_entries * 4, IORING_OFF_SQ_RING);
  char* done =
      map(params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
  auto* entries = reinterpret_cast<io_uring_sqe*>(
      map(params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES));
  auto* tail = reinterpret_cast<std::atomic<unsigned>*>(queue + params.sq_off.tail);
  auto* array = reinterpret_cast<unsigned*>(queue + params.sq_off.array);
  auto* done_head = reinterpret_cast<std::atomic<unsigned>*>(done + params.cq_off.head);
  auto* done_tail = reinterpret_cast<std::atomic<unsigned>*>(done + params.cq_off.tail);
  auto* completions = reinterpret_cast<io_uring_cqe*>(done + params.cq_off.cqes);
  auto* buffers =
      static_cast<char*>(std::aligned_alloc(4096, size_t{depth} * 4096 * (block / 4096 + 1)));
  std::mt19937_64 random(1);
  const auto prepare = [&](unsigned slot) {
    const uint64_t at = random() % last.back();
    size_t file = 0;
    while (last[file] <= at) ++file;
    const unsigned place = tail->load() & (params.sq_entries - 1);
    std::memset(&entries[place], 0, sizeof(entries[place]));
    entries[place].opcode = IORING_OP_READ;
    entries[place].fd = files[file];
    entries[place].off = (at - (file ? last[file - 1] : 0)) * block;
    entries[place].addr =
        reinterpret_cast<uint64_t>(buffers + size_t{slot} * 4096 * (block / 4096 + 1));
    entries[place].len = block;
    entries[place].user_data = slot;
    array[place] = place;
    tail->store(tail->load() + 1);
  };
  for (unsigned slot = 0; slot < depth; ++slot) prepare(slot);
  unsigned fresh = depth;
  uint64_t reads = 0;
  const auto start = std::chrono::steady_clock::now();
  std::chrono::duration<double> spent{};
  for (; spent.count() < seconds; spent = std::chrono::steady_clock::now() - start) {
    if (syscall(__NR_io_uring_enter, ring, fresh, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0)
      return 1;
    fresh = 0;
    for (unsigned head = done_head->load(); head != done_tail->load(); done_head->store(++head)) {
      const io_uring_cqe& completion = completions[head & (params.cq_entries - 1)];
      if (completion.res != static_cast<int>(block)) return 1;
      prepare(static_cast<unsigned>(completion.user_data));
      ++fresh, ++reads;
    }
  }
  std::printf("%.0f\n", static_cast<double>(reads) / spent.count());
}
