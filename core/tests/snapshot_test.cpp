#include "embstore/snapshot.h"

#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "embstore/checksum.h"
#include "embstore/gradient.h"
#include "embstore/memory.h"
#include "embstore/parallel.h"
#include "embstore/rw_lock.h"
#include "snapshot_oracle.h"

namespace embstore {
namespace {

TableOptions GrowingTable() {
  TableOptions options = SmallTable(5, 1 << 14);
  options.index.max_load_factor = 0.75;
  options.optimizer.kind = OptimizerKind::kAdam;
  return options;
}

void Update(const Forward& forward) {
  const std::vector<float> ones(forward.out.size(), 1.0f);
  GradientRequest request;
  request.slots = forward.result.slots.get();
  request.gradients.base = const_cast<float*>(ones.data());
  request.gradients.stride = request.slots->table().dim();
  ApplyGradients({&request, 1});
}

TEST(Two threads read a snapshot while others train grow and erase) {
  SetNumThreads(2);
  for (uint64_t round = 0; round < 4; ++round) {
    const auto table = Table::Create(GrowingTable());
    LookUpOne(table, RandomKeys(4000, 3000, round));
    const std::map<int64_t, RowValues> before = AllRows(*table);
    std::map<int64_t, RowValues> seen;
    {
      Snapshot snapshot(table);
      CHECK_EQ(snapshot.rows(), static_cast<int64_t>(before.size()));
      std::mutex mutex;
      std::thread first([&] { ReadAll(snapshot, seen, mutex); });
      std::thread second([&] { ReadAll(snapshot, seen, mutex); });
      for (uint64_t step = 0; step < 12; ++step) {
        const std::vector<int64_t> keys = RandomKeys(1000, 6000, 100 * round + step);
        const Forward forward = LookUpOne(table, keys);
        const std::vector<float> values(keys.size() * 5, static_cast<float>(step));
        table->Assign(keys, values.data(), nullptr, nullptr);
        table->Erase(RandomKeys(30, 6000, step));
      }
      first.join();
      second.join();
    }
    CHECK(seen == before);
  }
}

TEST(Snapshots of a table hold the moments at which they were taken) {
  const auto table = Table::Create(GrowingTable());
  std::vector<std::map<int64_t, RowValues>> before;
  std::vector<std::unique_ptr<Snapshot>> snapshots;
  for (uint64_t step = 0; step < 5; ++step) {
    const std::vector<int64_t> keys = RandomKeys(500, 2000, step);
    LookUpOne(table, keys);
    const std::vector<float> values(keys.size() * 5, static_cast<float>(step));
    table->Assign(keys, values.data(), nullptr, nullptr);
    before.push_back(AllRows(*table));
    snapshots.push_back(std::make_unique<Snapshot>(table));
    if (step == 3) snapshots[1].reset();
  }
  table->Clear();
  for (size_t i = 0; i < snapshots.size(); ++i) {
    if (snapshots[i]) CHECK(Rest(*snapshots[i]) == before[i]);
  }
}

TEST(An update saves the rows that were found before the snapshot) {
  const auto table = Table::Create(GrowingTable());
  LookUpOne(table, Range(0, 3000));
  const Forward forward = LookUpOne(table, RandomKeys(1023, 2000, 7));
  const std::map<int64_t, RowValues> before = AllRows(*table);
  Snapshot snapshot(table);
  Update(forward);
  CHECK(AllRows(*table) != before);
  CHECK(Rest(snapshot) == before);
}

TEST(An update is a change even if the rows were found before the last changes were taken) {
  const auto table = Table::Create(GrowingTable());
  LookUpOne(table, Range(0, 3000));
  table->TrackChanges(true);
  const std::vector<int64_t> keys = RandomKeys(1023, 2000, 7);
  const Forward forward = LookUpOne(table, keys);
  const std::set<int64_t> distinct(keys.begin(), keys.end());
  for (int round = 0; round < 3; ++round) {
    Snapshot changes(table, Snapshot::kMemoryBytes, Snapshot::Of::kChanges);
    const std::map<int64_t, RowValues> before = AllRows(*table);
    Update(forward);
    for (const auto& [key, row] : Rest(changes)) {
      CHECK(distinct.contains(key));
      CHECK(row == before.at(key));
    }
    CHECK_EQ(changes.rows(), std::ssize(distinct));
  }
}

TEST(A snapshot holds its moment whatever becomes of the scores) {
  SetNumThreads(2);
  constexpr uint64_t kMost = UINT64_MAX;
  for (const ScoreStrategy strategy :
       {ScoreStrategy::kTimestamp, ScoreStrategy::kStep, ScoreStrategy::kCustomized,
        ScoreStrategy::kLfu, ScoreStrategy::kAgedLfu, ScoreStrategy::kImportance}) {
    TableOptions options = GrowingTable();
    options.score_strategy = strategy;
    const auto table = Table::Create(options);
    const auto set_score = [&](uint64_t score) {
      if (strategy == ScoreStrategy::kCustomized) table->set_custom_score(score);
      if (strategy == ScoreStrategy::kStep) table->set_step(score);
    };
    set_score(1);
    LookUpOne(table, Range(0, 3000));
    table->TrackChanges(true);
    // The same score again, a larger one, smaller ones, and the largest of all.
    for (const uint64_t score : {uint64_t{1}, uint64_t{9}, uint64_t{4}, kMost - 1, uint64_t{7},
                                 kMost, kMost, uint64_t{5}}) {
      Snapshot changes(table, Snapshot::kMemoryBytes, Snapshot::Of::kChanges);
      changes.rows();
      const std::map<int64_t, RowValues> before = AllRows(*table);
      Snapshot snapshot(table);
      std::set<int64_t> touched;
      for (uint64_t step = 0; step < 3; ++step) {
        set_score(score);
        const std::vector<int64_t> keys = RandomKeys(5000, 1500, score + step);
        touched.insert(keys.begin(), keys.end());
        Update(LookUpOne(table, keys));
        table->CheckInvariants();
      }
      CHECK(Rest(snapshot) == before);
      CHECK_EQ(Snapshot(table, 0, Snapshot::Of::kChanges).rows(), std::ssize(touched));
    }
  }
}

TEST(Threads that touch the same rows save each of them once) {
  SetNumThreads(4);
  TableOptions options = GrowingTable();
  const auto table = Table::Create(options);
  LookUpOne(table, Range(0, 3000));
  for (uint64_t round = 0; round < 20; ++round) {
    const std::map<int64_t, RowValues> before = AllRows(*table);
    Snapshot first(table), second(table, /*memory_bytes=*/0);
    // Many tasks of a lookup, each with keys that repeat in it and in the others.
    LookUpOne(table, RandomKeys(20'000, 3000, round));
    CHECK(Rest(first) == before);
    CHECK(Rest(second) == before);
  }
  SetNumThreads(2);
}

TEST(Rows that a step saves go to memory that was made ready before) {
  TableOptions options = GrowingTable();
  options.dim = 256;
  const auto table = Table::Create(options);
  LookUpOne(table, Range(0, 8000));
  table->TrackChanges(true);
  LookUpOne(table, Range(0, 8000));
  const size_t ready = IdleBufferBytes();
  const Snapshot changes(table, Snapshot::kMemoryBytes, Snapshot::Of::kChanges);
  LookUpOne(table, Range(0, 8000));
  const auto saved = static_cast<size_t>(8000 * table->row_bytes());
  CHECK(IdleBufferBytes() + saved <= ready);
}

TEST(A lock tells its readers whether a writer waits) {
  RwLock lock;
  std::thread writer;
  {
    const std::shared_lock reading(lock);
    CHECK(!lock.IsAwaited());
    writer = std::thread([&] { const std::unique_lock writing(lock); });
    while (!lock.IsAwaited()) std::this_thread::yield();
  }
  writer.join();
  CHECK(!lock.IsAwaited());
}

TEST(Counts of use are those of the moment and can be set) {
  TableOptions options = GrowingTable();
  options.evict_least_used = true;
  const auto table = Table::Create(options);
  std::map<int64_t, uint32_t> expected;
  for (uint64_t step = 0; step < 5; ++step) {
    const std::vector<int64_t> keys = RandomKeys(300, 90, step);
    LookUpOne(table, keys);
    for (const int64_t key : keys) ++expected[key];
  }
  Snapshot snapshot(table);
  const std::vector<int64_t> more = RandomKeys(300, 90, 99);
  LookUpOne(table, more);  // changes what the snapshot has to keep
  const auto read = [](Snapshot& from) {
    const auto n = static_cast<size_t>(from.rows());
    std::vector<int64_t> keys(n);
    std::vector<uint64_t> scores(n);
    std::vector<uint32_t> uses(n);
    std::map<int64_t, uint32_t> found;
    while (const int64_t got = from.Read(static_cast<int64_t>(n), 0, keys.data(), nullptr, nullptr,
                                         scores.data(), uses.data())) {
      for (int64_t i = 0; i < got; ++i)
        found[keys[static_cast<size_t>(i)]] = uses[static_cast<size_t>(i)];
    }
    return found;
  };
  CHECK(read(snapshot) == expected);
  const std::vector<int64_t> known = {more[0], -12345};
  const std::vector<uint32_t> uses = {41, 7};
  table->SetUses(known, uses.data());
  for (const int64_t key : more) ++expected[key];
  expected[more[0]] = 41;
  Snapshot later(table);
  CHECK(read(later) == expected);
}

TEST(Changes are the rows that were touched and the keys that are gone) {
  const auto table = Table::Create(GrowingTable());
  LookUpOne(table, Range(0, 1000));
  table->TrackChanges(true);
  LookUpOne(table, Range(990, 3000));  // grows
  table->Erase(Range(0, 7));
  table->Erase(Range(2999, 3000));
  std::map<int64_t, RowValues> expected = AllRows(*table);
  std::erase_if(expected, [](const auto& row) { return row.first < 990; });
  const std::vector<int64_t> gone = {0, 1, 2, 3, 4, 5, 6, 2999};
  Snapshot changes(table, Snapshot::kMemoryBytes, Snapshot::Of::kChanges);
  CHECK_EQ(Snapshot(table, 1 << 20, Snapshot::Of::kChanges).rows(), 0);
  LookUpOne(table, Range(2500, 5000));
  table->Erase(Range(2400, 2600));
  CHECK_EQ(changes.rows(), 2009);
  CHECK(changes.removed() == gone);
  CHECK(Rest(changes) == expected);
  changes.Restore();
  CHECK_THROWS(InvalidState, "was ended", Rest(changes));
  Snapshot again(table, Snapshot::kMemoryBytes, Snapshot::Of::kChanges);
  CHECK_EQ(again.rows(), 2009 + 2001 - 200);
  CHECK_EQ(again.removed().size(), size_t{7 + 200});
  CHECK(Rest(again).size() == size_t{2009 + 2001 - 200});
}

TEST(A snapshot of changes is what changed at its moment whatever training does meanwhile) {
  for (const bool evicts : {false, true}) {
    TableOptions options = GrowingTable();
    if (evicts) options.index.max_capacity = 4096;
    const auto table = Table::Create(options);
    LookUpOne(table, RandomKeys(3000, 6000, 1));
    std::map<int64_t, RowValues> replica = AllRows(*table);
    table->TrackChanges(true);
    for (uint64_t round = 0; round < 12; ++round) {
      const auto disturb = [&](uint64_t step) {
        const std::vector<int64_t> keys = RandomKeys(700, 9000, 100 * round + step);
        LookUpOne(table, keys);
        const std::vector<float> values(keys.size() * 5, static_cast<float>(step));
        table->Assign(keys, values.data(), nullptr, nullptr);
        table->Erase(RandomKeys(60, 9000, step));
        if (round == 7 && step == 5) table->Clear();
      };
      disturb(1);
      const std::map<int64_t, RowValues> before = AllRows(*table);
      Snapshot changes(table, 1 << 16, Snapshot::Of::kChanges);
      std::map<int64_t, RowValues> seen;
      std::mutex mutex;
      std::vector<int64_t> removed;
      std::thread reader([&] {
        removed = changes.removed();
        ReadAll(changes, seen, mutex);
      });
      for (uint64_t step = 2; step < 10; ++step) disturb(step);
      reader.join();
      CHECK_EQ(changes.rows(), static_cast<int64_t>(seen.size()));
      for (const int64_t key : removed) {
        CHECK(!seen.contains(key));
        replica.erase(key);
      }
      for (const auto& [key, row] : seen) replica[key] = row;
      CHECK(replica == before);
    }
  }
}

TEST(Checksums are those of zlib and can be joined) {
  const std::string text = "123456789";
  CHECK_EQ(Crc32(0, text.data(), text.size()), 0xcbf43926u);
  std::string long_text;
  for (int i = 0; i < 1023; ++i) long_text += text;
  const uint32_t whole = Crc32(0, long_text.data(), long_text.size());
  for (size_t cut :
       {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{4097}, long_text.size()}) {
    const uint32_t head = Crc32(0, long_text.data(), cut);
    const uint32_t tail = Crc32(0, long_text.data() + cut, long_text.size() - cut);
    CHECK_EQ(Crc32(head, long_text.data() + cut, long_text.size() - cut), whole);
    CHECK_EQ(Crc32Combine(head, tail, long_text.size() - cut), whole);
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
