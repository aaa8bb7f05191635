// An SSD store on a failing disk. The program overrides the functions of the C library that the
// store writes through, so that a test can make any of them fail.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <fstream>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

#include "embstore/ssd_store.h"
#include "store_oracle.h"

namespace {

struct Fault {
  const char* call;  // of the function
  std::string part;  // of the path, which ends with "$"
  int error;
  int times = 1;
  bool forgets = false;  // what was written since the last fdatasync of the file becomes zeros
};

std::mutex mutex;
std::vector<Fault> faults;
std::map<std::string, std::vector<std::pair<int64_t, int64_t>>> unsynced;  // offset, bytes

std::string PathOf(int fd) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = readlink(link.c_str(), path, sizeof(path));
  return std::string(path, length < 0 ? 0 : static_cast<size_t>(length));
}

// The error that the call should fail with, or 0.
int Failure(const char* call, const std::string& path) {
  std::lock_guard guard(mutex);
  for (Fault& fault : faults) {
    if (fault.times == 0 || std::strcmp(fault.call, call) != 0) continue;
    if ((path + "$").find(fault.part) == std::string::npos) continue;
    --fault.times;
    if (fault.forgets) {
      const int fd = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path.c_str(), O_RDWR, 0));
      for (const auto& [offset, bytes] : unsynced[path]) {
        const std::vector<char> zeros(static_cast<size_t>(bytes));
        syscall(SYS_pwrite64, fd, zeros.data(), zeros.size(), offset);
      }
      syscall(SYS_close, fd);
    }
    return fault.error;
  }
  return 0;
}

template <typename Call>
auto Try(const char* name, const std::string& path, const Call& call) {
  if (const int error = Failure(name, path)) {
    errno = error;
    return decltype(call()){-1};
  }
  return call();
}

void Fail(const Fault& fault) {
  std::lock_guard guard(mutex);
  faults.push_back(fault);
}

// Whether every fault has happened. Removes the rest.
bool AllHappened() {
  std::lock_guard guard(mutex);
  bool all = true;
  for (const Fault& fault : faults) all = all && fault.times <= 0;
  faults.clear();
  return all;
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return Try("open", path,
             [&] { return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode)); });
}

ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  return Try("pread", PathOf(fd),
             [&] { return static_cast<ssize_t>(syscall(SYS_pread64, fd, data, bytes, offset)); });
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  const std::string path = PathOf(fd);
  return Try("pwrite", path, [&] {
    {
      std::lock_guard guard(mutex);
      unsynced[path].emplace_back(offset, static_cast<int64_t>(bytes));
    }
    return static_cast<ssize_t>(syscall(SYS_pwrite64, fd, data, bytes, offset));
  });
}

int fsync(int fd) {
  return Try("fsync", PathOf(fd), [&] { return static_cast<int>(syscall(SYS_fsync, fd)); });
}

int fdatasync(int fd) {
  const std::string path = PathOf(fd);
  return Try("fdatasync", path, [&] {
    {
      std::lock_guard guard(mutex);
      unsynced[path].clear();
    }
    return static_cast<int>(syscall(SYS_fdatasync, fd));
  });
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  return Try("renameat2", to, [&] {
    return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  });
}
}

namespace embstore {
namespace {

SsdStoreOptions Options(const TemporaryDirectory& directory, int64_t row_bytes,
                        bool direct = true) {
  return {.path = directory.path, .row_bytes = row_bytes, .direct = direct};
}

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys;
  for (int64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

std::set<std::string> NamesIn(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.insert(entry.path().filename());
  }
  return names;
}

void CheckCheckpoint(const TemporaryDirectory& directory, int64_t row_bytes, const char* name,
                     const Oracle& oracle) {
  SsdStoreOptions options = Options(directory, row_bytes);
  options.create = false;
  const auto reader = SsdStore::Open(options);
  reader->LoadCheckpoint(name);
  CheckHolds(*reader, oracle);
}

TEST(A checkpoint whose files cannot be read once keeps its rows) {
  for (const char* file : {"LIST", "CHECKSUMS", "index-"}) {
    for (const auto& [call, error] : {std::pair("open", EMFILE), std::pair("pread", EIO)}) {
      const Fault fault{call, std::string("/kept/") + file, error};
      const TemporaryDirectory directory;
      Oracle kept, later;
      {
        const auto store = SsdStore::Open(Options(directory, 1000));
        PutAll(*store, Range(0, 1500), 1, kept);
        store->SaveCheckpoint("kept");
      }
      Fail(fault);
      CHECK_THROWS(std::system_error, "/kept/", SsdStore::Open(Options(directory, 1000)));
      CHECK(AllHappened());
      const auto store = SsdStore::Open(Options(directory, 1000));
      PutAll(*store, Range(0, 3000), 2, later);
      store->SaveCheckpoint("later");
      CheckCheckpoint(directory, 1000, "kept", kept);
      // A checkpoint that cannot be read for the moment changes nothing either.
      Fail(fault);
      CHECK_THROWS(std::system_error, "/kept/", store->LoadCheckpoint("kept"));
      CHECK(AllHappened());
      CheckHolds(*store, later);
      store->LoadCheckpoint("kept");
      CheckHolds(*store, kept);
    }
  }
}

TEST(A checkpoint that is damaged when the store is opened keeps every row) {
  const TemporaryDirectory directory;
  Oracle kept, later;
  {
    const auto store = SsdStore::Open(Options(directory, 1000));
    PutAll(*store, Range(0, 2500), 1, kept);
    store->SaveCheckpoint("kept");
  }
  const std::string list = directory.path + "/snapshots/kept/LIST";
  std::filesystem::rename(list, directory.path + "/aside");
  const auto store = SsdStore::Open(Options(directory, 1000));
  CHECK_THROWS(InvalidState, "LIST is missing", store->LoadCheckpoint("kept"));
  PutAll(*store, Range(0, 5000), 2, later);
  store->SaveCheckpoint("later");
  std::filesystem::rename(directory.path + "/aside", list);
  store->LoadCheckpoint("kept");
  CheckHolds(*store, kept);
  store->LoadCheckpoint("later");
  store->DeleteCheckpoint("kept");
  CheckHolds(*store, later);
}

TEST(A checkpoint that is put into an open store is not loaded) {
  const TemporaryDirectory directory;
  Oracle oracle;
  const auto store = SsdStore::Open(Options(directory, 1000));
  PutAll(*store, Range(0, 100), 1, oracle);
  store->SaveCheckpoint("a");
  std::filesystem::copy(directory.path + "/snapshots/a", directory.path + "/snapshots/b");
  CHECK_THROWS(InvalidState, "open the store again", store->LoadCheckpoint("b"));
  CheckHolds(*store, oracle);
}

TEST(A checkpoint that fails leaves the old one and no draft and can be repeated) {
  const std::vector<Fault> faults = {
      {"pwrite", "/index-", ENOSPC}, {"fsync", "/index-", EIO},    {"open", "/LIST", EMFILE},
      {"fsync", "/CHECKSUMS", EIO},  {"fsync", "/values$", EIO},   {"fdatasync", "/keys/", EIO},
      {"renameat2", "/latest", EIO}, {"pwrite", "/meta/", ENOSPC},
  };
  for (const Fault& fault : faults) {
    const TemporaryDirectory directory;
    Oracle oracle;
    const auto store = SsdStore::Open(Options(directory, 97));
    PutAll(*store, Range(0, 1023), 1, oracle);
    store->SaveCheckpoint("latest");
    const Oracle before = oracle;
    PutAll(*store, Range(500, 2000), 2, oracle);
    Fail(fault);
    CHECK_THROWS(std::system_error, "", store->SaveCheckpoint("latest"));
    CHECK(AllHappened());
    CHECK(NamesIn(directory.path + "/snapshots") == std::set<std::string>{"latest"});
    CheckCheckpoint(directory, 97, "latest", before);
    CheckHolds(*store, oracle);
    store->SaveCheckpoint("latest");
    CheckCheckpoint(directory, 97, "latest", oracle);
    CHECK(NamesIn(directory.path + "/snapshots") == std::set<std::string>{"latest"});
  }
}

TEST(A checkpoint is published only in a directory that is durable itself) {
  const TemporaryDirectory directory;
  const auto store = SsdStore::Open(Options(directory, 97));
  Oracle oracle;
  PutAll(*store, Range(0, 7), 1, oracle);
  Fail({"fsync", directory.path + "$", EIO});
  CHECK_THROWS(std::system_error, "fsync of " + directory.path, store->SaveCheckpoint("s"));
  CHECK(AllHappened());
  CHECK(store->Checkpoints().empty());
  store->SaveCheckpoint("s");
  CheckCheckpoint(directory, 97, "s", oracle);
}

TEST(An error after a checkpoint was published says so and a retry works) {
  const TemporaryDirectory directory;
  Oracle oracle;
  const auto store = SsdStore::Open(Options(directory, 97));
  for (uint64_t version = 1; version <= 3; ++version) {  // a new name, then an old one
    PutAll(*store, Range(0, 1023), version, oracle);
    Fail({"fsync", "/snapshots$", EIO});
    CHECK_THROWS(std::system_error, "'latest' of ssd store " + directory.path + " is published",
                 store->SaveCheckpoint("latest"));
    CHECK(AllHappened());
    CHECK_EQ(store->Checkpoints().size(), size_t{1});
    CheckCheckpoint(directory, 97, "latest", oracle);
  }
  store->SaveCheckpoint("latest");
  CHECK(NamesIn(directory.path + "/snapshots") == std::set<std::string>{"latest"});
  Churn(*store, oracle, 10, 20, 3000, 1500);
  store->SaveCheckpoint("other");
  Fail({"fsync", "/snapshots$", EIO});
  CHECK_THROWS(std::system_error, "'latest' of ssd store " + directory.path + " is deleted",
               store->DeleteCheckpoint("latest"));
  CHECK(AllHappened());
  CHECK(store->Checkpoints() == std::vector<std::string>{"other"});
  store->DeleteCheckpoint("other");
  CHECK(NamesIn(directory.path + "/snapshots").empty());
  CheckHolds(*store, oracle);
}

TEST(After a failed fdatasync rows are written again) {
  for (const char* file : {"/values/", "/keys/", "/meta/"}) {
    for (bool direct : {true, false}) {
      const TemporaryDirectory directory;
      Oracle oracle;
      const auto store = SsdStore::Open(Options(directory, 1000, direct));
      PutAll(*store, Range(0, 100), 1, oracle);
      store->SaveCheckpoint("first");
      const Oracle first = oracle;
      PutAll(*store, Range(50, 300), 2, oracle);  // all of it in the open segment
      Fail({"fdatasync", file, EIO, 1, /*forgets=*/true});
      CHECK_THROWS(std::system_error, "fdatasync", store->SaveCheckpoint("second"));
      CHECK(AllHappened());
      CheckCheckpoint(directory, 1000, "first", first);
      store->SaveCheckpoint("second");
      CheckCheckpoint(directory, 1000, "second", oracle);
      CheckCheckpoint(directory, 1000, "first", first);
    }
  }
}

TEST(After a failed fdatasync full segments are written again or their loss is reported) {
  for (bool forgets : {false, true}) {
    const TemporaryDirectory directory;
    Oracle oracle;
    const auto store = SsdStore::Open(Options(directory, 1000, /*direct=*/false));
    PutAll(*store, Range(0, 5000), 1, oracle);  // five segments of 1024 rows
    Fail({"fdatasync", "/values/", EIO, 1, forgets});
    CHECK_THROWS(std::system_error, "fdatasync", store->SaveCheckpoint("s"));
    CHECK(AllHappened());
    const int64_t before = store->stats().bytes_written;
    if (forgets) {
      for (int i = 0; i < 2; ++i) {
        CHECK_THROWS(InvalidState, "does not match its checksum", store->SaveCheckpoint("s"));
      }
      PutAll(*store, Range(0, 5000), 2, oracle);  // new versions of all rows heal it
    }
    store->SaveCheckpoint("s");
    CHECK(store->stats().bytes_written - before > 4096 * 1000);
    CheckCheckpoint(directory, 1000, "s", oracle);
  }
}

TEST(A disk that fails in compaction fails no put) {
  for (int error : {EIO, ENOMEM}) {
    const TemporaryDirectory directory;
    const auto store = SsdStore::Open(Options(directory, 4096));
    Oracle oracle;
    Churn(*store, oracle, 1, 20, 3000, 1000);
    Fail({"pread", "/values/", error, 7});
    Churn(*store, oracle, 21, 60, 3000, 1000);
    CHECK(AllHappened());
    CheckHolds(*store, oracle);
    CHECK(store->stats().moved_rows > 0);
  }
}

TEST(Compaction of mapped files needs no read of whole segments) {
  const TemporaryDirectory directory;
  SsdStoreOptions options = Options(directory, 4096);
  options.direct = false;
  const auto store = SsdStore::Open(options);
  Oracle oracle;
  Fail({"pread", "/values/", EIO, 1});
  Churn(*store, oracle, 1, 80, 3000, 1000);
  CHECK(store->stats().moved_rows > 0);
  CHECK(!AllHappened());
  CheckHolds(*store, oracle);
}

TEST(A put moves no more rows than a few times its own) {
  const TemporaryDirectory directory;
  const auto store = SsdStore::Open(Options(directory, 4096));
  Oracle oracle;
  auto scanner = store->Scan();  // no row moves meanwhile
  Churn(*store, oracle, 1, 100, 3000, 1000);
  scanner.reset();
  int64_t most = 0;
  for (uint64_t version = 101; version < 140; ++version) {
    const int64_t before = store->stats().moved_rows;
    Churn(*store, oracle, version, 1, 3000, 1000);
    most = std::max(most, store->stats().moved_rows - before);
  }
  CHECK(most > 0);
  CHECK(most <= 4 * (1000 + 256));
  CHECK(store->stats().file_bytes <= 2 * 3000 * 4096 + (32 << 20));
  CheckHolds(*store, oracle);
}

TEST(Close waits for readers and later calls throw) {
  for (bool direct : {true, false}) {
    for (int round = 0; round < 5; ++round) {
      const TemporaryDirectory directory;
      const auto store = SsdStore::Open(Options(directory, 512, direct));
      Oracle oracle;
      const std::vector<int64_t> keys = Range(0, 9000);
      PutAll(*store, keys, 1, oracle);
      store->Flush();
      std::atomic<int> reading{0}, wrong{0}, closed{0};
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t) {
        threads.emplace_back([&, t] {
          std::vector<std::byte> rows(keys.size() * 512);
          std::vector<uint64_t> scores(keys.size());
          std::vector<uint8_t> found(keys.size());
          StoredRows block;
          try {
            const auto scanner = t == 2 ? store->Scan() : nullptr;
            while (true) {
              if (scanner) {
                scanner->Next(97, block);
              } else {
                store->Get(keys, rows.data(), scores.data(), found.data());
                wrong += found[8999] != 1;
              }
              ++reading;
            }
          } catch (const InvalidState&) {
            ++closed;
          } catch (...) {
            ++wrong;
          }
        });
      }
      while (reading < 4 + round) std::this_thread::yield();
      store->Close();
      for (std::thread& thread : threads) thread.join();
      CHECK_EQ(wrong.load(), 0);
      CHECK_EQ(closed.load(), 3);
      SsdStore::Open(Options(directory, 512))->Close();
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
