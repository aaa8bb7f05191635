#include "../src/mapped_read.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <system_error>
#include <vector>

#include "store_oracle.h"

namespace embstore {
namespace {

constexpr size_t kPage = 4096;

// A file that is cut short once it is mapped.
struct CutFile {
  explicit CutFile(size_t pages) : pages(pages), path(directory.path + "/cut") {
    fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    const std::vector<std::byte> ones(pages * kPage, std::byte{1});
    CHECK_EQ(write(fd, ones.data(), ones.size()), static_cast<ssize_t>(ones.size()));
    void* const made = mmap(nullptr, ones.size(), PROT_READ, MAP_SHARED, fd, 0);
    CHECK(made != MAP_FAILED);
    mapped = static_cast<const std::byte*>(made);
  }
  ~CutFile() {
    munmap(const_cast<std::byte*>(mapped), pages * kPage);
    close(fd);
  }
  void Cut(size_t to_pages) const {
    CHECK_EQ(ftruncate(fd, static_cast<off_t>(to_pages * kPage)), 0);
  }
  MappedRead At(size_t page, std::byte* to) const {
    return {mapped + page * kPage, to, fd, static_cast<int64_t>(page * kPage), &path};
  }

  const TemporaryDirectory directory;
  const size_t pages;
  const std::string path;
  int fd = -1;
  const std::byte* mapped = nullptr;
};

std::vector<int> Blocked() {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  std::vector<int> found;
  for (int number = 1; number < 32; ++number) {
    if (sigismember(&mask, number) == 1) found.push_back(number);
  }
  return found;
}

struct sigaction g_inner;

void CallInner(int number, siginfo_t* info, void* context) {
  g_inner.sa_sigaction(number, info, context);
}

TEST(A page that was cut off is an error each time it is read) {
  CatchBusErrors();
  const CutFile file(3);
  file.Cut(1);
  const std::vector<int> blocked = Blocked();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::byte> to(97);
    CHECK_THROWS(std::system_error, "/cut", ReadMapped(std::vector{file.At(2, to.data())}, 97));
    ReadMapped(std::vector{file.At(0, to.data())}, 97);
    CHECK(to == std::vector<std::byte>(97, std::byte{1}));
    CHECK(Blocked() == blocked);
  }
}

// Handlers of crash reporters and of ThreadSanitizer block all signals while they call ours.
TEST(A handler that blocks all signals may call ours) {
  CatchBusErrors();
  struct sigaction outer = {};
  outer.sa_sigaction = CallInner;
  outer.sa_flags = SA_SIGINFO;
  sigfillset(&outer.sa_mask);
  sigaction(SIGBUS, &outer, &g_inner);
  const CutFile file(2);
  file.Cut(0);
  const std::vector<int> blocked = Blocked();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::byte> to(97);
    CHECK_THROWS(std::system_error, "/cut", ReadMapped(std::vector{file.At(1, to.data())}, 97));
    CHECK(Blocked() == blocked);
  }
  sigaction(SIGBUS, &g_inner, nullptr);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
