// What the tests of the index share: keys of all kinds, and a map that knows what an index should
// hold.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "embstore/kernels.h"
#include "embstore/key_index.h"
#include "embstore/score_clock.h"

namespace embstore {

inline constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
inline constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
inline constexpr std::array<int64_t, 10> kExtremeKeys = {0,    1,        -1,       2,    -2,
                                                         kMin, kMin + 1, kMax - 1, kMax, -4};

// Different keys, the extreme ones first.
inline std::vector<int64_t> RandomKeys(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> keys(kExtremeKeys.begin(), kExtremeKeys.end());
  std::set<int64_t> seen(keys.begin(), keys.end());
  while (static_cast<int64_t>(keys.size()) < n) {
    const auto key = static_cast<int64_t>(random());
    if (seen.insert(key).second) keys.push_back(key);
  }
  keys.resize(static_cast<size_t>(n));
  return keys;
}

// Keys with consecutive hashes, as somebody who knows the seed could choose them: the inverse of
// KeyedHash.
inline std::vector<int64_t> CraftedKeys(uint64_t seed, uint64_t first_hash, int64_t n) {
  const HashSecret secret = SecretOf(seed);
  const auto inverse = [](uint64_t odd) {
    uint64_t x = odd;  // Newton: each step doubles the number of correct bits
    for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
    return x;
  };
  std::vector<int64_t> keys;
  for (uint64_t hash = first_hash; static_cast<int64_t>(keys.size()) < n; ++hash) {
    uint64_t x = hash;
    x ^= x >> 32;
    x *= inverse(secret.second);
    x ^= x >> 29 ^ x >> 58;
    x *= inverse(secret.first);
    x ^= x >> 32;
    keys.push_back(static_cast<int64_t>(x ^ secret.mask));
    if (KeyedHash(keys.back(), secret) != hash) check::Fail(__FILE__, __LINE__, "no inverse");
  }
  return keys;
}

using Model = std::unordered_map<int64_t, uint64_t>;  // key to score

// A row for each key: the index keeps any number.
inline Row RowOf(int64_t key) { return static_cast<Row>(HashKey(key) >> 33); }

inline void Insert(KeyIndex& index, Model& model, int64_t key, uint64_t score) {
  index.Reserve(index.size() + 1);
  index.InsertNew({key, score, RowOf(key)});
  model[key] = score;
}

// The index holds exactly the model, by every way of asking.
inline void CheckHolds(const KeyIndex& index, const Model& model) {
  index.CheckInvariants();
  CHECK_EQ(index.size(), static_cast<int64_t>(model.size()));
  std::vector<int64_t> keys;
  for (const auto& [key, score] : model) {
    keys.push_back(key);
    const Slot slot = index.Find(key);
    if (slot == kNoSlot) {
      check::Fail(__FILE__, __LINE__, "a key of the model is not found: " + std::to_string(key));
      return;
    }
    CHECK_EQ(index.key(slot), key);
    CHECK_EQ(index.score(slot), score);
    CHECK_EQ(index.row(slot), RowOf(key));
  }
  Model seen;
  index.VisitAll([&](Slot slot, const IndexEntry& entry) {
    CHECK_EQ(index.Find(entry.key), slot);
    CHECK(seen.emplace(entry.key, entry.score).second);
  });
  CHECK(seen == model);
  for (const int64_t room : {int64_t{3}, int64_t{1} << 40}) {
    Model walked;
    KeyIndex::Walk walk;
    while (!walk.ended) {
      int64_t got = 0;
      index.Advance(
          walk, room, [](const IndexEntry&) { return true; },
          [&](const IndexEntry& entry) {
            ++got;
            CHECK(walked.emplace(entry.key, entry.score).second);
          });
      CHECK(got <= room);
    }
    CHECK(walked == model);
    if (model.size() > 3000) break;
  }

  // The batch probe of every instruction set, on keys that are there and on others.
  std::mt19937_64 random(model.size());
  keys.insert(keys.end(), kExtremeKeys.begin(), kExtremeKeys.end());
  while (keys.size() < 2 * model.size() + 13) keys.push_back(static_cast<int64_t>(random()));
  std::vector<Slot> slots(keys.size());
  std::vector<Row> rows(keys.size());
  for (const Kernels* kernels : AvailableKernels()) {
    const auto n = static_cast<int64_t>(keys.size());
    const int64_t missing = kernels->find(index.view(), keys.data(), n, slots.data(), rows.data(),
                                          ScoreUpdate::kKeep, 0, true);
    CHECK_EQ(missing, std::count(rows.begin(), rows.end(), kMissingRow));
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK_EQ(slots[i] == kNoSlot, !model.count(keys[i]));
      CHECK_EQ(slots[i], index.Find(keys[i]));
      CHECK_EQ(rows[i], slots[i] == kNoSlot ? kMissingRow : RowOf(keys[i]));
    }
  }
}

}  // namespace embstore
