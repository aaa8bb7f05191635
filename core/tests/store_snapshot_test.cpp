// A table over a store: snapshots, changes and scans while rows move between them.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "embstore/parallel.h"
#include "embstore/snapshot.h"
#include "embstore/ssd_store.h"
#include "snapshot_oracle.h"
#include "store_oracle.h"

namespace embstore {
namespace {

constexpr int64_t kDim = 5;
using AllOfThem = std::map<int64_t, RowValues>;

// 128 rows in memory and the rest below; every score strategy but one has scores that differ.
TableOptions CacheOver(std::shared_ptr<Store> store,
                       ScoreStrategy strategy = ScoreStrategy::kStep) {
  TableOptions options = SmallTable(kDim, 128);
  options.index.bucket_capacity = 16;
  options.optimizer.kind = OptimizerKind::kAdam;
  options.score_strategy = strategy;
  options.store = std::move(store);
  return options;
}

int64_t RowBytes() {
  OptimizerOptions adam;
  adam.kind = OptimizerKind::kAdam;
  return StoredRowBytes(kDim, DType::kFloat32, adam);
}

std::shared_ptr<SsdStore> Ssd(const std::string& path) {
  return SsdStore::Open({.path = path, .row_bytes = RowBytes(), .direct = false});
}

AllOfThem Everything(const std::shared_ptr<Table>& table) {
  Snapshot snapshot(table);
  const AllOfThem rows = Rest(snapshot);
  CHECK_EQ(snapshot.rows(), static_cast<int64_t>(rows.size()));
  return rows;
}

// What the table answers by key; the same rows by another way.
AllOfThem ByKey(const Table& table, const std::vector<int64_t>& keys) {
  const auto width = static_cast<size_t>(table.state_width());
  std::vector<float> values(keys.size() * kDim), states(keys.size() * width);
  std::vector<uint64_t> scores(keys.size());
  std::vector<uint8_t> found(keys.size());
  table.Read(keys, values.data(), states.data(), scores.data(), found.data());
  AllOfThem rows;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!found[i]) continue;
    RowValues& row = rows[keys[i]];
    row.value.assign(values.data() + i * kDim, values.data() + (i + 1) * kDim);
    row.state.assign(states.data() + i * width, states.data() + (i + 1) * width);
    row.score = scores[i];
  }
  return rows;
}

void Set(Table& table, const std::vector<int64_t>& keys, float value, bool whole) {
  const std::vector<float> values(keys.size() * kDim, value);
  const std::vector<float> states(keys.size() * 2 * kDim, value + 1);
  table.Assign(keys, values.data(), whole ? states.data() : nullptr, nullptr);
}

void Fill(Table& table, int64_t rows) {
  for (int64_t at = 0; at < rows; at += 50) {
    Set(table, Range(at, std::min(at + 50, rows)), static_cast<float>(at), true);
  }
}

// One of all the ways in which rows change hands.
void Disturb(const std::shared_ptr<Table>& table, int64_t rows, uint64_t step) {
  const std::vector<int64_t> keys = RandomKeys(40, rows + 200, step);
  switch (step % 6) {
    case 0:
      LookUpOne(table, keys);
      break;
    case 1:
      Set(*table, keys, static_cast<float>(step), false);
      break;
    case 2:
      Set(*table, keys, static_cast<float>(step), true);
      break;
    case 3:
      table->Erase(RandomKeys(5, rows, step));
      break;
    case 4:
      table->Prefetch(keys);
      break;
    default:
      table->Flush();
  }
}

using MakeStore = std::function<std::shared_ptr<Store>(const std::string& path)>;

std::vector<MakeStore> Stores() {
  const auto memory = [](const std::string&) { return MakeMemoryStore(RowBytes(), 0); };
  return {
      memory,
      [](const std::string& path) { return Ssd(path); },
      [=](const std::string& path) { return MakeTieredStore(memory(path), memory(path), 300); },
      [=](const std::string& path) {
        return MakeTieredStore(Ssd(path), MakeTieredStore(memory(path), memory(path), 400), 200);
      },
  };
}

TEST(Two threads read a snapshot of a table over a store while rows change hands) {
  SetNumThreads(2);
  constexpr int64_t kRows = 2003;
  for (const MakeStore& make : Stores()) {
    for (const ScoreStrategy strategy : {ScoreStrategy::kStep, ScoreStrategy::kLfu}) {
      const TemporaryDirectory directory;
      const auto table = Table::Create(CacheOver(make(directory.path), strategy));
      Fill(*table, kRows);
      for (uint64_t round = 0; round < 3; ++round) {
        const AllOfThem before = ByKey(*table, Range(-10, kRows + 250));
        AllOfThem seen;
        Snapshot snapshot(table);
        std::mutex mutex;
        std::atomic<int> reading{2};
        const auto read = [&] {
          ReadAll(snapshot, seen, mutex);
          --reading;
        };
        std::thread first(read), second(read), ahead([&] {
          for (uint64_t step = 0; reading > 0; ++step) table->Prefetch(RandomKeys(7, kRows, step));
        });
        for (uint64_t step = 0; step < 60 || reading > 0; ++step) {
          Disturb(table, kRows, 1000 * round + step);
        }
        first.join();
        second.join();
        ahead.join();
        CHECK(seen == before);
        CHECK_EQ(snapshot.rows(), static_cast<int64_t>(before.size()));
        table->CheckInvariants();
      }
    }
  }
}

TEST(A batch that evicts tens of thousands of rows writes each of them back) {
  constexpr int64_t kRows = 40'000;
  TableOptions options = CacheOver(MakeMemoryStore(RowBytes(), 0));
  options.index.init_capacity = options.index.max_capacity = kRows;
  options.index.bucket_capacity = 128;
  const auto table = Table::Create(options);
  const std::vector<int64_t> keys = Range(0, kRows);
  LookUpOne(table, keys);
  const int64_t resident = table->size();
  LookUpOne(table, Range(kRows, 2 * kRows));
  CHECK(resident > 2 * 16384 && options.store->size() > 2 * 16384);
  const AllOfThem rows = ByKey(*table, keys);
  for (const auto& [key, row] : rows) {
    CHECK_EQ(row.value[0], DebugValue(key));
  }
  CHECK_EQ(rows.size(), keys.size());
}

TEST(Clearing and loading leave a snapshot as it is) {
  const TemporaryDirectory directory;
  const auto table = Table::Create(CacheOver(Ssd(directory.path)));
  Fill(*table, 700);
  table->SaveCheckpoint("one");
  const AllOfThem one = Everything(table);
  Fill(*table, 300);
  table->Erase(Range(500, 550));
  const AllOfThem before = Everything(table);
  Snapshot first(table);
  CHECK_THROWS(std::exception, "two", table->LoadCheckpoint("two"));
  CHECK(Everything(table) == before);
  table->LoadCheckpoint("one");
  CHECK(Everything(table) == one);
  Snapshot second(table);
  table->Clear();
  Fill(*table, 20);
  CHECK(Rest(first) == before);
  CHECK(Rest(second) == one);
  table->CheckInvariants();
}

TEST(Rows that come and go below later are not in a snapshot however often it counts) {
  const auto table = Table::Create(CacheOver(MakeMemoryStore(RowBytes(), 0)));
  Fill(*table, 1000);
  const AllOfThem before = Everything(table);
  Snapshot snapshot(table);
  for (uint64_t step = 0; step < 5; ++step) {
    CHECK_EQ(snapshot.rows(), 1000);
    Set(*table, RandomKeys(300, 5000, step), 3.0f, true);
    table->Flush();
    table->Erase(RandomKeys(50, 5000, step + 10));
  }
  CHECK(Rest(snapshot) == before);
}

TEST(Copies beyond the memory limit go to a file) {
  const auto table = Table::Create(CacheOver(MakeMemoryStore(RowBytes(), 0)));
  constexpr int64_t kRows = 20'000;
  Fill(*table, kRows);
  const AllOfThem before = Everything(table);
  Snapshot snapshot(table, /*memory_bytes=*/0);
  Fill(*table, kRows);
  CHECK(Rest(snapshot) == before);
}

TEST(A snapshot that cannot save a row fails alone) {
  const auto table = Table::Create(CacheOver(MakeMemoryStore(RowBytes(), 0)));
  constexpr int64_t kRows = 20'000;
  Fill(*table, kRows);
  const std::string folder = std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "";
  setenv("TMPDIR", "/does/not/exist", 1);
  {
    Snapshot failing(table, /*memory_bytes=*/0), other(table);
    const AllOfThem before = ByKey(*table, Range(0, kRows));
    Fill(*table, kRows);
    int64_t key;
    uint64_t score;
    for (int i = 0; i < 2; ++i) {
      CHECK_THROWS(std::exception, "exist", failing.Read(1, 0, &key, nullptr, nullptr, &score));
    }
    CHECK_THROWS(InvalidState, "a snapshot of table 'small' failed", failing.rows());
    CHECK(Rest(other) == before);
  }
  folder.empty() ? unsetenv("TMPDIR") : setenv("TMPDIR", folder.c_str(), 1);
  CHECK_EQ(Everything(table).size(), size_t{kRows});
}

// A store that fails, waits or lets others run first when it is told to.
class Unreliable final : public PassesOn {
 public:
  using PassesOn::PassesOn;
  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override {
    if (fails) throw InvalidState("get failed");
    while (waits) std::this_thread::yield();
    if (before_get) std::exchange(before_get, nullptr)();
    PassesOn::Get(keys, rows, scores, found);
  }

  std::atomic<bool> fails{false}, waits{false};
  mutable std::function<void()> before_get;  // once
};

TEST(A prefetch keeps the rows that training brings up while it reads) {
  const auto store = std::make_shared<Unreliable>(MakeMemoryStore(RowBytes(), 0));
  const auto table = Table::Create(CacheOver(store));
  Fill(*table, 1000);
  LookUpOne(table, Range(900, 1000));
  const int64_t before = table->stats().fetches;
  std::vector<int64_t> keys = Range(0, 40);
  keys.insert(keys.end(), {3, 3, 999});
  const std::vector<float> ones(20 * kDim, 1.0f);
  const auto train = [&] { table->Assign(Range(10, 30), ones.data(), nullptr, nullptr); };
  store->before_get = train;
  const auto list = table->Prefetch(keys);
  table->CheckInvariants();
  CHECK(std::count(list->rows(), list->rows() + list->size(), kMissingRow) == 0);
  CHECK_EQ(table->stats().fetches - before, 40);
  for (const auto& [key, row] : ByKey(*table, Range(10, 30))) {
    CHECK(row.value == std::vector<float>(kDim, 1.0f));
  }
}

TEST(A store that fails or loses rows fails the snapshot and not the training) {
  const auto memory = MakeMemoryStore(RowBytes(), 0);
  const auto store = std::make_shared<Unreliable>(memory);
  const auto table = Table::Create(CacheOver(store));
  Fill(*table, 1000);
  std::vector<int64_t> keys(2000);
  std::vector<uint64_t> scores(2000);
  const auto read = [&](Snapshot& snapshot) {
    while (snapshot.Read(2000, 0, keys.data(), nullptr, nullptr, scores.data())) {
    }
  };
  {
    Snapshot snapshot(table);
    CHECK_EQ(snapshot.rows(), 1000);
    store->fails = true;
    CHECK_THROWS(InvalidState, "get failed", read(snapshot));
    store->fails = false;
    CHECK_THROWS(InvalidState, "get failed", read(snapshot));  // it never gives half of its rows
  }
  {
    Snapshot snapshot(table);
    store->fails = true;
    Set(*table, {3, 5}, 7.0f, true);  // only the snapshot needs the old row
    store->fails = false;
    CHECK_THROWS(InvalidState, "get failed", read(snapshot));
  }
  Snapshot snapshot(table);
  CHECK_EQ(snapshot.rows(), 1000);
  std::vector<uint8_t> resident(1000);
  table->Resident(Range(0, 1000), resident.data());
  const auto below = std::find(resident.begin(), resident.end(), 0) - resident.begin();
  memory->Erase(std::vector<int64_t>{below});  // behind the table's back
  CHECK_THROWS(InvalidState, "has lost key " + std::to_string(below), read(snapshot));
}

TEST(A fork that gives up waiting leaves the parent working and an error in the child) {
  const auto store = std::make_shared<Unreliable>(MakeMemoryStore(RowBytes(), 0));
  const auto table = Table::Create(CacheOver(store)), idle = Table::Create(SmallTable(kDim));
  Fill(*table, 300);
  LookUpOne(idle, {1, 2});
  store->waits = true;
  std::thread trainer([&] { LookUpOne(table, Range(0, 50)); });
  while (table->lock().TryLockUntil({})) table->lock().unlock();  // until it is inside
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      table->size();
    } catch (const InvalidState& error) {
      code = std::string(error.what()).find("forked") == std::string::npos ? 2 : 0;
    }
    _exit(code == 0 && idle->size() != 2 ? 3 : code);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  store->waits = false;
  trainer.join();
  CHECK_EQ(Everything(table).size(), size_t{300});
}

TEST(Changes over a store are rows above and below and keys that are in neither) {
  const TemporaryDirectory directory;
  const auto table = Table::Create(CacheOver(Ssd(directory.path)));
  Fill(*table, 1000);
  table->SaveCheckpoint("one");
  AllOfThem replica = Everything(table);
  table->TrackChanges(true);
  const auto follow = [&] {
    Snapshot changes(table, Snapshot::kMemoryBytes, Snapshot::Of::kChanges);
    const AllOfThem rows = Rest(changes);
    CHECK_EQ(changes.rows(), std::ssize(rows));
    for (int64_t key : changes.removed()) CHECK(replica.erase(key) == 1);
    for (const auto& [key, row] : rows) replica[key] = row;
    CHECK(replica == Everything(table));
    return std::pair(rows.size(), changes.removed().size());
  };
  follow();
  for (int64_t at = 0; at < 600; at += 50) Set(*table, Range(at, at + 50), -1.0f, at % 100 == 0);
  CHECK(follow().first >= 600);  // most of them are below again
  table->Erase(Range(0, 300));
  CHECK_EQ(follow().second, size_t{300});
  table->Erase(Range(0, 300));
  CHECK_EQ(follow().second, size_t{0});  // they were not there
  table->LoadCheckpoint("one");
  follow();
  CHECK_THROWS(std::exception, "two", table->LoadCheckpoint("two"));
  follow();
  Set(*table, Range(2000, 2050), 1.0f, true);
  {
    Snapshot lost(table, Snapshot::kMemoryBytes, Snapshot::Of::kChanges);
    for (int64_t at = 0; at < 600; at += 50) Set(*table, Range(at, at + 50), -2.0f, true);
    lost.Restore();
  }
  follow();
  table->Clear();
  CHECK_EQ(follow().second, size_t{1050});
}

TEST(A snapshot of changes over a store is that of its moment whatever training does meanwhile) {
  const TemporaryDirectory directory;
  const auto table = Table::Create(CacheOver(Ssd(directory.path)));
  Fill(*table, 1000);
  AllOfThem replica = Everything(table);
  table->TrackChanges(true);
  for (int64_t round = 0; round < 14; ++round) {
    const auto disturb = [&](int64_t step) {
      const int64_t at = (round * 977 + step * 131) % 1400;
      Set(*table, Range(at, at + 40), static_cast<float>(round * 100 + step), step % 2 == 0);
      table->Erase(Range((at * 7) % 1300, (at * 7) % 1300 + 9));
      if (round == 9 && step == 6) table->Clear();
    };
    for (int64_t step = 0; step < 5; ++step) disturb(step);
    const AllOfThem before = Everything(table);
    Snapshot changes(table, 1 << 16, Snapshot::Of::kChanges);
    if (round % 3 == 0) {
      disturb(5);  // before anything is listed
      disturb(6);
    }
    const int64_t listed = round % 2 ? changes.rows() : -1;
    for (int64_t step = 7; step < 12; ++step) disturb(step);
    const std::vector<int64_t> removed = changes.removed();
    const AllOfThem rows = Rest(changes);
    CHECK_EQ(changes.rows(), std::ssize(rows));
    if (listed >= 0) CHECK_EQ(listed, std::ssize(rows));
    for (const int64_t key : removed) {
      CHECK(!rows.contains(key));
      replica.erase(key);
    }
    for (const auto& [key, row] : rows) replica[key] = row;
    CHECK(replica == before);
  }
}

TEST(A new optimizer reaches snapshots and changes and the store) {
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdagrad;
  const auto store = MakeMemoryStore(StoredRowBytes(kDim, DType::kFloat32, options), 0);
  TableOptions of_table = CacheOver(store);
  of_table.optimizer = options;
  const auto table = Table::Create(of_table);
  LookUpOne(table, Range(0, 50));
  const AllOfThem before = AllRows(*table);
  table->TrackChanges(true);
  Snapshot snapshot(table);
  options.initial_accumulator = 0.25f;
  table->SetOptimizer(options);
  CHECK(Rest(snapshot) == before);
  CHECK_EQ(Snapshot(table, 1 << 20, Snapshot::Of::kChanges).rows(), 50);
  LookUpOne(table, Range(1000, 1120));  // evicts them
  const AllOfThem after = ByKey(*table, Range(0, 50));
  CHECK_EQ(after.size(), size_t{50});
  for (const auto& [key, row] : after) CHECK(row.state == std::vector<float>(kDim, 0.25f));
}

// Keys that nobody touches come exactly once, or at least once where keys alone are asked for.
TEST(Scans visit every row that stays while others come and go) {
  for (const MakeStore& make : Stores()) {
    const TemporaryDirectory directory;
    const auto store = make(directory.path);
    Oracle stays, others;
    for (int64_t at = 0; at < 2000; at += 50) {
      PutAll(*store, Range(at, at + 50), static_cast<uint64_t>(at + 1), stays);
      Churn(*store, others, static_cast<uint64_t>(at + 1), 1, 300, 40);  // around 0
      for (int64_t key = -200; key < 200; ++key) stays.erase(key);
    }
    const auto rows = store->Scan();
    const auto keys = store->ScanKeys();
    std::map<int64_t, int> row_times, key_times;
    StoredRows block;
    std::vector<int64_t> some;
    uint64_t version = 5000;
    bool more = true;
    while (more) {
      Churn(*store, others, version++, 3, 300, 120);
      // New ones make stores grow, and tiers push rows down.
      Oracle fresh;
      const auto first = static_cast<int64_t>(10'000 + 100 * version);
      PutAll(*store, Range(first, first + 100), version, fresh);
      rows->Next(61, block);
      keys->Next(61, some);
      for (size_t i = 0; i < block.keys.size(); ++i) {
        if (!stays.contains(block.keys[i])) continue;
        ++row_times[block.keys[i]];
        CHECK_EQ(block.scores[i], stays[block.keys[i]]);
      }
      for (int64_t key : some) ++key_times[key];
      more = !block.keys.empty() || !some.empty();
      CHECK(version < 5500);  // the walk ends although rows keep coming
      if (version == 5500) break;
    }
    for (const auto& [key, score] : stays) {
      CHECK_EQ(row_times[key], 1);
      CHECK(key_times[key] >= 1);
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
