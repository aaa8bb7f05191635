#include "embstore/away_keys.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "embstore/parallel.h"
#include "key_index_oracle.h"
#include "table_oracle.h"

namespace embstore {
namespace {

bool IsHome(const KeyIndex& index, int64_t key) { return index.PeekRow(key) != kMissingRow; }

void Erase(KeyIndex& index, Model& model, int64_t key) {
  index.Erase(index.Find(key));
  index.AddSize(-1);
  model.erase(key);
}

// An index of one bucket, and keys of its first group and of the second.
struct TwoGroups {
  KeyIndex index{{.init_capacity = 128, .max_capacity = 128}};
  Model model;
  std::vector<int64_t> first = CraftedKeys(0, 0, 20),
                       second = CraftedKeys(0, UINT64_MAX / 48 * 3 / 2, 20);

  void Add(int64_t key, uint64_t score) { Insert(index, model, key, score); }
  bool BringHome(int64_t key) { return index.BringHome(index.Hash(key)); }
};

TEST(The three keys with the highest scores of a group come home) {
  TwoGroups two;
  for (size_t i = 0; i < 6; ++i) two.Add(two.first[i], 10 + i);
  for (size_t i = 0; i < 6; ++i) CHECK_EQ(IsHome(two.index, two.first[i]), i < 3);
  for (int moves = 0; moves < 3; ++moves) {
    CHECK(two.BringHome(two.first[0]));
    CheckHolds(two.index, two.model);
  }
  for (size_t i = 0; i < 6; ++i) CHECK_EQ(IsHome(two.index, two.first[i]), i >= 3);
  CHECK(!two.BringHome(two.first[0]));
  Erase(two.index, two.model, two.first[4]);
  CHECK(two.BringHome(two.first[5]));
  CHECK(IsHome(two.index, two.first[2]));
  CheckHolds(two.index, two.model);
}

TEST(A key of the same score stays where it is) {
  TwoGroups two;
  for (size_t i = 0; i < 4; ++i) two.Add(two.first[i], 7);
  CHECK(!two.BringHome(two.first[3]));
  CHECK(!IsHome(two.index, two.first[3]));
}

TEST(A stranger makes room for a key of the group, whatever its score) {
  TwoGroups two;
  for (size_t i = 0; i < 4; ++i) two.Add(two.first[i], 100);  // the last lies in the second group
  for (size_t i = 0; i < 3; ++i) two.Add(two.second[i], 1);
  CHECK(!IsHome(two.index, two.second[2]));
  CHECK(two.BringHome(two.second[0]));
  CheckHolds(two.index, two.model);
  for (size_t i = 0; i < 3; ++i) CHECK(IsHome(two.index, two.second[i]));
  CHECK(!two.BringHome(two.second[0]));
}

TEST(Nothing comes home where all are) {
  TwoGroups two;
  CHECK(!two.BringHome(two.first[0]));  // an empty group
  for (size_t i = 0; i < 3; ++i) two.Add(two.first[i], 1 + i);
  CHECK(!two.BringHome(two.first[0]));
  CheckHolds(two.index, two.model);
}

TEST(Keys come home among random insertions and erasures, and none is lost) {
  for (const int64_t bucket : {16, 64, 128, 1024}) {
    const int64_t capacity = 11 * bucket;
    KeyIndex index({.init_capacity = 1, .max_capacity = capacity, .bucket_capacity = bucket});
    Model model;
    std::mt19937_64 random(static_cast<uint64_t>(bucket));
    std::vector<int64_t> keys = RandomKeys(2 * capacity, 3);
    int64_t moves = 0;
    for (int round = 0; round < 12; ++round) {
      std::shuffle(keys.begin(), keys.end(), random);
      for (const int64_t key : keys) {
        if (model.count(key)) {
          if (random() % 2) Erase(index, model, key);
        } else if (index.size() < capacity) {
          Insert(index, model, key, 1 + random() % 5);
        }
        moves += index.BringHome(index.Hash(keys[random() % keys.size()]));
      }
      CheckHolds(index, model);
    }
    CHECK(moves > 100);
  }
}

TEST(The probe of every instruction set tells which keys it found away, as many as it is asked for) {
  TwoGroups two;
  for (size_t i = 0; i < 8; ++i) two.Add(two.first[i], 5);
  const auto n = static_cast<int64_t>(two.first.size());
  std::vector<Row> rows(two.first.size());
  for (const Kernels* kernels : AvailableKernels()) {
    for (const int most : {0, 1, AwayHits::kMost}) {
      AwayHits hits;
      hits.most = most;
      IndexView view = two.index.view();
      view.away_hits = &hits;
      kernels->find(view, two.first.data(), n, nullptr, rows.data(), ScoreUpdate::kSet, 5, true);
      CHECK_EQ(hits.count, most);
      for (int i = 0; i < hits.count; ++i) CHECK(!IsHome(two.index, hits.keys[i]));
    }
  }
}

TEST(The keys in mind come home in their order and are forgotten, whoever adds them first) {
  constexpr int64_t kRoom = 256;
  const std::vector<int64_t> keys = RandomKeys(4096, 9);
  std::vector<int64_t> away;
  const auto fresh = [&] {
    KeyIndex index({.init_capacity = 4096, .max_capacity = 4096});
    Model model;
    for (size_t i = 0; i < keys.size(); ++i) Insert(index, model, keys[i], 1 + i % 7);
    return index;
  };
  KeyIndex untouched = fresh();
  for (const int64_t key : keys) {
    if (!IsHome(untouched, key) && !KeyIndex::IsAside(untouched.Find(key))) away.push_back(key);
  }
  CHECK(std::ssize(away) > 2 * kRoom + AwayHits::kMost);
  const auto slots_of = [&](const KeyIndex& index) {
    std::vector<Slot> slots;
    for (const int64_t key : keys) slots.push_back(index.Find(key));
    return slots;
  };
  std::mt19937_64 random(1);
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, kRoom - 1, kRoom, kRoom + 1}) {
    for (const int block : {1, 3, AwayHits::kMost}) {
      KeyIndex expected = fresh(), index = fresh();
      AwayKeys in_mind;
      for (int round = 0; round < 2; ++round) {  // the second starts without what the first had
        const auto begin = away.begin() + round * (kRoom + AwayHits::kMost);
        std::vector<int64_t> wanted(begin, begin + count);
        for (int64_t i = 0; i < count;) {
          AwayHits hits;
          while (hits.count < block && i < count) hits.keys[hits.count++] = wanted[i++];
          in_mind.Add(hits);
        }
        in_mind.Add({});  // none
        in_mind.BringHome(index);
        wanted.resize(static_cast<size_t>(std::min(count, kRoom)));
        std::sort(wanted.begin(), wanted.end());
        for (const int64_t key : wanted) expected.BringHome(expected.Hash(key));
        CHECK(slots_of(index) == slots_of(expected));
        CHECK(count < 7 || slots_of(index) != slots_of(untouched));
      }
    }
  }
}

TEST(Keys of groups that mix come home to the same places in whatever order they were added) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    const std::vector<int64_t> keys = RandomKeys(256, seed);
    std::mt19937_64 random(seed);
    std::vector<Slot> expected;
    for (int order = 0; order < 4; ++order) {
      KeyIndex index({.init_capacity = 256, .max_capacity = 256});
      Model model;
      for (size_t i = 0; i < keys.size(); ++i) Insert(index, model, keys[i], 1 + i % 7);
      std::vector<int64_t> away;
      for (const int64_t key : keys) {
        if (!IsHome(index, key)) away.push_back(key);
      }
      std::shuffle(away.begin(), away.end(), random);
      AwayKeys in_mind;
      for (const int64_t key : away) {
        AwayHits hits;
        hits.keys[hits.count++] = key;
        in_mind.Add(hits);
      }
      in_mind.BringHome(index);
      std::vector<Slot> slots;
      for (const int64_t key : keys) slots.push_back(index.Find(key));
      if (order == 0) expected = slots;
      CHECK(slots == expected);
    }
  }
}

TEST(Keys that threads add come home, and beyond the room some do) {
  KeyIndex index({.init_capacity = 4096, .max_capacity = 4096});
  Model model;
  std::vector<int64_t> keys = RandomKeys(4096, 9);
  for (const int64_t key : keys) Insert(index, model, key, 1);
  std::vector<int64_t> away;
  for (const int64_t key : keys) {
    if (IsHome(index, key) || KeyIndex::IsAside(index.Find(key))) continue;
    away.push_back(key);
    index.set_score(index.Find(key), 9);
    model[key] = 9;
  }
  CHECK(away.size() > 500);
  AwayKeys in_mind;
  SetNumThreads(4);
  int64_t left = 0;
  for (int round = 0; round < 20; ++round) {
    ParallelFor(std::ssize(away), [&](int64_t i) {
      AwayHits hits;
      hits.keys[hits.count++] = away[static_cast<size_t>(i)];
      in_mind.Add(hits);
    });
    in_mind.BringHome(index);
    std::erase_if(away, [&](int64_t key) { return IsHome(index, key); });
    left = std::ssize(away);
  }
  CHECK(left < 50);  // second buckets, and groups with more than three of them
  CheckHolds(index, model);
}

TEST(Frequent keys of a training come home with every strategy, watched or not,
     on 1 and 4 threads) {
  const auto strategies = {ScoreStrategy::kStep, ScoreStrategy::kTimestamp, ScoreStrategy::kLfu,
                           ScoreStrategy::kAgedLfu};
  for (const ScoreStrategy strategy : strategies) {
    for (const bool watched : {false, true}) {
      for (const int threads : {1, 4}) {
        SetNumThreads(threads);
        TableOptions options = SmallTable(1, 20'000);
        options.score_strategy = strategy;
        const auto table = Table::Create(options);
        LookUpOne(table, Range(0, 20'000));
        table->TrackChanges(watched);
        std::vector<int64_t> hot = Range(19'400, 20'000);
        const auto away = [&] {
          int64_t count = 0;
          std::vector<Row> rows(1);
          for (const int64_t key : hot) {
            AwayHits hits;
            IndexView view = table->index();
            view.away_hits = &hits;
            ActiveKernels().find(view, &key, 1, nullptr, rows.data(), ScoreUpdate::kKeep, 0, true);
            count += hits.count;
          }
          return count;
        };
        const auto before = AllRows(*table);
        CHECK(away() > 60);
        for (int batch = 0; batch < 200; ++batch) LookUpOne(table, hot);
        CHECK_EQ(away(), 0);
        const auto after = AllRows(*table);
        CHECK_EQ(after.size(), before.size());
        for (const auto& [key, row] : before) CHECK(after.at(key).value == row.value);
      }
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
