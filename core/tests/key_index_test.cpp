#include "embstore/key_index.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <random>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace embstore {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr std::array<int64_t, 10> kExtremeKeys = {0,    1,        -1,       2,    -2,
                                                  kMin, kMin + 1, kMax - 1, kMax, -4};

std::vector<int64_t> RandomKeys(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> keys(kExtremeKeys.begin(), kExtremeKeys.end());
  while (static_cast<int64_t>(keys.size()) < n) keys.push_back(static_cast<int64_t>(random()));
  keys.resize(static_cast<size_t>(n));
  return keys;
}

// Keys of one bucket, found by trial.
std::vector<int64_t> KeysOfBucket(const KeyIndex& index, int64_t bucket, int64_t n) {
  std::vector<int64_t> keys;
  for (int64_t key = -7; static_cast<int64_t>(keys.size()) < n; ++key) {
    if (index.BucketOf(key) == bucket) keys.push_back(key);
  }
  return keys;
}

using Model = std::unordered_map<int64_t, uint64_t>;  // key to score

// A row for each key: the index keeps any number.
Row RowOf(int64_t key) { return static_cast<Row>(HashKey(key) >> 33); }

int64_t BucketSlots(const KeyIndex& index) {
  return index.slots() / (index.capacity() / index.bucket_capacity());
}

// The index holds exactly the model, by every way of asking.
void CheckHolds(const KeyIndex& index, const Model& model) {
  CHECK_EQ(index.size(), static_cast<int64_t>(model.size()));
  std::vector<int64_t> keys;
  for (const auto& [key, score] : model) {
    keys.push_back(key);
    const Slot slot = index.Find(key);
    if (slot < 0 || slot >= index.slots()) {
      check::Fail(__FILE__, __LINE__, "a key of the model is not found: " + std::to_string(key));
      return;
    }
    CHECK_EQ(index.entry(slot).key, key);
    CHECK_EQ(index.entry(slot).score, score);
    CHECK_EQ(index.entry(slot).row, RowOf(key));
    CHECK_EQ(slot / BucketSlots(index), index.BucketOf(key));
  }
  int64_t used = 0;
  for (Slot slot = 0; slot < index.slots(); ++slot) used += index.IsUsed(slot);
  CHECK_EQ(used, static_cast<int64_t>(model.size()));
  Slot last = -1;
  index.VisitUsed(1, static_cast<Slot>(index.slots()), [&](Slot slot, const IndexEntry& entry) {
    CHECK(slot > last && index.IsUsed(slot));
    CHECK(entry.key == index.key(slot) && entry.score == index.score(slot));
    last = slot;
    --used;
  });
  CHECK_EQ(used, static_cast<int64_t>(index.IsUsed(0)));

  // The batch probe of every instruction set, on keys that are there and on others.
  std::mt19937_64 random(model.size());
  while (keys.size() < 2 * model.size() + 3) keys.push_back(static_cast<int64_t>(random()));
  std::vector<Slot> slots(keys.size());
  std::vector<Row> rows(keys.size());
  for (const Kernels* kernels : AvailableKernels()) {
    const auto n = static_cast<int64_t>(keys.size());
    for (const bool home_first : {true, false}) {
      IndexView view = index.view();
      view.mostly_home = home_first;
      kernels->find(view, keys.data(), n, slots.data(), rows.data(), ScoreUpdate::kKeep, 0);
      for (size_t i = 0; i < keys.size(); ++i) {
        CHECK_EQ(slots[i], index.Find(keys[i]));
        CHECK_EQ(rows[i], slots[i] == kNoSlot ? kMissingRow : RowOf(keys[i]));
      }
    }
  }
}

Slot InsertGrowing(KeyIndex& index, int64_t key, uint64_t score) {
  Slot slot = index.FindOrInsert(key, score).slot;
  while (slot == kNoSlot && index.CanGrow()) {
    index.Grow([](Slot, Slot) {});
    slot = index.FindOrInsert(key, score).slot;
  }
  if (slot != kNoSlot) {
    index.AddSize(1);
    index.set_row(slot, RowOf(key));
  }
  return slot;
}

TEST(Every bucket capacity from 16 to 1024 holds what a map holds) {
  for (int64_t bucket = 16; bucket <= 1024; bucket += 16) {
    KeyIndex index({.init_capacity = 1, .max_capacity = 5 * bucket, .bucket_capacity = bucket});
    Model model;
    std::mt19937_64 random(static_cast<uint64_t>(bucket));
    for (int64_t key : RandomKeys(2 * bucket, static_cast<uint64_t>(bucket))) {
      if (model.count(key)) continue;
      const uint64_t score = 1 + random() % 9;
      if (InsertGrowing(index, key, score) != kNoSlot) model[key] = score;
    }
    CheckHolds(index, model);
    // Every third goes, and its slot is found free again.
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
  }
}

TEST(An index takes keys up to a load factor of one in every bucket) {
  for (int64_t bucket : {16, 48, 64, 112, 128, 176, 1024}) {
    KeyIndex index({.init_capacity = 6 * bucket,
                    .max_capacity = 6 * bucket,
                    .bucket_capacity = bucket,
                    .max_load_factor = 1.0});
    CHECK_EQ(index.capacity(), 6 * bucket);
    Model model;
    for (int64_t b = 0; b < 6; ++b) {
      const std::vector<int64_t> keys = KeysOfBucket(index, b, bucket + 1);
      for (int64_t i = 0; i < bucket; ++i) {
        CHECK(InsertGrowing(index, keys[static_cast<size_t>(i)], 5) != kNoSlot);
        model[keys[static_cast<size_t>(i)]] = 5;
      }
      CHECK_EQ(index.FindOrInsert(keys.back(), 5).slot, kNoSlot);
      CHECK_EQ(index.Find(keys.back()), kNoSlot);
    }
    CHECK_EQ(index.size(), index.capacity());
    CheckHolds(index, model);
  }
}

TEST(Victims are exactly the smallest scores, and among equals the smallest hashes) {
  for (int64_t bucket : {16, 80, 128, 1008}) {
    KeyIndex index(
        {.init_capacity = 2 * bucket, .max_capacity = 2 * bucket, .bucket_capacity = bucket});
    std::mt19937_64 random(static_cast<uint64_t>(bucket));
    using Rank = std::tuple<uint64_t, uint64_t, int64_t>;  // score, hash, key
    std::vector<Rank> ranks;
    for (int64_t key : KeysOfBucket(index, 1, bucket)) {
      const uint64_t score = random() % 4 == 0 ? UINT64_MAX : 1 + random() % 5;
      CHECK(index.FindOrInsert(key, score).slot != kNoSlot);
      ranks.emplace_back(score, HashKey(key), key);
    }
    std::sort(ranks.begin(), ranks.end());
    std::vector<uint8_t> taken(static_cast<size_t>(index.slots()), 0);
    const auto is_taken = [&](Slot slot) { return taken[static_cast<size_t>(slot)] != 0; };
    for (const auto& [score, hash, key] : ranks) {
      const Slot victim = index.Victim(1, is_taken);
      CHECK(victim != kNoSlot);
      if (victim == kNoSlot) return;
      CHECK_EQ(index.entry(victim).key, key);
      CHECK_EQ(index.entry(victim).score, score);
      taken[static_cast<size_t>(victim)] = 1;
    }
    CHECK_EQ(index.Victim(1, is_taken), kNoSlot);
    CHECK_EQ(index.Victim(0, [](Slot) { return false; }), kNoSlot);  // an empty bucket has none
  }
}

TEST(A replaced key is gone and its successor has its slot and its row) {
  KeyIndex index({.init_capacity = 32, .max_capacity = 32, .bucket_capacity = 16});
  const std::vector<int64_t> keys = KeysOfBucket(index, 0, 17);
  for (size_t i = 0; i < 16; ++i) index.FindOrInsert(keys[i], i + 1).slot;
  const Slot victim = index.Victim(0, [](Slot) { return false; });
  CHECK_EQ(index.entry(victim).key, keys[0]);
  index.set_row(victim, 1234);
  index.Replace(victim, keys[16], 99);
  CHECK_EQ(index.entry(victim).row, 1234);
  CHECK_EQ(index.Find(keys[0]), kNoSlot);
  CHECK_EQ(index.Find(keys[16]), victim);
  CHECK_EQ(index.entry(victim).score, 99u);
}

TEST(Growing keeps every key at its place in the bucket and names each move) {
  for (int64_t bucket : {16, 48, 128, 272}) {
    KeyIndex index({.init_capacity = 3 * bucket,
                    .max_capacity = 48 * bucket,
                    .bucket_capacity = bucket,
                    .max_load_factor = 1.0});
    Model model;
    std::unordered_map<int64_t, Slot> before;
    for (int64_t key : RandomKeys(2 * bucket, 3)) {
      const Slot slot = index.FindOrInsert(key, 7).slot;
      if (slot == kNoSlot) continue;
      index.AddSize(1);
      index.set_row(slot, RowOf(key));
      model[key] = 7;
      before[key] = slot;
    }
    while (index.CanGrow()) {
      const int64_t old_capacity = index.capacity(), old_slots = index.slots();
      std::vector<std::atomic<Slot>> moves(static_cast<size_t>(old_slots));
      for (auto& move : moves) move = kNoSlot;
      index.Grow([&](Slot from, Slot to) { moves[static_cast<size_t>(from)] = to; });
      CHECK_EQ(index.capacity(), 2 * old_capacity);
      int64_t moved = 0;
      for (auto& [key, slot] : before) {
        const Slot to = moves[static_cast<size_t>(slot)];
        if (to != kNoSlot) {
          CHECK_EQ(static_cast<int64_t>(to), slot + old_slots);
          slot = to;
          ++moved;
        }
        CHECK_EQ(index.Find(key), slot);
      }
      CHECK_EQ(moved, static_cast<int64_t>(std::count_if(moves.begin(), moves.end(),
                                                         [](auto& m) { return m != kNoSlot; })));
      CheckHolds(index, model);
    }
    CHECK_EQ(index.capacity(), index.max_capacity());
  }
}

TEST(A cleared index is empty at the same capacity and takes keys again) {
  for (int64_t bucket : {16, 128, 144}) {
    KeyIndex index({.init_capacity = 1, .max_capacity = 8 * bucket, .bucket_capacity = bucket});
    for (int round = 0; round < 2; ++round) {
      Model model;
      for (int64_t key : RandomKeys(3 * bucket, static_cast<uint64_t>(round))) {
        if (!model.count(key) && InsertGrowing(index, key, 2) != kNoSlot) model[key] = 2;
      }
      CheckHolds(index, model);
      const int64_t capacity = index.capacity();
      index.Clear();
      CHECK_EQ(index.capacity(), capacity);
      CheckHolds(index, {});
    }
  }
}

TEST(A probe renews scores as it is told) {
  KeyIndex index({.init_capacity = 64, .max_capacity = 64, .bucket_capacity = 16});
  index.FindOrInsert(5, 10).slot;
  const std::vector<int64_t> keys = {5, 6, 5, 5};
  std::vector<Slot> slots(keys.size());
  std::vector<Row> rows(keys.size());
  for (const Kernels* kernels : AvailableKernels()) {
    index.set_score(index.Find(5), 10);
    kernels->find(index.view(), keys.data(), 4, slots.data(), rows.data(), ScoreUpdate::kCount, 1);
    CHECK_EQ(index.entry(index.Find(5)).score, 13u);
    kernels->find(index.view(), keys.data(), 4, slots.data(), rows.data(), ScoreUpdate::kSet, 3);
    CHECK_EQ(index.entry(index.Find(5)).score, 3u);
    CHECK_EQ(slots[1], kNoSlot);
  }
}

TEST(Capacities are near what was asked for) {
  for (int64_t bucket : {16, 48, 128, 1024}) {
    for (int64_t max = bucket; max < 40000; max = max * 5 / 3 + 1) {
      for (int64_t init = 1; init <= max; init = init * 7 / 2 + 1) {
        KeyIndex index({.init_capacity = init, .max_capacity = max, .bucket_capacity = bucket});
        const int64_t whole = (max + bucket - 1) / bucket * bucket;
        CHECK(index.max_capacity() >= max);
        CHECK(index.max_capacity() <= whole + whole / 16);
        CHECK(index.capacity() <= index.max_capacity());
        CHECK_EQ(index.capacity() % bucket, 0);
        // A whole number of doublings lies between the two.
        int64_t capacity = index.capacity();
        while (capacity < index.max_capacity()) capacity *= 2;
        CHECK_EQ(capacity, index.max_capacity());
      }
    }
  }
}

TEST(A capacity that is rounded up still fits slots of 31 bits) {
  for (int64_t bucket : {16, 48, 176, 1008}) {
    for (int64_t below : {0, 12345678}) {
      KeyIndex index({.init_capacity = 4096,
                      .max_capacity = 1'900'000'000 - below,
                      .bucket_capacity = bucket});
      const int64_t doublings = index.max_capacity() / index.capacity();
      CHECK(index.slots() * doublings <= int64_t{INT32_MAX});
    }
  }
}

TEST(Options that cannot work are named with their value) {
  const auto make = [](KeyIndexOptions options) { KeyIndex index(options); };
  CHECK_THROWS(InvalidArgument, "bucket_capacity should be", make({.bucket_capacity = 0}));
  CHECK_THROWS(InvalidArgument, "but is: 24", make({.bucket_capacity = 24}));
  CHECK_THROWS(InvalidArgument, "but is: -128", make({.bucket_capacity = -128}));
  CHECK_THROWS(InvalidArgument, "max_capacity should be at least bucket_capacity (128) but is: 7",
               make({.init_capacity = 1, .max_capacity = 7}));
  CHECK_THROWS(InvalidArgument, "max_capacity should be at most 1900000000",
               make({.max_capacity = 1'900'000'001}));
  CHECK_THROWS(InvalidArgument, "max_capacity", make({.max_capacity = kMax}));
  CHECK_THROWS(InvalidArgument, "init_capacity should be at least 1 but is: 0",
               make({.init_capacity = 0}));
  CHECK_THROWS(InvalidArgument, "init_capacity should be at most max_capacity",
               make({.init_capacity = 1000, .max_capacity = 500}));
  for (double factor : {0.0, -1.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS(InvalidArgument, "max_load_factor", make({.max_load_factor = factor}));
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
