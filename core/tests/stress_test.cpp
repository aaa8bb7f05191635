// Many threads on one table, and more keys than fit. The answers are checked; TSan watches the
// rest.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "embstore/gradient.h"
#include "embstore/key_index.h"
#include "embstore/parallel.h"
#include "table_oracle.h"

namespace embstore {
namespace {

constexpr int kSteps = 60;

// Runs `others` together until `main` has ended.
template <typename Main, typename... Others>
void Together(const Main& main, const Others&... others) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  (threads.emplace_back([&] {
    while (!stop) others();
  }),
   ...);
  main();
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

void Train(const std::shared_ptr<Table>& table, int64_t step, int64_t range) {
  const std::vector<int64_t> keys = RandomKeys(700, range, static_cast<uint64_t>(step));
  const Forward forward = LookUpOne(table, keys);
  std::vector<float> gradients(forward.out.size(), 0.0f);  // rows stay at their initial values
  GradientRequest request;
  request.slots = forward.result.slots.get();
  request.gradients.base = gradients.data();
  request.gradients.stride = table->dim();
  ApplyGradients({&request, 1});
}

// A row that is there has its initial value in every component.
bool IsWhole(const float* row, int64_t dim, int64_t key) {
  for (int64_t c = 0; c < dim; ++c) {
    if (row[c] != DebugValue(key)) return false;
  }
  return true;
}

TEST(Readers see whole rows while one thread trains, grows and evicts) {
  SetNumThreads(2);
  for (bool grows : {false, true}) {
    TableOptions options = SmallTable(9, grows ? 1 << 15 : 1024);
    options.optimizer.kind = OptimizerKind::kAdam;
    const auto table = Table::Create(options);
    std::atomic<int64_t> torn{0}, seen{0};
    const auto read = [&] {
      const std::vector<int64_t> keys = RandomKeys(97, 5000, 3);
      std::vector<float> values(97 * 9);
      std::vector<uint8_t> found(97);
      table->Read(keys, values.data(), nullptr, nullptr, found.data());
      for (size_t i = 0; i < 97; ++i) {
        seen += found[i];
        if (found[i]) torn += !IsWhole(&values[9 * i], 9, keys[i]);
      }
    };
    const auto evaluate = [&] {
      const std::vector<int64_t> keys = RandomKeys(301, 5000, 4);
      const Forward forward = LookUpOne(table, keys, Access::kReadInitial);
      for (size_t i = 0; i < keys.size(); ++i) torn += !IsWhole(&forward.out[9 * i], 9, keys[i]);
    };
    const auto look_around = [&] {
      (void)table->size();
      (void)table->stats();
      (void)table->current_score();
      Table::Cursor cursor;
      const RowBlock block = table->Export(cursor, 50, 0, true, true);
      for (size_t i = 0; i < block.keys.size(); ++i) {
        torn += !IsWhole(&block.values[9 * i], 9, block.keys[i]);
      }
    };
    Together(
        [&] {
          for (int64_t step = 0; step < kSteps; ++step) Train(table, step, 5000);
        },
        read, evaluate, look_around);
    CHECK_EQ(torn.load(), 0);
    table->CheckInvariants();
    CHECK_EQ(grows, table->stats().evictions == 0);
  }
}

TEST(Several threads train overlapping sets of tables) {
  SetNumThreads(3);
  std::vector<std::shared_ptr<Table>> tables;
  for (int64_t t = 0; t < 3; ++t) {
    TableOptions options = SmallTable(3, 2048);
    tables.push_back(Table::Create(options));
  }
  std::vector<std::thread> threads;
  std::atomic<int64_t> wrong{0};
  for (size_t who = 0; who < 3; ++who) {
    threads.emplace_back([&, who] {
      for (int64_t step = 0; step < kSteps; ++step) {
        const std::vector<int64_t> keys =
            RandomKeys(500, 4000, static_cast<uint64_t>(step) * 3 + who);
        std::vector<std::vector<float>> outs(2, std::vector<float>(1500));
        std::vector<LookupRequest> requests(2);
        for (size_t r = 0; r < 2; ++r) {
          requests[r].table = tables[(who + r) % 3];
          requests[r].keys = keys;
          requests[r].out.base = outs[r].data();
          requests[r].out.stride = 3;
        }
        const auto results = LookUp(requests, Access::kTrain);
        std::vector<float> gradients(1500, 0.0f);
        std::vector<GradientRequest> updates(2);
        for (size_t r = 0; r < 2; ++r) {
          updates[r].slots = results[r].slots.get();
          updates[r].gradients.base = gradients.data();
          updates[r].gradients.stride = 3;
        }
        ApplyGradients(updates);
        for (size_t r = 0; r < 2; ++r) {
          // Zeros are refused keys: three batches pin rows at once.
          for (size_t i = 0; i < keys.size(); ++i) {
            const float* row = &outs[r][3 * i];
            wrong += row[0] != 0.0f && !IsWhole(row, 3, keys[i]);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
  for (const auto& table : tables) {
    const TableStats stats = table->stats();
    CHECK_EQ(stats.inserts - stats.evictions, stats.size);
    CHECK_EQ(static_cast<int64_t>(AllRows(*table).size()), stats.size);
    table->CheckInvariants();
  }
}

TEST(Lists are dropped by other threads while one trains) {
  SetNumThreads(2);
  for (int64_t capacity : {1024, 1 << 15}) {
    const auto table = Table::Create(SmallTable(2, capacity));
    std::mutex mutex;
    std::vector<std::unique_ptr<SlotList>> handed_over;
    Together(
        [&] {
          for (int64_t step = 0; step < kSteps; ++step) {
            Forward forward = LookUpOne(table, RandomKeys(300, 9000, static_cast<uint64_t>(step)));
            std::lock_guard guard(mutex);
            handed_over.push_back(std::move(forward.result.slots));
          }
        },
        [&] {
          std::vector<std::unique_ptr<SlotList>> dropped;
          {
            std::lock_guard guard(mutex);
            dropped.swap(handed_over);
          }
          dropped.clear();
          std::this_thread::yield();
        });
    CHECK_EQ(static_cast<int64_t>(AllRows(*table).size()), table->size());
    table->CheckInvariants();
  }
}

TEST(Rows are updated by key, erased and cleared while one thread trains) {
  SetNumThreads(2);
  for (int64_t capacity : {1024, 1 << 15}) {
    TableOptions options = SmallTable(2, capacity);
    options.eviction_log = EvictionLog::kRows;
    const auto table = Table::Create(options);
    std::atomic<int64_t> round{0};
    Together(
        [&] {
          for (int64_t step = 0; step < kSteps; ++step) Train(table, step, 9000);
        },
        [&] {
          const std::vector<int64_t> keys = RandomKeys(600, 9000, 77);
          std::vector<float> gradients(1200, 0.0f);
          VectorsView view;
          view.base = gradients.data();
          view.stride = 2;
          const int64_t missing = ApplyGradientsByKey(*table, keys, view, {});
          table->CheckInvariants();
          CHECK(missing >= 0 && missing <= 600);
        },
        [&] {
          const int64_t r = ++round;
          table->Erase(RandomKeys(50, 9000, static_cast<uint64_t>(r)));
          if (r % 40 == 0) table->Clear();
          (void)table->DrainEvictions();
          const std::vector<int64_t> keys = {r, r + 1};
          const std::vector<float> values = {DebugValue(r), DebugValue(r), DebugValue(r + 1),
                                             DebugValue(r + 1)};
          table->Assign(keys, values.data(), nullptr, nullptr);
        });
    const auto rows = AllRows(*table);
    CHECK_EQ(static_cast<int64_t>(rows.size()), table->size());
    for (const auto& [key, row] : rows) CHECK(IsWhole(row.value.data(), 2, key));
  }
}

TEST(A table may be closed while other threads use it) {
  for (int round = 0; round < 20; ++round) {
    const auto table = Table::Create(SmallTable(2, 4096));
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        try {
          for (int64_t step = 0; step < 10000; ++step) {
            if (t == 0) Train(table, step, 5000);
            if (t == 1) LookUpOne(table, {1, 2, 3}, Access::kReadZero);
            if (t == 2) (void)table->size();
          }
        } catch (const InvalidState&) {
        }
      });
    }
    std::this_thread::yield();
    table->Close();
    for (std::thread& thread : threads) thread.join();
    CHECK_THROWS(InvalidState, "closed", table->size());
  }
}

// ASan of gcc 12 does not take the locks of its allocator at a fork: the child may hang in
// `new`, before it gets to our code.
#if !defined(__SANITIZE_ADDRESS__)
TEST(A child forked while others train finds whole tables that it can use) {
  SetNumThreads(2);
  const auto table = Table::Create(SmallTable(5, 1024));
  const auto other = Table::Create(SmallTable(5, 1 << 15));
  int bad = 0;
  Together(
      [&] {
        for (int round = 0; round < 15; ++round) {
          const pid_t child = fork();
          if (child == 0) {
            alarm(30);         // a child that hangs is ended, and counted
            SetNumThreads(1);  // TSan allows no new threads here
            int torn = 0;
            for (const auto& [key, row] : AllRows(*table))
              torn += !IsWhole(row.value.data(), 5, key);
            Train(table, 1, 5000);
            Train(other, 1, 5000);
            _exit(torn == 0 && table->size() == static_cast<int64_t>(AllRows(*table).size()) ? 0
                                                                                             : 1);
          }
          int status = -1;
          waitpid(child, &status, 0);
          bad += !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        }
      },
      [&, step = std::make_shared<int64_t>(0)] { Train(table, ++*step, 5000); },
      [&, step = std::make_shared<int64_t>(0)] { Train(other, ++*step, 50000); },
      [&] {
        LookUpOne(table, {1, 2, 3}, Access::kReadZero);
        LookUpOne(other, {1, 2, 3}, Access::kReadZero);
      });
  CHECK_EQ(bad, 0);
}

#if !defined(__SANITIZE_THREAD__)  // 700 MB are too many for it
TEST(An index refuses keys before its overflow area has more than slots can number) {
  KeyIndex index({.init_capacity = 16, .max_capacity = 16, .bucket_capacity = 16});
  const auto insert = [&](int64_t key) {
    const uint64_t hash = index.Hash(key);
    if (!index.Insert({key, 1, 0}, hash)) index.InsertAside({key, 1, 0}, hash);
  };
  int64_t key = 0;
  while (index.overflow_size() < kMostOverflowEntries) insert(key++);
  CHECK_EQ(index.Find(key - 1), kFirstOverflowSlot + static_cast<Slot>(kMostOverflowEntries - 1));
  CHECK_THROWS(OutOfMemory, "keys that collide", insert(-1));
  CHECK_EQ(index.overflow_size(), kMostOverflowEntries);
  CHECK_EQ(index.Find(-1), kNoSlot);
}
#endif
#endif

}  // namespace
}  // namespace embstore

TEST_MAIN()
