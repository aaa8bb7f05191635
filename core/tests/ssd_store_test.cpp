#include "embstore/ssd_store.h"

#include <atomic>
#include <fstream>
#include <thread>

#include "embstore/hash.h"
#include "store_oracle.h"

namespace embstore {
namespace {

SsdStoreOptions Options(const TemporaryDirectory& directory, int64_t row_bytes,
                        bool direct = true) {
  return {.path = directory.path, .row_bytes = row_bytes, .direct = direct};
}

std::string FirstValues(const TemporaryDirectory& directory) {
  return directory.path + "/values/value-000000000000";
}

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys;
  for (int64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

void GetAll(const Store& store, std::span<const int64_t> keys) {
  std::vector<std::byte> rows(keys.size() * static_cast<size_t>(store.row_bytes()));
  std::vector<uint8_t> found(keys.size());
  store.Get(keys, rows.data(), nullptr, found.data());
}

TEST(An SSD store holds what a map holds) {
  for (bool direct : {true, false}) {
    for (int64_t width : {1, 97, 512, 1023, 5000}) {
      for (int64_t block : {512, 4096}) {
        const TemporaryDirectory directory;
        SsdStoreOptions options = Options(directory, width, direct);
        options.physical_block_bytes = block;
        const auto store = SsdStore::Open(options);
        Oracle oracle;
        Churn(*store, oracle, 1, 20, 600, 97);
        store->Flush();
        Churn(*store, oracle, 21, 5, 600, 7);
        CheckHolds(*store, oracle);
        store->Clear();
        CheckHolds(*store, {});
      }
    }
  }
}

TEST(A put may mix keys that are there with new ones that come again) {
  const TemporaryDirectory directory;
  const auto store = SsdStore::Open(Options(directory, 97));
  Oracle oracle;
  PutAll(*store, Range(0, 1023), 1, oracle);
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 20'000; ++key) {  // so many that all parts of the index grow
    keys.insert(keys.end(), {key % 1023, 5000 + key, 5000 + key / 2});
  }
  PutAll(*store, keys, 2, oracle);
  store->CheckInvariants();
  CheckHolds(*store, oracle);
}

TEST(Compaction reclaims space and loses no row) {
  for (bool direct : {true, false}) {
    const TemporaryDirectory directory;
    const auto store = SsdStore::Open(Options(directory, 4096, direct));
    Oracle oracle;
    Churn(*store, oracle, 1, 120, 3000, 1000);  // 480 MB of rows of which 12 MB live
    const SsdStoreStats stats = store->stats();
    CHECK(stats.moved_rows > 0);
    CHECK(stats.file_bytes <= 2 * 3000 * 4096 + (32 << 20));
    store->CheckInvariants();
    CheckHolds(*store, oracle);
  }
}

TEST(A segment that is put makes room in four that are mostly garbage) {
  constexpr int64_t kSegment = 256;  // rows of 4096 bytes
  for (bool direct : {true, false}) {
    const TemporaryDirectory directory;
    const auto store = SsdStore::Open(Options(directory, 4096, direct));
    Oracle oracle;
    PutAll(*store, Range(0, 30 * kSegment), 1, oracle);
    store->Flush();
    std::vector<int64_t> gone;
    for (int64_t key = 0; key < 30 * kSegment; ++key) {
      if (key % 32 >= 9) gone.push_back(key);
    }
    EraseAll(*store, gone, oracle);  // 72 rows of each segment are left
    CHECK_EQ(store->stats().moved_rows, 0);
    PutAll(*store, Range(100'000, 100'000 + kSegment), 2, oracle);
    CHECK_EQ(store->stats().moved_rows, 4 * 72);
    CheckHolds(*store, oracle);
  }
}

TEST(Rows of a checkpoint that was loaded can be moved) {
  const TemporaryDirectory directory;
  const auto store = SsdStore::Open(Options(directory, 1000, /*direct=*/false));
  Oracle first, latest;
  PutAll(*store, Range(0, 16'000), 1, first);
  store->SaveCheckpoint("first");
  Churn(*store, latest, 2, 10, 16'000, 4000);
  store->LoadCheckpoint("first");
  store->DeleteCheckpoint("first");
  store->CheckInvariants();
  latest = first;
  const int64_t before = store->stats().moved_rows;
  Churn(*store, latest, 12, 60, 16'000, 4000);
  CHECK(store->stats().moved_rows > before);
  store->CheckInvariants();
  CheckHolds(*store, latest);
}

TEST(Compaction of a truncated file is neither a signal nor the error of a put) {
  const TemporaryDirectory directory;
  const auto store = SsdStore::Open(Options(directory, 1000, /*direct=*/false));
  Oracle oracle;
  PutAll(*store, Range(0, 16'000), 1, oracle);
  store->Flush();
  PutAll(*store, Range(2000, 16'000), 2, oracle);
  store->Flush();
  std::filesystem::resize_file(FirstValues(directory), 256 * 4096);  // one segment
  std::vector<int64_t> others = Range(2000, 16'000);
  for (uint64_t version = 3; version < 8; ++version) PutAll(*store, others, version, oracle);
  // Later segments have made the file longer again.
  CHECK_THROWS(InvalidState, "damaged", GetAll(*store, Range(0, 2000)));
  GetAll(*store, others);
  store->CheckInvariants();
}

TEST(
    Checkpoints survive what follows and a store that is opened again is empty until it loads one) {
  const TemporaryDirectory directory;
  Oracle first, second, latest;
  {
    const auto store = SsdStore::Open(Options(directory, 1000));
    Churn(*store, latest, 1, 10, 4000, 1500);
    store->SaveCheckpoint("first");
    first = latest;
    Churn(*store, latest, 11, 10, 4000, 1500);
    store->SaveCheckpoint("second");
    second = latest;
    Churn(*store, latest, 21, 30, 4000, 1500);
    CheckHolds(*store, latest);
    // No Close: what was not in a checkpoint is gone, as after a crash.
  }
  const auto store = SsdStore::Open(Options(directory, 1000));
  CheckHolds(*store, {});
  store->LoadCheckpoint("first");
  CheckHolds(*store, first);
  store->LoadCheckpoint("second");
  CheckHolds(*store, second);
  CHECK_THROWS(std::system_error, "no snapshot 'third'", store->LoadCheckpoint("third"));
  CheckHolds(*store, second);
  const int64_t before = store->stats().file_bytes;
  store->DeleteCheckpoint("first");
  CHECK(store->stats().file_bytes < before);
  CheckHolds(*store, second);
  CHECK_EQ(store->Checkpoints().size(), size_t{1});
}

TEST(A damaged block is reported with its rows and the others can be read) {
  for (bool direct : {true, false}) {
    const TemporaryDirectory directory;
    const auto store = SsdStore::Open(Options(directory, 128, direct));
    Oracle oracle;
    PutAll(*store, Range(0, 9000), 1, oracle);  // segments hold 8192, and the open one is in memory
    store->Flush();
    {
      std::fstream file(FirstValues(directory), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(5 * 4096 + 3 * 128 + 17);
      file.put('\x55');
    }
    CHECK_THROWS(InvalidState, "its block holds rows 160 to 191", GetAll(*store, Range(163, 164)));
    GetAll(*store, Range(0, 163));
    GetAll(*store, Range(164, 8192));
    // Compaction leaves it where it is, and a new version of the row heals it.
    PutAll(*store, Range(163, 164), 2, oracle);
    Churn(*store, oracle, 3, 60, 16'000, 4000);
    CheckHolds(*store, oracle);
  }
}

TEST(A truncated file is an error and not a signal) {
  for (bool direct : {true, false}) {
    const TemporaryDirectory directory;
    const auto store = SsdStore::Open(Options(directory, 128, direct));
    Oracle oracle;
    PutAll(*store, Range(0, 9000), 1, oracle);
    store->Flush();
    GetAll(*store, Range(0, 8192));
    std::filesystem::resize_file(FirstValues(directory), 64 * 4096);
    CHECK_THROWS(std::system_error, "reading", GetAll(*store, Range(4096, 4097)));
    CHECK_THROWS(std::system_error, "reading", GetAll(*store, Range(0, 8192)));
    GetAll(*store, Range(0, 64 * 32));
  }
}

TEST(A checkpoint whose last row was cut off is not loaded) {
  const TemporaryDirectory directory;
  const auto store = SsdStore::Open(Options(directory, 97, false));
  Oracle oracle;
  PutAll(*store, Range(0, 7), 1, oracle);
  store->SaveCheckpoint("cut");
  std::filesystem::resize_file(FirstValues(directory), 6 * 97 + 50);
  CHECK_THROWS(InvalidState, "ends before row 6", store->LoadCheckpoint("cut"));
}

TEST(A directory is open once and its sizes are kept) {
  const TemporaryDirectory directory;
  {
    const auto store = SsdStore::Open(Options(directory, 64));
    CHECK_THROWS(std::system_error, "locked", SsdStore::Open(Options(directory, 64)));
    store->Close();
    CHECK_THROWS(InvalidState, "is closed", GetAll(*store, Range(0, 1)));
    store->Close();
  }
  CHECK_THROWS(InvalidArgument, "VALUE_SIZE 64", SsdStore::Open(Options(directory, 68)));
  SsdStoreOptions narrow = Options(directory, 64);
  narrow.key_bytes = 4;
  CHECK_THROWS(InvalidArgument, "KEY_SIZE 8", SsdStore::Open(narrow));
  narrow.physical_block_bytes = 1000;
  CHECK_THROWS(InvalidArgument, "physical_block_bytes", SsdStore::Open(narrow));
}

TEST(A capacity is kept and keys of 4 bytes have to fit) {
  const TemporaryDirectory directory;
  SsdStoreOptions options = Options(directory, 64);
  options.capacity_rows = 100;
  options.key_bytes = 4;
  const auto store = SsdStore::Open(options);
  Oracle oracle, refused;
  PutAll(*store, Range(-50, 50), 1, oracle);
  CHECK_THROWS(InvalidState, "100 of 100", PutAll(*store, Range(49, 51), 2, refused));
  CHECK_THROWS(InvalidArgument, "int32",
               PutAll(*store, std::vector<int64_t>{int64_t{1} << 31}, 2, refused));
  CheckHolds(*store, oracle);
  store->SaveCheckpoint("full");
  store->LoadCheckpoint("full");
  CheckHolds(*store, oracle);
}

TEST(Keys that are crafted against the public hash cost no more than others) {
  // The first and last bits of their HashKey are equal: an index that uses it takes a minute for
  // them.
  const auto inverse = [](uint64_t odd) {
    uint64_t x = odd;
    for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
    return x;
  };
  std::vector<int64_t> keys;
  for (uint64_t i = 0; i < 100'000; ++i) {
    uint64_t x = i << 8 | 7;
    x ^= x >> 33;
    x *= inverse(0xc4ceb9fe1a85ec53ULL);
    x ^= x >> 33;
    x *= inverse(0xff51afd7ed558ccdULL);
    x ^= x >> 33;
    keys.push_back(static_cast<int64_t>(x));
    CHECK_EQ(HashKey(keys.back()), i << 8 | 7);
  }
  const TemporaryDirectory directory;
  const auto store = SsdStore::Open(Options(directory, 8));
  Oracle oracle;
  PutAll(*store, keys, 1, oracle);
  CheckHolds(*store, oracle);
}

TEST(Many threads read while one writes and checkpoints) {
  for (bool direct : {true, false}) {
    const TemporaryDirectory directory;
    const auto store = SsdStore::Open(Options(directory, 512, direct));
    Oracle oracle;
    const std::vector<int64_t> fixed = Range(100'000, 104'000);
    PutAll(*store, fixed, 1, oracle);
    std::atomic<bool> stop{false};
    std::atomic<int> wrong{0};
    std::vector<std::thread> readers;
    for (int t = 0; t < 3; ++t) {
      readers.emplace_back([&] {
        std::vector<std::byte> rows(fixed.size() * 512), wanted(512);
        std::vector<uint64_t> scores(fixed.size());
        std::vector<uint8_t> found(fixed.size());
        while (!stop) {
          store->Get(fixed, rows.data(), scores.data(), found.data());
          for (size_t i = 0; i < fixed.size(); ++i) {
            FillRow(fixed[i], 1, wanted);
            wrong += !found[i] || scores[i] != 1 ||
                     std::memcmp(&rows[i * 512], wanted.data(), wanted.size()) != 0;
          }
        }
      });
    }
    for (uint64_t round = 0; round < 4; ++round) {
      Churn(*store, oracle, 10 + round * 10, 8, 6000, 3000);
      store->SaveCheckpoint("s");
    }
    stop = true;
    for (std::thread& reader : readers) reader.join();
    CHECK_EQ(wrong.load(), 0);
    CheckHolds(*store, oracle);
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
