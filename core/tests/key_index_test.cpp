#include "embstore/key_index.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "embstore/kernels.h"
#include "embstore/parallel.h"
#include "embstore/score_clock.h"
#include "key_index_oracle.h"

namespace embstore {
namespace {

TEST(Every bucket capacity from 16 to 1024 holds what a map holds) {
  for (int64_t bucket = 16; bucket <= 1024; bucket += 16) {
    KeyIndex index({.init_capacity = 1, .max_capacity = 9 * bucket, .bucket_capacity = bucket});
    Model model;
    std::mt19937_64 random(static_cast<uint64_t>(bucket));
    for (int64_t key : RandomKeys(5 * bucket / 2, static_cast<uint64_t>(bucket))) {
      Insert(index, model, key, 1 + random() % 9);
    }
    CheckHolds(index, model);
    // Every third goes, and others come.
    int64_t i = 0;
    for (auto entry = model.begin(); entry != model.end();) {
      if (i++ % 3 != 0) {
        ++entry;
        continue;
      }
      index.Erase(index.Find(entry->first));
      index.AddSize(-1);
      entry = model.erase(entry);
    }
    CheckHolds(index, model);
    for (int64_t key = 1000; key < 1000 + bucket; ++key) {
      if (!model.count(key)) Insert(index, model, key, 3);
    }
    CheckHolds(index, model);
  }
}

TEST(An index takes as many keys as its capacity, and hardly any overflow) {
  for (int64_t bucket : {64, 128, 1024}) {
    for (int64_t capacity : {bucket, 7 * bucket, 100 * bucket}) {
      KeyIndex index(
          {.init_capacity = capacity, .max_capacity = capacity, .bucket_capacity = bucket});
      CHECK_EQ(index.capacity(), capacity);
      const size_t bytes = index.bytes();
      Model model;
      for (int64_t key : RandomKeys(capacity, 5)) Insert(index, model, key, 5);
      CheckHolds(index, model);
      CHECK(index.overflow_size() * 200 <= capacity);
      CHECK(index.bytes() <= bytes + 1024 + 64 * static_cast<size_t>(capacity) / 100);
    }
  }
}

TEST(Keys that all want one group are found and cost no more memory than others) {
  for (int64_t n : {200, 5000}) {
    KeyIndex crafted({.init_capacity = 1 << 10, .max_capacity = 1 << 20, .seed = 77});
    KeyIndex plain({.init_capacity = 1 << 10, .max_capacity = 1 << 20, .seed = 78});
    Model crafted_model, plain_model;
    for (int64_t key : CraftedKeys(77, uint64_t{5} << 60, n)) {
      Insert(crafted, crafted_model, key, 2);
      Insert(plain, plain_model, key, 2);
    }
    CheckHolds(crafted, crafted_model);
    CheckHolds(plain, plain_model);
    CHECK_EQ(plain.overflow_size(), 0);  // without the seed nobody can aim
    CHECK(crafted.overflow_size() > 0 || n == 200);
    CHECK_EQ(crafted.capacity(), plain.capacity());
    CHECK(crafted.bytes() <= plain.bytes() + 100 * static_cast<size_t>(n));
    // They can go again, one by one.
    int64_t i = 0;
    for (int64_t key : CraftedKeys(77, uint64_t{5} << 60, n)) {
      if (++i % 7 == 0) continue;
      crafted.Erase(crafted.Find(key));
      crafted.AddSize(-1);
      crafted_model.erase(key);
    }
    CheckHolds(crafted, crafted_model);
  }
}

TEST(Nobody can aim at a place of the overflow area) {
  // All have one home group, and one place for the hash that the seed gives.
  const HashSecret other = SecretOf(~uint64_t{77});
  KeyIndex index({.init_capacity = 16, .max_capacity = 1 << 20, .bucket_capacity = 16, .seed = 77});
  CHECK_EQ(index.LongestOverflowSearch(), 0);
  Model model;
  for (int64_t key : CraftedKeys(77, uint64_t{5} << 60, 3'000'000)) {
    if (KeyedHash(key, other) % 2048 == 7) Insert(index, model, key, 2);
  }
  CHECK(index.overflow_size() > 500);
  CHECK(index.LongestOverflowSearch() < 100);
  CheckHolds(index, model);
}

TEST(Crafted keys stay while the index grows) {
  KeyIndex index({.init_capacity = 128, .max_capacity = 1 << 20, .seed = 9});
  Model model;
  for (int64_t key : CraftedKeys(9, 12345, 900)) Insert(index, model, key, 4);
  for (int64_t key : RandomKeys(20000, 8)) {
    if (!model.count(key)) Insert(index, model, key, 6);
  }
  CheckHolds(index, model);
}

TEST(Keys leave the overflow area when their stripe grows) {
  KeyIndex index({.init_capacity = 4096, .max_capacity = 1 << 20, .seed = 9});
  Model model;
  int64_t most_aside = 0;
  for (int64_t key : RandomKeys(60000, 8)) {  // the first ones crowd one of two stripes
    if (index.size() < 3000 && index.Hash(key) >> 63 == 0) continue;
    Insert(index, model, key, 6);
    most_aside = std::max(most_aside, index.overflow_size());
  }
  CHECK(most_aside > 500);
  CHECK(index.overflow_size() < 10);
  CheckHolds(index, model);
}

TEST(Growth keeps every key and follows the number of keys in small steps) {
  for (int64_t bucket : {16, 48, 128}) {
    KeyIndex index({.init_capacity = 1, .max_capacity = 1 << 20, .bucket_capacity = bucket});
    Model model;
    const std::vector<int64_t> keys = RandomKeys(60 * bucket, 3);
    for (size_t i = 0; i < keys.size(); ++i) {
      Insert(index, model, keys[i], 7);
      const auto size = static_cast<double>(index.size());
      CHECK(static_cast<double>(index.capacity()) * 0.9 >= size);
      CHECK(index.capacity() <= 2 * bucket + static_cast<int64_t>(size * 1.3));
      if (i % 997 == 0) CheckHolds(index, model);
    }
    CheckHolds(index, model);
  }
}

TEST(Growth in one leap holds the same keys as growth in steps) {
  for (int64_t target : {130, 3000, 100000}) {
    KeyIndex leap({.init_capacity = 1, .max_capacity = 1 << 20});
    Model model;
    for (int64_t key : RandomKeys(100, 4)) Insert(leap, model, key, 2);
    leap.Reserve(target);
    CHECK(leap.capacity() >= target);
    CheckHolds(leap, model);
    const int64_t capacity = leap.capacity();
    for (int64_t key : RandomKeys(target, 4)) {
      if (!model.count(key)) Insert(leap, model, key, 3);
    }
    CHECK_EQ(leap.capacity(), capacity);
    CheckHolds(leap, model);
  }
}

TEST(Any number of threads gives the same slots) {
  std::vector<std::vector<Slot>> slots;
  for (int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    KeyIndex index({.init_capacity = 1, .max_capacity = 1 << 20, .seed = 3});
    std::vector<int64_t> keys = RandomKeys(50000, 12);
    Model model;
    for (int64_t key : keys) Insert(index, model, key, 2);
    index.Reserve(60000);
    index.Reserve(400000);
    slots.emplace_back();
    for (int64_t key : keys) slots.back().push_back(index.Find(key));
    CHECK(slots.back() == slots[0]);
  }
  SetNumThreads(2);
}

TEST(A walk visits every key once while the index grows and keys come and go) {
  KeyIndex index({.init_capacity = 1, .max_capacity = 1 << 20, .seed = 6});
  Model model;
  for (int64_t key : CraftedKeys(6, uint64_t{1} << 63, 700)) Insert(index, model, key, 1);
  for (int64_t key : RandomKeys(3000, 1)) Insert(index, model, key, 1);
  std::mt19937_64 random(5);
  std::set<int64_t> stay, met;
  std::vector<int64_t> go;
  for (const auto& [key, score] : model) {
    if (random() % 3 == 0) {
      go.push_back(key);
    } else {
      stay.insert(key);
    }
  }
  KeyIndex::Walk walk;
  while (!walk.ended) {
    index.Advance(
        walk, 1 + static_cast<int64_t>(random() % 50), [](const IndexEntry&) { return true; },
        [&](const IndexEntry& entry) {
          CHECK(met.insert(entry.key).second);
          stay.erase(entry.key);
        });
    for (int i = 0; i < 40; ++i) Insert(index, model, static_cast<int64_t>(random()), 1);
    for (int i = 0; i < 5 && !go.empty(); ++i) {
      index.Erase(index.Find(go.back()));
      index.AddSize(-1);
      go.pop_back();
    }
  }
  CHECK(stay.empty());
}

TEST(A visit by hash meets every key of its range once) {
  for (const int64_t bucket : {16, 128, 1008}) {
    KeyIndex index(
        {.init_capacity = 128, .max_capacity = 1 << 20, .bucket_capacity = bucket, .seed = 4});
    std::mt19937_64 random(static_cast<uint64_t>(bucket));
    Model model;
    for (int64_t key : CraftedKeys(4, uint64_t{5} << 60, 3 * bucket)) Insert(index, model, key, 3);
    for (const int64_t key : RandomKeys(6000, 11)) {
      if (!model.contains(key)) Insert(index, model, key, 1 + random() % 5);
      if (random() % 97) continue;
      uint64_t first = random(), last = first + (random() >> (1 + random() % 12));
      if (last < first) last = UINT64_MAX;
      if (random() % 4 == 0) first = uint64_t{5} << 60;
      std::map<int64_t, int> expected, met;
      for (const auto& [k, score] : model) {
        const uint64_t hash = index.Hash(k);
        if (hash >= first && hash <= last && score < 4) ++expected[k];
      }
      index.VisitHashes(
          first, last, [](uint64_t score) { return score - 1 < 3; },
          [&](Slot slot, const IndexEntry& entry) {
            ++met[entry.key];
            CHECK_EQ(index.Find(entry.key), slot);
          });
      CHECK(met == expected);
    }
    CHECK(index.overflow_size() > 0 || bucket > 16);
  }
}

TEST(What was erased can be put back where it was) {
  KeyIndex index({.init_capacity = 1024, .max_capacity = 1024, .seed = 4});
  Model model;
  for (int64_t key : RandomKeys(1024, 2)) Insert(index, model, key, 8);
  for (int64_t key : CraftedKeys(4, 99, 400)) Insert(index, model, key, 8);
  std::vector<std::pair<Slot, IndexEntry>> gone;
  for (const auto& [key, score] : model) {
    if (HashKey(key) % 5) continue;
    const Slot slot = index.Find(key);
    gone.emplace_back(slot, index.entry(slot));
    index.Erase(slot);
  }
  std::vector<int64_t> newcomers;
  for (int64_t key = 5000; key < 5200; ++key) {
    if (index.Insert({key, 1, 0}, index.Hash(key))) newcomers.push_back(key);
  }
  for (int64_t key : newcomers) index.Erase(index.Find(key));
  for (const auto& [slot, entry] : gone) index.PutBack(slot, entry);
  CheckHolds(index, model);
}

TEST(A broken invariant is named) {
  KeyIndex index({.init_capacity = 128, .max_capacity = 1024, .seed = 4});
  Model model;
  for (int64_t key : RandomKeys(97, 2)) Insert(index, model, key, 8);
  index.CheckInvariants();
  index.AddSize(1);
  CHECK_THROWS(std::logic_error, "size() counts the keys", index.CheckInvariants());
  index.AddSize(-1);
  const Slot slot = index.Find(1);
  index.view().groups[slot / IndexGroup::kSlots].keys[slot % IndexGroup::kSlots] ^= 7 << 20;
  CHECK_THROWS(std::logic_error, "broken invariant: a key", index.CheckInvariants());
}

TEST(A cleared index is empty at the same capacity and takes keys again) {
  for (int64_t bucket : {16, 128, 144}) {
    KeyIndex index({.init_capacity = 1, .max_capacity = 80 * bucket, .bucket_capacity = bucket});
    for (int round = 0; round < 2; ++round) {
      Model model;
      for (int64_t key : RandomKeys(30 * bucket, static_cast<uint64_t>(round))) {
        Insert(index, model, key, 2);
      }
      CheckHolds(index, model);
      const int64_t capacity = index.capacity();
      index.Clear();
      CHECK_EQ(index.capacity(), capacity);
      CheckHolds(index, {});
    }
  }
}

TEST(A probe leaves scores alone that somebody has to hear of first, and lists them) {
  KeyIndex index({.init_capacity = 16, .max_capacity = 1 << 20, .bucket_capacity = 16, .seed = 77});
  Model model;
  std::vector<int64_t> all = CraftedKeys(77, uint64_t{1} << 40, 300);  // some are in the overflow
  for (int64_t key = 0; key < 3000; ++key) all.push_back(key);
  for (const int64_t key : all) Insert(index, model, key, 1 + HashKey(key) % 100);
  for (int64_t key = 3000; key < 3500; ++key) all.push_back(key);  // missing
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 2047; ++i) keys.push_back(all[HashKey(i) % all.size()]);
  const size_t n = keys.size();
  for (const Kernels* kernels : AvailableKernels()) {
    for (const auto& [key, score] : model) index.set_score(index.Find(key), score);
    std::vector<uint32_t> positions(n);
    std::vector<Slot> slots(n);
    std::vector<Row> rows(n);
    PostponedHits postponed{50, positions.data(), slots.data()};
    const int64_t missing = kernels->find_announced(
        index.view(), keys.data(), static_cast<int64_t>(n), rows.data(), 1000, postponed);
    std::map<uint32_t, Slot> listed;
    for (int64_t i = 0; i < postponed.count; ++i) {
      CHECK(
          listed.emplace(positions[static_cast<size_t>(i)], slots[static_cast<size_t>(i)]).second);
    }
    int64_t absent = 0;
    for (size_t i = 0; i < n; ++i) {
      const bool there = model.contains(keys[i]);
      absent += !there;
      CHECK_EQ(rows[i], there ? RowOf(keys[i]) : kMissingRow);
      const bool stays = there && model.at(keys[i]) <= 50;
      CHECK_EQ(listed.contains(static_cast<uint32_t>(i)), stays);
      if (stays) CHECK_EQ(listed.at(static_cast<uint32_t>(i)), index.Find(keys[i]));
      if (there) CHECK_EQ(index.score(index.Find(keys[i])), stays ? model.at(keys[i]) : 1000);
    }
    CHECK_EQ(missing, absent);
    CHECK(absent > 0 && postponed.count > 0);
  }
}

TEST(A probe renews scores as it is told, and a full count stays) {
  KeyIndex index({.init_capacity = 64, .max_capacity = 64, .bucket_capacity = 16});
  index.InsertNew({5, 10, 1});
  const std::vector<int64_t> keys = {5, 6, 5, 5};
  std::vector<Slot> slots(keys.size());
  std::vector<Row> rows(keys.size());
  for (const Kernels* kernels : AvailableKernels()) {
    for (const bool alone : {false, true}) {
      const auto probe = [&](Slot* to, ScoreUpdate update, uint64_t score) {
        CHECK_EQ(kernels->find(index.view(), keys.data(), 4, to, rows.data(), update, score, alone),
                 1);
      };
      index.set_score(index.Find(5), 10);
      probe(slots.data(), ScoreUpdate::kCount, 1);
      CHECK_EQ(index.entry(index.Find(5)).score, 13u);
      probe(slots.data(), ScoreUpdate::kSet, 3);
      CHECK_EQ(index.entry(index.Find(5)).score, 3u);
      CHECK_EQ(slots[1], kNoSlot);
      index.set_score(index.Find(5), UINT64_MAX - 1);
      probe(nullptr, ScoreUpdate::kCount, 1);
      CHECK_EQ(index.entry(index.Find(5)).score, UINT64_MAX);  // 0 would say that the slot is free
      const uint64_t old = AgedScore(1.7, 3), now = AgedScore(1.1, 9);
      index.set_score(index.Find(5), old);
      probe(nullptr, ScoreUpdate::kAge, now);
      CHECK_EQ(index.entry(index.Find(5)).score, AddAged(AddAged(AddAged(old, now), now), now));
    }
  }
}

// It decides which keys compete for rows, so a table that is loaded by a later version needs the
// same.
TEST(The secret of a seed is the first three numbers of splitmix64) {
  const HashSecret zero = SecretOf(0);
  CHECK_EQ(zero.mask, 0xe220a8397b1dcdafULL);
  CHECK_EQ(zero.first, 0x6e789e6aa1b965f4ULL | 1);
  CHECK_EQ(zero.second, 0x06c45d188009454fULL);
}

TEST(Equal seeds place keys alike and other seeds do not) {
  const auto slots_of = [](uint64_t seed) {
    KeyIndex index({.init_capacity = 1 << 14, .max_capacity = 1 << 14, .seed = seed});
    Model model;
    std::vector<Slot> slots;
    for (int64_t key = 0; key < 1000; ++key) Insert(index, model, key, 1);
    for (int64_t key = 0; key < 1000; ++key) slots.push_back(index.Find(key));
    return slots;
  };
  CHECK(slots_of(3) == slots_of(3));
  CHECK(slots_of(3) != slots_of(4));
}

TEST(Options that cannot work are named with their value) {
  const auto make = [](KeyIndexOptions options) { KeyIndex index(options); };
  CHECK_THROWS(InvalidArgument, "bucket_capacity should be", make({.bucket_capacity = 0}));
  CHECK_THROWS(InvalidArgument, "but is: 24", make({.bucket_capacity = 24}));
  CHECK_THROWS(InvalidArgument, "but is: -128", make({.bucket_capacity = -128}));
  CHECK_THROWS(InvalidArgument, "max_capacity should be at least 1 but is: 0",
               make({.init_capacity = 1, .max_capacity = 0}));
  CHECK_THROWS(InvalidArgument, "max_capacity should be at most 1600000000",
               make({.max_capacity = 1'600'000'001}));
  CHECK_THROWS(InvalidArgument, "max_capacity", make({.max_capacity = kMax}));
  CHECK_THROWS(InvalidArgument, "init_capacity should be at least 1 but is: 0",
               make({.init_capacity = 0}));
  CHECK_THROWS(InvalidArgument, "init_capacity should be at most max_capacity",
               make({.init_capacity = 1000, .max_capacity = 500}));
  for (double factor : {0.0, -1.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS(InvalidArgument, "max_load_factor", make({.max_load_factor = factor}));
  }
}

TEST(The parts of a batch hold each key once, in order, by the ranges of their hashes) {
  const HashSecret secret = SecretOf(3);
  for (const Kernels* kernels : AvailableKernels()) {
    for (const int64_t n : {0, 1, 7, 8, 9, 1000}) {
      for (const uint32_t parts : {1u, 2u, 3u, 1024u}) {
        const std::vector<int64_t> keys = RandomKeys(n, 11);
        std::vector<int64_t> selected(keys.size() + 8);
        std::vector<uint32_t> positions(keys.size() + 8);
        std::set<uint32_t> seen;
        for (uint32_t part = 0; part < parts; ++part) {
          const int64_t count = kernels->select(secret, keys.data(), n, {part, parts},
                                                selected.data(), positions.data());
          CHECK(std::is_sorted(positions.begin(), positions.begin() + count));
          for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
            CHECK(seen.insert(positions[i]).second);
            CHECK_EQ(selected[i], keys[positions[i]]);
            const auto leading = static_cast<uint32_t>(KeyedHash(selected[i], secret) >> 32);
            CHECK_EQ(uint64_t{leading} * parts >> 32, part);
          }
        }
        CHECK_EQ(std::ssize(seen), n);
      }
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
