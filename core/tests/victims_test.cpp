// Queues of victims, against a search of all rows.
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "embstore/aged_score.h"
#include "embstore/hash.h"
#include "embstore/index_view.h"
#include "embstore/kernels.h"
#include "embstore/parallel.h"
#include "embstore/victim_queues.h"
#include "key_index_oracle.h"
#include "table_oracle.h"

namespace embstore {
namespace {

using Rank = VictimQueues::Rank;

TEST(Every instruction set finds the smallest keys and puts them in order) {
  std::mt19937_64 random(5);
  const auto worth = [&](int kind) -> uint64_t {
    switch (kind) {
      case 0:
        return 7;
      case 1:
        return random() % 3 == 0 ? UINT64_MAX : random() % 3;
      case 2:
        return random();
      case 3:
        return uint64_t{1} << random() % 64;
      default:
        return 1000000 + random() % 100 + (random() % 50 == 0 ? random() : 0);
    }
  };
  constexpr int64_t kSmallestOf[] = {0, 1, 7, 30, 31, kMostSmallest};
  for (const Kernels* kernels : AvailableKernels()) {
    for (const int64_t n : {0, 1, 7, 30, 31, 32, 38, 39, 40, 41, 97, 504, 509, 512}) {
      for (int kind = 0; kind < 5; ++kind) {
        for (const int64_t most : kSmallestOf) {
          const int64_t wanted = std::min(n, most);
          VictimQueues::Candidates all;
          std::vector<Rank> expected;
          for (int64_t key = 0; key < n; ++key) {
            all.Add({worth(kind), key - 3});
            expected.push_back(VictimQueues::RankOf({all.worths[key], all.keys[key]}));
          }
          std::sort(expected.begin(), expected.end());
          constexpr uint64_t kUntouched = 12345;  // beyond the seven that may be written
          all.worths[n + 7] = kUntouched;
          kernels->smallest(all.worths, all.keys, n, wanted);
          for (int64_t i = 0; i < wanted; ++i) {
            CHECK(VictimQueues::RankOf({all.worths[i], all.keys[i]}) ==
                  expected[static_cast<size_t>(i)]);
          }
          CHECK_EQ(all.worths[n + 7], kUntouched);
        }
      }
    }
  }
}

TEST(Every instruction set collects the keys of a range up to a score) {
  std::mt19937_64 random(6);
  const HashSecret secret = SecretOf(9);
  for (const Kernels* kernels : AvailableKernels()) {
    for (const int64_t n : {0, 1, 7, 31, 32, 33, 97}) {
      std::vector<IndexGroup> groups(static_cast<size_t>(n));
      for (IndexGroup& group : groups) {
        for (int at = 0; at < IndexGroup::kSlots; ++at) {
          group.scores[at] = random() % 4 == 0 ? UINT64_MAX : random() % 4;
          group.keys[at] = group.scores[at] ? static_cast<int64_t>(random() % 1000) - 500 : 0;
          group.rows[at] = static_cast<Row>(random() % 1000);
        }
      }
      const uint64_t hash = random();
      std::vector<HashRange> ranges{{secret, 0, UINT64_MAX},
                                    {secret, hash / 2, hash / 2 + hash / 4}};
      if (n > 0) {  // both ends are hashes of keys
        const auto [first, last] = std::minmax(
            {KeyedHash(groups.front().keys[0], secret), KeyedHash(groups.back().keys[2], secret)});
        ranges.push_back({secret, first, last});
      }
      for (const HashRange& range : ranges) {
        for (const uint64_t most : {uint64_t{1}, uint64_t{2}, UINT64_MAX}) {
          constexpr int64_t kBefore = 5;
          std::vector<int64_t> keys(static_cast<size_t>(3 * n + kBefore + 8), -1), expected_keys;
          std::vector<uint64_t> scores(keys.size()), expected_scores;
          std::vector<Row> rows(keys.size()), expected_rows;
          for (const IndexGroup& group : groups) {
            for (int at = 0; at < IndexGroup::kSlots; ++at) {
              const uint64_t own = KeyedHash(group.keys[at], secret);
              if (own < range.first || own > range.last) continue;
              if (group.scores[at] == 0 || group.scores[at] > most) continue;
              expected_keys.push_back(group.keys[at]);
              expected_scores.push_back(group.scores[at]);
              expected_rows.push_back(group.rows[at]);
            }
          }
          const int64_t count = kernels->collect(
              groups.data(), n, range, most, {keys.data(), scores.data(), rows.data()}, kBefore);
          CHECK_EQ(count, kBefore + std::ssize(expected_keys));
          CHECK(
              std::all_of(keys.begin(), keys.begin() + kBefore, [](int64_t k) { return k == -1; }));
          CHECK(std::equal(expected_keys.begin(), expected_keys.end(), keys.begin() + kBefore));
          CHECK(
              std::equal(expected_scores.begin(), expected_scores.end(), scores.begin() + kBefore));
          CHECK(std::equal(expected_rows.begin(), expected_rows.end(), rows.begin() + kBefore));
        }
      }
    }
  }
}

// A table, and a twin that gets the same calls but searches all rows for every victim: assigning a
// key with its own score makes a table forget what it knows of victims.
struct Twins {
  std::shared_ptr<Table> table, searching;
  std::deque<std::pair<Forward, Forward>> live;

  explicit Twins(const TableOptions& options)
      : table(Table::Create(options)), searching(Table::Create(options)) {}

  template <typename Call>
  void Both(const Call& call) {
    call(*table);
    MakeForget();
    call(*searching);
  }

  void Batch(const std::vector<int64_t>& keys, int threads, size_t most_live) {
    SetNumThreads(threads);
    Forward own = LookUpOne(table, keys);
    SetNumThreads(1);
    MakeForget();
    live.emplace_back(std::move(own), LookUpOne(searching, keys));
    CHECK_EQ(live.back().first.result.refused, live.back().second.result.refused);
    while (live.size() > most_live) live.pop_front();
  }

  void MakeForget() const {
    for (Table::Cursor cursor; cursor.next >= 0;) {
      const RowBlock block = searching->Export(cursor, 1, 0, true, true);
      if (block.keys.empty()) continue;
      searching->Assign(block.keys, block.values.data(), block.states.data(), block.scores.data());
      return;
    }
  }

  void Check() const {
    CHECK(AllRows(*table) == AllRows(*searching));
    table->CheckInvariants();
  }
};

struct Strategy {
  std::string name;
  ScoreStrategy score = ScoreStrategy::kStep;
  bool admits = false, least_used = false;
  uint64_t ttl = 0;
};

const Strategy kStrategies[] = {
    {"step"},
    {"lfu", ScoreStrategy::kLfu},
    {"customized", ScoreStrategy::kCustomized},
    {"aged", ScoreStrategy::kAgedLfu},
    {"admitted", ScoreStrategy::kAgedLfu, true},
    {"least used", ScoreStrategy::kStep, false, true},
    {"expiring", ScoreStrategy::kStep, false, false, 9},
    {"expiring, least used", ScoreStrategy::kStep, false, true, 9},
};

TEST(A table with queues evicts what a search of all rows would) {
  for (const Strategy& strategy : kStrategies) {
    for (const int64_t capacity : {97, 3000, 20011}) {
      TableOptions options = SmallTable(2, capacity);
      options.score_strategy = strategy.score;
      options.admit_by_frequency = strategy.admits;
      options.evict_least_used = strategy.least_used;
      options.ttl = strategy.ttl;
      options.half_life = strategy.score == ScoreStrategy::kAgedLfu ? 5 : 0;
      options.shared_rows = strategy.admits ? 2 : 0;
      Twins twins(options);
      std::mt19937_64 random(static_cast<uint64_t>(capacity));
      const auto below = [&](int64_t n) {
        return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
      };
      for (int round = 0; round < 60; ++round) {
        if (strategy.score == ScoreStrategy::kCustomized) {  // it may fall
          const auto score = static_cast<uint64_t>(round % 10 == 9 ? 1 + below(round) : 5 + round);
          twins.table->set_custom_score(score);
          twins.searching->set_custom_score(score);
        }
        std::vector<int64_t> keys(static_cast<size_t>(capacity / 5));
        for (int64_t& key : keys) key = below(1 + below(3 * capacity)) - 3;
        twins.Batch(keys, 1 << below(3), static_cast<size_t>(below(4)));
        switch (below(8)) {
          case 0:
            for (int64_t& key : keys) key = below(3 * capacity) - 3;
            twins.Both([&](Table& table) { table.Erase(keys); });
            break;
          case 1: {
            for (int64_t& key : keys) key = below(3 * capacity) - 3;
            std::vector<uint64_t> scores(keys.size());
            for (uint64_t& score : scores) score = static_cast<uint64_t>(1 + below(60));
            if (options.half_life) scores.assign(keys.size(), twins.table->current_score());
            const std::vector<float> values(keys.size() * 2, 0.5f);
            const bool given = below(2) == 0;
            twins.Both([&](Table& table) {
              table.Assign(keys, values.data(), nullptr, given ? scores.data() : nullptr);
            });
            break;
          }
          case 2:
            if (round % 3) break;
            twins.Both([&](Table& table) {
              table.SetMaxCapacity(round % 2 ? capacity : capacity - capacity / 3);
            });
            break;
          case 3: {
            const std::vector<uint32_t> uses(keys.size(), static_cast<uint32_t>(below(4)));
            twins.Both([&](Table& table) { table.SetUses(keys, uses.data()); });
            break;
          }
          case 4:
            if (strategy.score != ScoreStrategy::kStep) break;
            twins.Both([&](Table& table) { table.Expire(static_cast<uint64_t>(round / 2)); });
            break;
          default:
            break;
        }
        if (round % 6 == 0) twins.Check();
      }
      twins.Check();
      if (twins.table->stats().evictions <= capacity) {
        check::Fail(__FILE__, __LINE__, "few evictions: " + strategy.name);
      }
    }
  }
}

TEST(The victim is the smallest of its class or of the next class nearby that has one to give) {
  struct Case {
    int64_t capacity, bucket;
    int class_bits;
  };
  for (const auto& [capacity, bucket, class_bits] :
       {Case{1024, 128, 0}, {1025, 128, 3}, {4100, 128, 5}, {4097, 512, 3}, {9000, 128, 6}}) {
    TableOptions options = SmallTable(1, capacity);
    options.index.bucket_capacity = bucket;
    const HashSecret secret = SecretOf(options.index.seed);
    const auto class_of = [&](int64_t key) {
      return class_bits ? KeyedHash(key, secret) >> (64 - class_bits) : 0;
    };
    const size_t nearby = size_t{1} << std::min(class_bits, 3);
    const auto table = Table::Create(options);
    for (int64_t key = 0; key < capacity; key += 200) {  // so that scores differ
      LookUpOne(table, Range(key, std::min(key + 200, capacity)));
    }
    std::mt19937_64 random(static_cast<uint64_t>(capacity));
    int64_t newcomer = capacity;
    for (int round = 0; round < 40; ++round) {
      std::map<int64_t, RowValues> rows = AllRows(*table);
      CHECK_EQ(std::ssize(rows), capacity);
      const auto is_near = [&](int64_t key) {
        return class_of(key) / nearby == class_of(newcomer) / nearby;
      };
      while (!is_near(rows.begin()->first) && round % 4) ++newcomer;
      // A few that the batch does not name, most of them nearby; another live batch has some.
      const uint64_t keys_nearby = nearby * static_cast<uint64_t>(capacity) >> class_bits;
      std::vector<int64_t> batch;
      std::set<int64_t> spare, lived;
      for (const auto& [key, row] : rows) {
        if (random() % (is_near(key) ? keys_nearby : static_cast<uint64_t>(capacity)) > 2) {
          batch.push_back(key);
        } else {
          spare.insert(key);
          if (random() % 2) lived.insert(key);
        }
      }
      const Forward live = LookUpOne(table, {lived.begin(), lived.end()});
      rows = AllRows(*table);
      const auto victim = [&](bool of_others) {
        for (size_t step = 0; step < nearby; ++step) {
          const size_t own = class_of(newcomer);
          const size_t in_class = own / nearby * nearby + (own + step) % nearby;
          std::map<Rank, int64_t> found;
          for (const int64_t key : spare) {
            if (class_of(key) != in_class || lived.contains(key) != of_others) continue;
            found[VictimQueues::RankOf({rows[key].score, key})] = key;
          }
          if (!found.empty()) return found.begin()->second;
        }
        return newcomer;  // there is none
      };
      const int64_t free = victim(false), gone = free != newcomer ? free : victim(true);
      batch.push_back(newcomer);
      CHECK_EQ(LookUpOne(table, batch).result.refused, gone == newcomer);
      CHECK_EQ(CountFound(*table, {gone}), 0);
      CHECK_EQ(CountFound(*table, {newcomer}), gone != newcomer);
      ++newcomer;
    }
  }
}

TEST(A batch never takes the rows that it has found) {
  for (const Strategy& strategy : kStrategies) {
    for (const int64_t capacity : {97, 3000}) {
      for (const int threads : {1, 2, 4}) {
        SetNumThreads(threads);
        TableOptions options = SmallTable(2, capacity);
        options.score_strategy = strategy.score;
        options.admit_by_frequency = strategy.admits;
        options.evict_least_used = strategy.least_used;
        options.shared_rows = strategy.admits ? 1 : 0;
        options.half_life = strategy.score == ScoreStrategy::kAgedLfu ? 1 : 0;
        const auto table = Table::Create(options);
        if (strategy.score == ScoreStrategy::kCustomized) table->set_custom_score(5);
        LookUpOne(table, Range(0, capacity));
        // All but the last are found. Each newcomer comes often enough to be admitted.
        std::vector<int64_t> keys = Range(0, capacity - 1);
        for (int copy = 0; copy < 9; ++copy) {
          const auto coming = Range(10000, 10000 + capacity / 3);
          keys.insert(keys.end(), coming.begin(), coming.end());
        }
        const Forward forward = LookUpOne(table, keys);
        CHECK_EQ(CountFound(*table, Range(0, capacity - 1)), capacity - 1);
        CHECK_EQ(CountFound(*table, Range(10000, 10000 + capacity / 3)), 1);
        CHECK_EQ(table->stats().evictions, 1);
        table->CheckInvariants();
      }
    }
  }
  SetNumThreads(2);
}

TEST(Victims in the overflow area are the same on any number of threads) {
  constexpr int64_t kCapacity = 20011;
  TableOptions options = SmallTable(2, kCapacity);
  const HashSecret secret = SecretOf(options.index.seed);
  // So many keys of the first and the last sixteenth of all hashes, which different threads place,
  // that the index has no room for them there.
  std::vector<int64_t> crowd;
  for (int64_t key = 0; crowd.size() < 12000; ++key) {
    const uint64_t sixteenth = KeyedHash(key, secret) >> 60;
    if (sixteenth == 0 || sixteenth == 15) crowd.push_back(key);
  }
  std::map<int64_t, RowValues> expected;
  for (const int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    const auto table = Table::Create(options);
    LookUpOne(table, {crowd.begin(), crowd.begin() + 6000});
    LookUpOne(table, Range(-kCapacity, -1));  // those that do not fit evict the oldest
    for (int64_t batch = 0; batch < 6; ++batch) {
      std::vector<int64_t> keys(crowd.begin() + 6000 + 1000 * batch,
                                crowd.begin() + 7000 + 1000 * batch);
      for (int64_t key = 0; key < 3000; ++key) keys.push_back(-1000000 - 3000 * batch - key);
      LookUpOne(table, keys);
      table->CheckInvariants();
    }
    CHECK_EQ(table->size(), kCapacity);
    if (threads == 1) expected = AllRows(*table);
    CHECK(AllRows(*table) == expected);
  }
  SetNumThreads(2);
}

TEST(Rows of the highest score go like all others, those that live batches hold last) {
  for (const int64_t spare : {0, 5, 40, 90}) {  // the rank of the row that nobody holds
    TableOptions options = SmallTable(1, 97);
    options.score_strategy = ScoreStrategy::kCustomized;
    const auto table = Table::Create(options);
    table->set_custom_score(UINT64_MAX);
    std::vector<int64_t> keys = Range(0, 97);
    LookUpOne(table, keys);
    std::sort(keys.begin(), keys.end(),
              [](int64_t a, int64_t b) { return HashKey(a) < HashKey(b); });
    const int64_t gone = keys[static_cast<size_t>(spare)];
    std::erase(keys, gone);
    const Forward live = LookUpOne(table, {keys[0], keys[1]});
    keys[0] = 1000;
    keys[1] = 1000;
    CHECK_EQ(LookUpOne(table, keys).result.refused, 0);
    CHECK_EQ(CountFound(*table, {gone}), 0);
    CHECK_EQ(table->size(), 97);
    CHECK_EQ(table->stats().dropped_gradients, 0);
  }
}

TEST(A newcomer takes a row from a key that it leads by an eighth and by no less) {
  constexpr uint64_t kLead = kAgedOne / 8;
  constexpr int64_t kNewcomer = 1000, kWeak = 7;
  // The score of the newcomer once it is in, or 0.
  const auto contest = [&](uint64_t weak) {
    TableOptions options = SmallTable(1, 97);
    options.score_strategy = ScoreStrategy::kAgedLfu;
    options.admit_by_frequency = true;
    options.half_life = 1 << 20;
    options.shared_rows = 1;
    const auto table = Table::Create(options);
    const std::vector<int64_t> keys = Range(0, 97);
    LookUpOne(table, keys);
    std::vector<uint64_t> scores(keys.size(), AgedScore(1e9, 0));
    scores[kWeak] = weak;
    const std::vector<float> values(keys.size());
    table->Assign(keys, values.data(), nullptr, scores.data());
    LookUpOne(table, std::vector<int64_t>(9, kNewcomer));
    CHECK_EQ(CountFound(*table, {kNewcomer}), 1 - CountFound(*table, {kWeak}));
    uint64_t score = 0;
    uint8_t found = 0;
    float value = 0;
    table->Read({&kNewcomer, 1}, &value, nullptr, &score, &found);
    return found ? score : 0;
  };
  const uint64_t own = contest(1);
  CHECK(own > AgedScore(8, 0));
  CHECK_EQ(contest(own - kLead - 2), own);
  CHECK_EQ(contest(own - kLead - 1), own);
  CHECK_EQ(contest(own - kLead), uint64_t{0});
  CHECK_EQ(contest(own - kLead + 1), uint64_t{0});
}

TEST(A class with many keys in the overflow area gives its smallest) {
  constexpr int64_t kCapacity = 4096;  // eight buckets of one stripe, a class for each
  TableOptions options = SmallTable(1, kCapacity);
  options.index.bucket_capacity = 512;
  const auto table = Table::Create(options);
  const HashSecret secret = SecretOf(options.index.seed);
  std::vector<int64_t> first, others;
  for (int64_t key = 0; first.size() < 2200; ++key) {
    const uint64_t in_class = KeyedHash(key, secret) >> 61;
    if (in_class == 0) first.push_back(key);
    if (0 < in_class && in_class < 4 && others.size() < kCapacity - 2000) others.push_back(key);
  }
  LookUpOne(table, others);  // second buckets of the first class are full now
  std::vector<int64_t> keys(first.begin(), first.begin() + 2000);
  LookUpOne(table, keys);  // all of one score
  CHECK_EQ(table->size(), kCapacity);
  std::vector<Slot> slots(keys.size());
  std::vector<Row> rows(keys.size());
  ActiveKernels().find(table->index(), keys.data(), std::ssize(keys), slots.data(), rows.data(),
                       ScoreUpdate::kKeep, 0, true);
  CHECK(std::count_if(slots.begin(), slots.end(), KeyIndex::IsAside) > kMostCandidates);
  std::sort(keys.begin(), keys.end(), [](int64_t a, int64_t b) { return HashKey(a) < HashKey(b); });
  for (int64_t gone = 0; gone < 200; gone += 50) {
    const auto begin = first.begin() + 2000 + gone;
    LookUpOne(table, {begin, begin + 50});
    table->CheckInvariants();
    CHECK_EQ(CountFound(*table, {keys.begin(), keys.begin() + gone + 50}), 0);
    CHECK_EQ(CountFound(*table, {keys.begin() + gone + 50, keys.end()}), 2000 - gone - 50);
  }
}

TEST(Rows that live batches hold go last and are not forgotten) {
  TableOptions options = SmallTable(2, 500);
  const auto table = Table::Create(options);
  {
    const Forward held = LookUpOne(table, Range(0, 100));  // the oldest
    LookUpOne(table, Range(100, 500));
    LookUpOne(table, Range(1000, 1200));
    CHECK_EQ(CountFound(*table, Range(0, 100)), 100);
    CHECK_EQ(CountFound(*table, Range(100, 500)), 200);
    table->CheckInvariants();
  }
  LookUpOne(table, Range(2000, 2100));
  CHECK_EQ(CountFound(*table, Range(0, 100)), 0);
  CHECK_EQ(CountFound(*table, Range(100, 500)), 200);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
