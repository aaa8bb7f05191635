// One queue of victims against a map that ranks all keys of its class.
#include "embstore/victim_queues.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"

namespace embstore {
namespace {

using Entry = VictimQueues::Entry;
using Rank = VictimQueues::Rank;

constexpr int kEntries = VictimQueues::kEntries;
constexpr int64_t kNone = -2;  // no key

std::vector<Rank> SortedRanks(const VictimQueues::Candidates& all) {
  std::vector<Rank> ranks;
  for (int64_t i = 0; i < all.count; ++i) {
    ranks.push_back(VictimQueues::RankOf({all.worths[i], all.keys[i]}));
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

TEST(Candidates make room by dropping the largest and only where there is none) {
  std::mt19937_64 random(1);
  for (const int64_t count : {0, 1, 30, 31, 32, 97, 511, 512}) {
    for (const int64_t beyond : {0, 1, 7}) {
      const int64_t more = kMostCandidates - count + beyond;
      if (beyond > 0 && count <= kEntries) continue;  // more than anybody asks for
      VictimQueues::Candidates all;
      const uint64_t worths = beyond % 2 ? 100'000 : 9;  // with ties and without
      for (int64_t key = 0; key < count; ++key) all.Add({1 + random() % worths, key - 3});
      const std::vector<Rank> before = SortedRanks(all);
      all.MakeRoom(more);
      const std::vector<Rank> after = SortedRanks(all);
      if (beyond == 0) {
        CHECK(after == before);
        CHECK_EQ(all.most, UINT64_MAX);
      } else {
        CHECK_EQ(std::ssize(after), kEntries + 1);
        CHECK(std::equal(after.begin(), after.end(), before.begin()));
        CHECK_EQ(all.most, after.back().worth);
      }
    }
  }
}

TEST(A queue holds the smallest keys of its class and nothing else) {
  for (const int64_t known : {0, 1, 7, 29, 30, 31, 59, 60, 61, 97, 1023}) {
    std::mt19937_64 random(static_cast<uint64_t>(known));
    VictimQueues queues(2);
    CHECK(!queues.IsKnown(3));
    std::map<Rank, Entry> all;
    VictimQueues::Candidates candidates;
    const auto next = [&](int64_t key) {
      const Entry entry{random() % 5 == 0 ? UINT64_MAX : 1 + random() % 9, key};
      all[VictimQueues::RankOf(entry)] = entry;
      return entry;
    };
    for (int64_t key = 0; key < known; ++key) {
      candidates.MakeRoom(1);
      candidates.Add(next(key));
    }
    queues.Fill(3, candidates);
    CHECK_EQ(queues.IsComplete(3), known <= VictimQueues::kEntries);
    for (int64_t key = known; key < known + 200; ++key) {
      if (random() % 3 != 0) {
        const Entry entry = next(key);
        const bool kept = queues.Offer(3, entry);
        CHECK_EQ(kept, VictimQueues::RankOf(entry) <= queues.bound(3));
        CHECK_EQ(queues.Offer(3, entry), kept);  // twice is once
      } else if (const auto count = static_cast<int>(queues.entries(3).size())) {
        const int at = static_cast<int>(random() % static_cast<uint64_t>(count));
        all.erase(VictimQueues::RankOf(queues.entries(3)[static_cast<size_t>(at)]));
        queues.Remove(3, at);
      }
      std::vector<int64_t> expected, found;
      for (const auto& [rank, entry] : all) {
        if (rank <= queues.bound(3)) expected.push_back(entry.key);
      }
      for (const Entry& entry : queues.entries(3)) found.push_back(entry.key);
      std::reverse(found.begin(), found.end());
      CHECK(found == expected);
      CHECK(found.size() <= size_t{VictimQueues::kEntries});
    }
    CHECK(!queues.IsKnown(2));
    queues.Forget();
    CHECK(!queues.IsKnown(3));
  }
}

TEST(A call that has seen keys that it must not evict is offered the smallest of the others) {
  for (const int64_t known : {1, 7, 30, 97}) {
    std::mt19937_64 random(static_cast<uint64_t>(known));
    VictimQueues queues(0);
    std::set<int64_t> held;
    VictimQueues::Candidates candidates;
    for (int64_t key = 0; key < known; ++key) {
      candidates.Add({1 + random() % 3, key});
      if (random() % 2) held.insert(key);
    }
    queues.Fill(0, candidates);
    for (int64_t key = known; key < known + 300; ++key) {
      if (random() % 29 == 0) {
        queues.BeginCall();
        CHECK_EQ(queues.held(0), 0);
        for (const Entry& entry : queues.entries(0)) {
          if (random() % 2) held.erase(entry.key);
        }
      }
      const Entry* next = queues.Next(0);
      for (; next && held.contains(next->key); next = queues.Next(0)) queues.HoldNext(0);
      const auto entries = queues.entries(0);
      auto smallest = static_cast<int64_t>(entries.size()) - 1;
      while (smallest >= 0 && held.contains(entries[static_cast<size_t>(smallest)].key)) --smallest;
      CHECK_EQ(next ? next - entries.data() : -1, smallest);
      CHECK_EQ(queues.held(0), static_cast<int64_t>(entries.size()) - 1 - smallest);
      if (next && random() % 2) queues.Remove(0, static_cast<int>(next - entries.data()));
      const bool is_held = random() % 2;
      if (is_held) held.insert(key);
      queues.Offer(0, {1 + random() % 3, key}, is_held);
    }
  }
}

TEST(A full queue that is complete lets its largest go and says that it is not complete any more) {
  for (const bool smaller : {false, true}) {
    VictimQueues queues(0);
    VictimQueues::Candidates all;
    for (int64_t key = 0; key < kEntries; ++key) all.Add({10 + static_cast<uint64_t>(key), key});
    queues.Fill(0, all);
    CHECK(queues.IsComplete(0));
    CHECK_EQ(queues.Offer(0, {smaller ? uint64_t{9} : uint64_t{99}, 1000}), smaller);
    CHECK_EQ(std::ssize(queues.entries(0)), kEntries);
    const Entry largest = queues.entries(0)[0];
    CHECK_EQ(largest.key, kEntries - (smaller ? 2 : 1));
    CHECK(queues.bound(0) == VictimQueues::RankOf(largest));
  }
}

TEST(A key that looks like the bound of a complete queue is one like any other) {
  VictimQueues queues(0);
  VictimQueues::Candidates none;
  queues.Fill(0, none);
  CHECK(queues.Offer(0, {UINT64_MAX, -1}));
  CHECK_EQ(std::ssize(queues.entries(0)), 1);
  CHECK(queues.Offer(0, {UINT64_MAX, -1}));
  CHECK_EQ(std::ssize(queues.entries(0)), 1);
}

// A class of keys, a queue of it, and an owner that evicts through the queue as Table does.
struct Class {
  VictimQueues queues{1};
  std::map<int64_t, uint64_t> worths;  // of every key
  std::set<int64_t> held;              // by the running call
  std::mt19937_64 random;
  int64_t next = -1;

  explicit Class(uint64_t seed) : random(seed) {}

  uint64_t Below(uint64_t n) { return random() % n; }
  uint64_t Worth() { return Below(5) == 0 ? UINT64_MAX : 1 + Below(6); }
  int64_t AnyKey() {
    return std::next(worths.begin(), static_cast<int64_t>(Below(worths.size())))->first;
  }
  Rank RankOf(int64_t key) { return VictimQueues::RankOf({worths[key], key}); }

  bool HasEntry(const Entry& wanted) {
    const auto entries = queues.entries(1);
    return std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
      return entry.key == wanted.key && entry.worth == wanted.worth;
    });
  }

  void Fill() {
    VictimQueues::Candidates all;
    std::vector<int64_t> keys;
    for (const auto& [key, worth] : worths) keys.push_back(key);
    std::shuffle(keys.begin(), keys.end(), random);
    for (const int64_t key : keys) {
      all.MakeRoom(1);
      if (worths[key] <= all.most) all.Add({worths[key], key});
    }
    queues.Fill(1, all);
    CHECK_EQ(queues.held(1), 0);
    CHECK_EQ(queues.IsComplete(1), std::ssize(worths) <= kEntries);
    CHECK_EQ(std::ssize(queues.entries(1)), std::min<int64_t>(std::ssize(worths), kEntries));
  }

  // A new key, or one whose worth falls.
  void Offer(int64_t key, uint64_t worth) {
    const bool is_held = held.contains(key) || (!worths.contains(key) && Below(2));
    if (is_held) held.insert(key);
    worths[key] = worth;
    const int seen = queues.held(1);
    const bool had = HasEntry({worth, key});
    const bool kept = queues.Offer(1, {worth, key}, is_held);
    CHECK_EQ(kept, HasEntry({worth, key}));
    const auto entries = queues.entries(1);
    const auto below = std::count_if(entries.begin(), entries.end(), [&](const Entry& entry) {
      return VictimQueues::RankOf(entry) < RankOf(key);
    });
    if (had || !kept || below > seen) {
      CHECK_EQ(queues.held(1), seen);
    } else if (below < seen) {
      CHECK_EQ(queues.held(1), is_held ? std::min(seen + 1, kEntries) : below);
    }
  }

  // The victim, or kNone where the owner would search the class, or nothing may go.
  int64_t Evict() {
    for (bool filled = false;; filled = true) {
      while (const Entry* const found = queues.Next(1)) {
        const Entry entry = *found;
        const int at = static_cast<int>(found - queues.entries(1).data());
        const auto key = worths.find(entry.key);
        if (key != worths.end() && key->second == entry.worth) {
          if (held.contains(entry.key)) {
            queues.HoldNext(1);
            continue;
          }
          queues.Remove(1, at);
          worths.erase(key);
          return entry.key;
        }
        queues.Remove(1, at);
        if (key != worths.end()) queues.Offer(1, {key->second, key->first});
      }
      if (queues.IsComplete(1) || filled) return kNone;
      Fill();
    }
  }

  void CheckInvariants() {
    const auto entries = queues.entries(1);
    CHECK(std::ssize(entries) <= kEntries);
    for (size_t i = 0; i < entries.size(); ++i) {
      CHECK(VictimQueues::RankOf(entries[i]) <= queues.bound(1));
      CHECK(i == 0 || VictimQueues::RankOf(entries[i]) < VictimQueues::RankOf(entries[i - 1]));
      if (std::ssize(entries) - static_cast<int64_t>(i) > queues.held(1)) continue;
      const auto key = worths.find(entries[i].key);
      CHECK(key == worths.end() || key->second != entries[i].worth || held.contains(key->first));
    }
    for (const auto& [key, worth] : worths) {
      const bool has_entry = std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
        return entry.key == key && entry.worth <= worth;
      });
      CHECK(has_entry || RankOf(key) > queues.bound(1));
    }
    CHECK(!queues.IsKnown(0));
  }
};

TEST(Whatever happens between two fills the queue gives the smallest key that may go) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Class all(seed);
    for (const uint64_t known = all.Below(80); all.worths.size() < known; ++all.next) {
      all.worths[all.next] = all.Worth();
    }
    all.Fill();
    for (int step = 0; step < 400; ++step) {
      switch (all.Below(8)) {
        case 0:
          if (all.Below(9) == 0) {
            all.queues.BeginCall();
            all.held.clear();
            CHECK_EQ(all.queues.held(1), 0);
          }
          break;
        case 1:
        case 2:
          all.Offer(all.next++, all.Worth());
          break;
        case 3:  // a worth that changes
          if (!all.worths.empty()) {
            const int64_t key = all.AnyKey();
            const uint64_t worth = all.Worth();
            if (worth < all.worths[key]) all.Offer(key, worth);
            if (worth > all.worths[key] && !all.held.contains(key)) all.worths[key] = worth;
          }
          break;
        case 4:  // a key that goes by itself, or comes back
          if (!all.worths.empty() && all.Below(4) == 0) all.worths.erase(all.AnyKey());
          break;
        default: {
          int64_t smallest = kNone;
          for (const auto& [key, worth] : all.worths) {
            if (all.held.contains(key)) continue;
            if (smallest == kNone || all.RankOf(key) < all.RankOf(smallest)) smallest = key;
          }
          const int64_t victim = all.Evict();
          CHECK(victim == smallest || (victim == kNone && !all.queues.IsComplete(1)));
          if (victim == kNone) {
            all.queues.BeginCall();
            all.held.clear();
          }
        }
      }
      all.CheckInvariants();
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
