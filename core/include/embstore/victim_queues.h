// VictimQueues: the next victims of each class of keys, so that not every eviction searches them.
//
// A class is one of 2^k equal ranges of hashes. Its keys are ranked by their worth (the score, as a
// rule) and then by HashKey; the smallest is evicted first. A queue caches the smallest keys of its
// class and never changes the answer:
//
//     ranks of a class      3   5   8  11  12  19  20  ...
//     its queue, K = 4      3   5   8  11                      bound = 11
//
// Between two fills a worth may rise at any time, and the queue is not told: the owner compares the
// worth of the smallest with the present one and renews it. A worth that falls, and a new key, must
// be offered.
//
// A call of the owner must not evict some keys, which stay in the queue for later ones. Once it has
// seen that the smallest entries are such keys, held() keeps it from looking at them again.
//
// Thread safety: const methods may run together; others too, for different classes.
//
// Invariants, of a class that is known
//  1. entries are in descending order, none ranks above `bound`.
//  2. A key of the class that has no entry ranks above `bound`, or is left out. The worth of an
//     entry is at most that of its key. Entries of keys that are gone may remain.
//  3. The running call must not evict the keys of the last held() entries.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>

#include "embstore/hash.h"
#include "embstore/kernels.h"
#include "embstore/memory.h"

namespace embstore {

class VictimQueues {
 public:
  static constexpr int kEntries = 30;
  struct Entry {
    uint64_t worth;
    int64_t key;
  };
  struct Rank {
    uint64_t worth, tie;
    auto operator<=>(const Rank&) const = default;
  };
  static Rank RankOf(const Entry& entry) { return {entry.worth, HashKey(entry.key)}; }

  // Keys that a queue may be made of, in any order.
  struct Candidates {
    static constexpr int64_t kPlaces = kMostCandidates + 8;  // kernels write beyond the last
    uint64_t worths[kPlaces];
    int64_t keys[kPlaces];
    int64_t count = 0;
    uint64_t most = UINT64_MAX;  // keys that are worth more are not wanted any more

    // Makes room for so many more: drops keys that no queue would have.
    void MakeRoom(int64_t more);
    void Add(const Entry& entry) {
      worths[count] = entry.worth;
      keys[count++] = entry.key;
    }
  };

  explicit VictimQueues(int class_bits)
      : class_bits_(class_bits), buffer_(sizeof(Queue) << class_bits) {}

  static int64_t BytesFor(int class_bits) {
    return static_cast<int64_t>(sizeof(Queue)) << class_bits;
  }
  int64_t bytes() const { return BytesFor(class_bits_); }

  bool IsKnown(size_t in_class) const { return queue(in_class).knowledge == knowledge_; }
  // Forgets what it knows of all classes.
  void Forget() { ++knowledge_; }
  // A new call, which has seen no entries yet.
  void BeginCall() { ++call_; }

  // Makes the queue of the smallest of these, which are all wanted keys of the class but those that
  // the owner leaves out; reorders them.
  void Fill(size_t in_class, Candidates& all, bool none_left_out = true);

  // REQUIRES of the rest: IsKnown(in_class).
  // The entries, the largest first.
  std::span<const Entry> entries(size_t in_class) const {
    return {queue(in_class).entries, static_cast<size_t>(queue(in_class).count)};
  }
  const Rank& bound(size_t in_class) const { return queue(in_class).bound; }
  // Every key of the class has an entry.
  bool IsComplete(size_t in_class) const { return bound(in_class) == kNoBound; }
  void Remove(size_t in_class, int at);
  // A key that is new, or whose worth has changed. held: the call must not evict it. Returns
  // whether there is an entry for it now.
  bool Offer(size_t in_class, const Entry& entry, bool held = false);
  // How many of the last entries the call has seen and must not evict.
  int held(size_t in_class) const {
    const Queue& own = queue(in_class);
    return own.call == call_ ? own.held : 0;
  }
  // The last entry before these is such a one too.
  void HoldNext(size_t in_class) { SetHeld(in_class, held(in_class) + 1); }

  // The next victim is not known without a fill.
  bool IsSpent(size_t in_class) const {
    return !IsKnown(in_class) || (queue(in_class).count == 0 && !IsComplete(in_class));
  }

  // In two steps: the head of the queue, and then what it names; all of it if it has to be filled.
  void PrefetchHead(size_t in_class) const { __builtin_prefetch(&queue(in_class), 1); }
  void Prefetch(size_t in_class) const {
    if (const Entry* const next = Next(in_class)) {
      __builtin_prefetch(next, 1);
      return;
    }
    const auto* const line = reinterpret_cast<const std::byte*>(&queue(in_class));
    for (size_t at = 64; at < sizeof(Queue); at += 64) __builtin_prefetch(line + at, 1);
  }
  // The key that goes next unless its worth has risen, or null.
  const Entry* Next(size_t in_class) const {
    if (!IsKnown(in_class)) return nullptr;
    const int left = queue(in_class).count - held(in_class);
    return left > 0 ? &queue(in_class).entries[left - 1] : nullptr;
  }

 private:
  static constexpr Rank kNoBound{UINT64_MAX, UINT64_MAX};
  // What most uses read is on the first line, so that a class costs one wait for memory less.
  struct alignas(64) Queue {
    uint64_t knowledge;  // the queue is known if it is that of now
    uint32_t call;       // that has seen the held entries
    int16_t held, count;
    Rank bound;
    Entry entries[kEntries];
  };
  static_assert(sizeof(Queue) == 512);
  void SetHeld(size_t in_class, int entries) {
    queue(in_class).call = call_;
    queue(in_class).held = static_cast<int16_t>(entries);
  }
  Queue& queue(size_t in_class) { return reinterpret_cast<Queue*>(buffer_.data())[in_class]; }
  const Queue& queue(size_t in_class) const {
    return reinterpret_cast<const Queue*>(buffer_.data())[in_class];
  }

  int class_bits_;
  uint64_t knowledge_ = 1;
  uint32_t call_ = 1;
  HugeBuffer buffer_;
};

}  // namespace embstore
