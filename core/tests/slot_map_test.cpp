#include "embstore/slot_map.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "embstore/hash.h"
#include "embstore/pieces.h"

namespace embstore {
namespace {

// One batch through the map, with eviction; checks that no two keys share a slot.
void RunBatches(int64_t slots, int64_t universe, int64_t batch, int batches) {
  SlotMap map({slots, 5});
  std::mt19937_64 random(static_cast<uint64_t>(slots));
  std::map<int64_t, int64_t> slot_of;
  std::vector<int64_t> keys(static_cast<size_t>(batch)), out(keys.size());
  for (int time = 0; time < batches; ++time) {
    for (int64_t& key : keys) {
      key =
          static_cast<int64_t>(random() % static_cast<uint64_t>(universe) * 0x5851F42D4C957F2DULL);
    }
    const int64_t missing = map.Find(keys, time, out.data());
    if (missing > map.free_slots()) {
      const auto victims = map.Victims(missing - map.free_slots(), time);
      CHECK(static_cast<int64_t>(victims.size()) >= missing - map.free_slots());
      for (const KeySlot& victim : victims) {
        CHECK_EQ(slot_of.at(victim.key), victim.slot);
        slot_of.erase(victim.key);
      }
      map.Drop();
    }
    for (const KeySlot& pair : map.Admit()) {
      CHECK(slot_of.emplace(pair.key, pair.slot).second);
    }
    for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(slot_of.at(keys[i]), out[i]);
    std::set<int64_t> used;
    for (const auto& [key, slot] : slot_of) CHECK(used.insert(slot).second && slot < slots);
    CHECK_EQ(map.size(), static_cast<int64_t>(slot_of.size()));
    map.CheckInvariants();
  }
}

TEST(Keys keep their slots while others come and go) {
  RunBatches(1, 3, 1, 50);
  RunBatches(97, 400, 60, 200);
  RunBatches(1023, 5000, 500, 60);
}

TEST(A large table is searched in several stretches) { RunBatches(600'000, 5'000'000, 100'000, 9); }

TEST(Pinned keys are never victims) {
  SlotMap map({64, 5});
  std::vector<int64_t> keys(64), out(64);
  for (int64_t i = 0; i < 64; ++i) keys[static_cast<size_t>(i)] = i;
  map.Find(keys, 0, out.data());
  map.Admit();
  map.Find({keys.data(), 40}, 1, out.data());
  CHECK_EQ(map.Victims(64, 0).size(), size_t{0});
  for (const KeySlot& victim : map.Victims(64, 1)) CHECK(victim.key >= 40);
  CHECK_EQ(map.Victims(64, 1).size(), size_t{24});
  CHECK_EQ(map.Victims(64, 2).size(), size_t{64});
}

TEST(The memory of a map follows its slots) {
  for (int64_t slots : {100'000, 1'000'000}) {
    const SlotMap map({.slots = slots});
    CHECK(map.bytes() > static_cast<size_t>(22 * slots));
    CHECK(map.bytes() < static_cast<size_t>(60 * slots));
  }
}

// Ranks that make the same calls hold the same map, so the chances are those of one generator.
TEST(A use raises the frequency of a key by chance and the least frequent is the worst) {
  constexpr int64_t kKeys = 97;
  SlotMap map({.slots = kKeys, .min_used_freq_power = 0, .seed = 3});
  std::map<int64_t, std::tuple<uint64_t, int64_t, int64_t>> known;  // frequency, time, slot
  uint64_t chance = 0x9e3779b97f4a7c15ULL;
  std::mt19937_64 random(5);
  for (int64_t time = 0; time < 400; ++time) {
    std::vector<int64_t> keys(50), slots(50);
    for (int64_t& key : keys)
      key = static_cast<int64_t>(std::min(random() % kKeys, random() % kKeys));
    map.Find(keys, time, slots.data());
    map.Admit();
    std::set<int64_t> fresh;
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!known.contains(keys[i])) fresh.insert(keys[i]);
      if (fresh.contains(keys[i])) {
        known[keys[i]] = {0, time, slots[i]};
        continue;
      }
      auto& [frequency, last, slot] = known[keys[i]];
      chance = chance * 6364136223846793005ULL + 1442695040888963407ULL;
      frequency += ((chance >> 33) % (uint64_t{1} << frequency)) == 0;
      last = time;
      CHECK_EQ(slots[i], slot);
    }
    if (time % 20 > 2) continue;
    std::vector<std::pair<std::tuple<uint64_t, int64_t, int64_t>, int64_t>> expected;
    for (const auto& [key, record] : known) expected.emplace_back(record, key);
    std::sort(expected.begin(), expected.end());
    const std::vector<KeySlot> worst = map.Worst(kKeys);
    CHECK_EQ(worst.size(), expected.size());
    for (size_t i = 0; i < worst.size(); ++i) CHECK_EQ(worst[i].key, expected[i].second);
  }
}

TEST(Keys that all fall into one bucket are held) {
  // Of many keys only those whose hash begins alike, as one who knows the seed can choose them.
  // Most of them find no place in their buckets.
  constexpr size_t kKeys = 2000;
  SlotMap map({.slots = kKeys, .min_used_freq_power = 5, .seed = 3});
  std::vector<int64_t> keys;
  for (int64_t key = 0; keys.size() < kKeys; ++key) {
    if (KeyedHash(key, SecretOf(3)) >> 54 == 0) keys.push_back(key);
  }
  std::vector<int64_t> out(keys.size());
  CHECK_EQ(map.Find(keys, 0, out.data()), int64_t{kKeys});
  CHECK_EQ(map.Admit().size(), kKeys);
  std::vector<int64_t> again(keys.size());
  CHECK_EQ(map.Find(keys, 1, again.data()), 0);
  CHECK(out == again);
  // They give way like any other.
  CHECK_EQ(map.Victims(kKeys, 2).size(), kKeys);
  map.Drop();
  CHECK_EQ(map.size(), 0);
  CHECK_EQ(map.free_slots(), int64_t{kKeys});
  CHECK_EQ(map.Find(keys, 2, again.data()), int64_t{kKeys});
}

TEST(Pieces are gathered and scattered) {
  std::vector<float> weight(50 * 3), state(50);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i);
  for (size_t i = 0; i < state.size(); ++i) state[i] = -static_cast<float>(i);
  const Piece pieces[] = {{reinterpret_cast<std::byte*>(weight.data()), 12, 12},
                          {reinterpret_cast<std::byte*>(state.data()), 4, 4}};
  const std::vector<int64_t> slots = {49, 0, 7}, back = {1, 2, 3};
  std::vector<float> rows(3 * 4);
  GatherPieces(pieces, slots, reinterpret_cast<std::byte*>(rows.data()));
  CHECK((rows == std::vector<float>{147, 148, 149, -49, 0, 1, 2, -0.0f, 21, 22, 23, -7}));
  ScatterPieces(pieces, back, reinterpret_cast<const std::byte*>(rows.data()));
  CHECK_EQ(weight[3], 147.0f);
  CHECK_EQ(weight[11], 23.0f);
  CHECK_EQ(state[1], -49.0f);
  CHECK_EQ(state[3], -7.0f);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
