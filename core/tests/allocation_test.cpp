// What tables and stores are after an allocation failed in the middle of a call: as they were
// before, but for the rows of a Put, of which a store may have kept some.
#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <vector>

#include "../src/batch_read.h"
#include "../src/file_io.h"
#include "check.h"
#include "embstore/parallel.h"
#include "failing_allocations.h"
#include "snapshot_oracle.h"
#include "store_oracle.h"

namespace embstore {
namespace {

struct Case {
  const char* name;
  int64_t capacity;
  int64_t before, batch;  // keys
  bool store = false, changes = false, pinned = false, admits = false;
};

TEST(A batch that runs out of memory changes nothing and can be repeated) {
  const std::vector<Case> cases = {
      {"first rows", 1 << 16, 0, 50},
      {"growing in steps", 1 << 16, 5000, 300},
      {"growing in a leap", 1 << 16, 100, 5000},
      {"evicting", 512, 512, 100},
      {"filling and evicting", 512, 470, 100},
      {"evicting pinned rows", 512, 512, 100, false, false, true},
      {"with changes tracked", 512, 512, 100, false, true, false},
      {"admitting by frequency", 512, 512, 300, false, false, false, true},
      {"over a store", 512, 512, 100, true, false, false},
      {"over a store, beyond the budget", 512, 500, 700, true, false, true},
  };
  for (const Case& c : cases) {
    for (int threads : {1, 2}) {
      SetNumThreads(threads);
      TableOptions options = SmallTable(3, c.capacity);
      options.dtype = DType::kBFloat16;
      options.optimizer.kind = OptimizerKind::kAdagrad;
      options.eviction_log = EvictionLog::kRows;
      if (c.admits) {
        options.score_strategy = ScoreStrategy::kAgedLfu;
        options.admit_by_frequency = true;
        options.half_life = 1;  // so every newcomer is admitted
      }
      const int64_t row_bytes = StoredRowBytes(3, options.dtype, options.optimizer);
      if (c.store) options.store = MakeMemoryStore(row_bytes, 0);
      const auto table = Table::Create(options);
      const Forward kept = LookUpOne(table, Range(0, c.before));
      if (c.changes) table->TrackChanges(true);
      const auto keys = Range(100000, 100000 + c.batch);
      Forward list;
      if (!c.pinned) const_cast<Forward&>(kept).result.slots.reset();
      const auto all = Range(0, c.before);
      const auto values = [&] {
        std::vector<float> got(all.size() * 3), states(all.size() * 3);
        std::vector<uint64_t> scores(all.size());
        std::vector<uint8_t> found(all.size());
        table->Read(all, got.data(), states.data(), scores.data(), found.data());
        return std::tuple(got, states, scores, found);
      };
      const auto before = values();
      const int64_t failures = FailEachAllocation(
          [&] { list = LookUpOne(table, keys); },
          [&] {
            CHECK(values() == before);
            CHECK_EQ(CountFound(*table, keys), 0);
            table->CheckInvariants();
            if (!c.store) CHECK_EQ(table->size(), c.before);
            CHECK_EQ(static_cast<int64_t>(AllRows(*table).size()), table->size());
          });
      CHECK(failures > 5);
      CHECK_EQ(list.result.refused, 0);
      CHECK_EQ(CountFound(*table, keys), c.batch);
      for (size_t i = 0; i < keys.size(); ++i) CHECK(list.out[3 * i] != -1.0f);
      CHECK_EQ(static_cast<int64_t>(AllRows(*table).size()), table->size());
      LookUpOne(table, Range(200000, 200400));
      CHECK_EQ(static_cast<int64_t>(AllRows(*table).size()), table->size());
      table->CheckInvariants();
    }
  }
  SetNumThreads(2);
}

// A snapshot is taken, a batch evicts rows, the snapshot is read. It fails or is exact, and the
// table is sound after both.
TEST(A snapshot that runs out of memory fails and never gives wrong rows) {
  SetNumThreads(1);
  constexpr int64_t kRows = 4096;
  std::vector<int64_t> keys(kRows);
  std::vector<float> values(kRows * 3);
  std::vector<uint64_t> scores(kRows);
  for (const bool store : {false, true}) {
    TableOptions options = SmallTable(3, 512);
    if (store) {
      options.store = MakeMemoryStore(StoredRowBytes(3, options.dtype, options.optimizer), 0);
    }
    const auto table = Table::Create(options);
    for (int64_t first = 0; first < 1500; first += 100) LookUpOne(table, Range(first, first + 100));
    int64_t exact = 0, failures = 0;
    for (bool done = false; !done; ++failures) {
      CHECK(failures < 2000);
      if (failures >= 2000) return;
      std::map<int64_t, RowValues> before, seen;
      {
        Snapshot snapshot(table);
        before = Rest(snapshot);
      }
      const std::vector<int64_t> coming = Range(100 * (failures % 15), 100 * (failures % 15) + 40);
      int64_t n = 0;
      bool read = false;
      allocations_left = failures;
      try {
        Snapshot snapshot(table);
        try {
          LookUpOne(table, coming);
        } catch (const std::bad_alloc&) {  // the batch has no effect
        }
        while (const int64_t got = snapshot.Read(kRows - n, 0, &keys[static_cast<size_t>(n)],
                                                 &values[static_cast<size_t>(3 * n)], nullptr,
                                                 &scores[static_cast<size_t>(n)])) {
          n += got;
        }
        read = true;
      } catch (const std::bad_alloc&) {
      }
      done = allocations_left.exchange(-1) >= 0;  // none failed
      table->CheckInvariants();
      if (!read) continue;
      ++exact;
      CHECK_EQ(n, static_cast<int64_t>(before.size()));
      for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
        const RowValues& row = before[keys[i]];
        CHECK_EQ(scores[i], row.score);
        CHECK(std::equal(row.value.begin(), row.value.end(), &values[3 * i]));
      }
    }
    CHECK(failures > 20);
    CHECK(exact > 1);
  }
  SetNumThreads(2);
}

// The versions of all rows; Get verifies their bytes by their checksums.
Oracle Versions(const Store& store, std::span<const int64_t> keys) {
  std::vector<std::byte> rows(keys.size() * static_cast<size_t>(store.row_bytes()));
  std::vector<uint64_t> scores(keys.size());
  std::vector<uint8_t> found(keys.size());
  store.Get(keys, rows.data(), scores.data(), found.data());
  Oracle versions;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (found[i]) versions[keys[i]] = scores[i];
  }
  return versions;
}

TEST(An SSD store that runs out of memory loses no row and publishes a checkpoint or none) {
  const TemporaryDirectory directory;
  constexpr size_t kWidth = 16384;
  const auto store = SsdStore::Open({.path = directory.path, .row_bytes = kWidth});
  Oracle oracle;
  uint64_t version = 1;
  // Half of the rows are replaced again and again, so that the store compacts while it is written.
  const auto keys = Range(0, 400);
  PutAll(*store, keys, version, oracle);
  int64_t puts = 0, failures = 0;
  for (bool failed = true; failed || store->stats().moved_rows == 0; ++puts) {
    CHECK(puts < 2000);
    if (puts >= 2000) return;
    const std::span<const int64_t> some(&keys[static_cast<size_t>(37 * puts % 200)], 200);
    const std::vector<uint64_t> scores(some.size(), ++version);
    std::vector<std::byte> rows(some.size() * kWidth);
    for (size_t i = 0; i < some.size(); ++i) FillRow(some[i], version, {&rows[i * kWidth], kWidth});
    failed = false;
    allocations_left = failures;
    try {
      store->Put(some, rows.data(), scores.data());
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    failed |= allocations_left.exchange(-1) < 0;  // compaction may have met it
    failures += failed;
    const Oracle stored = Versions(*store, keys);
    CHECK_EQ(stored.size(), keys.size());
    for (const auto& [key, found] : stored) {
      const bool put = key >= some.front() && key <= some.back();
      CHECK(found == oracle[key] || (put && found == version));
    }
    oracle = stored;
    store->CheckInvariants();
  }
  CHECK(failures > 5);
  CheckHolds(*store, oracle);
  store->SaveCheckpoint("saved");
  const Oracle saved = oracle;
  const auto all = Range(0, 500);
  PutAll(*store, Range(100, 500), ++version, oracle);
  EraseAll(*store, Range(0, 50), oracle);
  const auto reader =
      SsdStore::Open({.path = directory.path, .row_bytes = kWidth, .create = false});
  const int64_t saves = FailEachAllocation([&] { store->SaveCheckpoint("saved"); },
                                           [&] {
                                             reader->LoadCheckpoint("saved");
                                             CHECK(Versions(*reader, all) == saved);
                                             CHECK(Versions(*store, all) == oracle);
                                             store->CheckInvariants();
                                           });
  CHECK(saves > 5);
  reader->LoadCheckpoint("saved");
  CheckHolds(*reader, oracle);
  CheckHolds(*store, oracle);
}

TEST(A batch of reads with few threads reads all) {
  const TemporaryDirectory directory;
  const std::string path = directory.path + "/bytes";
  std::vector<std::byte> bytes(1 << 20);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  WriteFile(path, bytes.data(), bytes.size());
  const int fd = OpenRegular(path, O_RDONLY);
  const Closer closer{fd};
  constexpr uint32_t kPiece = 1024;
  std::vector<std::byte> got(bytes.size());
  std::vector<ReadRequest> requests;
  for (uint32_t at = 0; at < bytes.size(); at += kPiece) {
    requests.push_back({.fd = fd, .offset = at, .bytes = kPiece, .to = &got[at]});
  }
  setenv("EMBSTORE_IO", "threads", 1);
  const int64_t failures = FailEachAllocation(
      [&] {
        std::fill(got.begin(), got.end(), std::byte{0});
        ReadBatch(requests, 16, [](size_t, const std::byte*) {});
        CHECK(got == bytes);
        if (allocations_left < 0) throw std::bad_alloc();  // a thread less, and all was read
      },
      [] {});
  unsetenv("EMBSTORE_IO");
  CHECK(failures > 5);
}

TEST(An SSD store that runs out of memory while it is opened or loaded can be opened again) {
  const TemporaryDirectory directory;
  constexpr size_t kWidth = 64;
  SsdStoreOptions options{.path = directory.path, .row_bytes = kWidth};
  Oracle oracle;
  {
    const auto store = SsdStore::Open(options);
    PutAll(*store, Range(0, 3000), 1, oracle);
    store->SaveCheckpoint("a name that does not fit into a string without an allocation");
    store->SaveCheckpoint("saved");
  }
  for (const bool create : {true, false}) {
    options.create = create;
    std::vector<std::string> names;
    std::shared_ptr<SsdStore> store;
    const int64_t failures = FailEachAllocation(
        [&] {
          store.reset();
          store = SsdStore::Open(options);
          names = store->Checkpoints();
          store->LoadCheckpoint("saved");
        },
        [] {});
    CHECK(failures > 50);
    CHECK_EQ(names.size(), size_t{2});
    CheckHolds(*store, oracle);
    store->CheckInvariants();
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
