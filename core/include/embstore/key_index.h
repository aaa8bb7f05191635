// KeyIndex maps keys to slots, and keeps a score and a row number for each.
//
// A group is a cache line of three slots. A bucket is a run of groups with room for
// `bucket_capacity` keys and an eighth more; a stripe is a run of 1 to 31 buckets. All are ordered
// by the hash, which is keyed by a seed:
//
//     hash(key)   0 ------------------------- read as a fraction -------------------------> 2^64
//     stripes     |        0        |        1        |        2        |        3        |
//     buckets     |  |  |  |  |  |  |  ...
//
// A key is in its home group; if that is full, in another group of its home bucket; if the bucket
// is full, in a second bucket of the same stripe; and otherwise in the overflow area: a list that
// is found through a hash of its own, keyed by a secret of the process. So an insertion never
// fails for want of a place, and nobody can choose keys that are hard to find there. The secret is
// in no result: the list keeps the order in which keys came and went. A group knows which blocks of
// the bucket hold its other keys (IndexGroup::away), so a hit at home and most misses cost one
// line, other hits one or two more. BringHome lets a frequent key change places with a rare one.
//
// The index grows one stripe after the other, from the last to the first: 16 buckets become 18,
// later 21, 24, 28, and at 32 each stripe becomes two. Keys stay in their stripe and only the
// stripe at hand is copied, so every batch pays for its own keys, and the load stays the same.
//
//     before       | 0 | 1 | 2 | 3 |                stripes of 16 buckets
//     half grown   | 0 | 1 |    |  2  |  3  |       2 and 3 have 18; the gap is unused
//     grown        |  0  |  1  |  2  |  3  |
//
// Thread safety: const methods may run together. Insert, Erase and set_* of keys of different
// stripes may run together. Any other method needs exclusive access.
// Does not own rows: it only keeps the numbers that the caller gives.
//
// Invariants
//  1. A key is in its home bucket, in its second bucket or in the overflow area.
//  2. score == 0  <=>  the slot is free, and then its key is 0.
//  3. The layout depends on the number of keys only, never on which keys they are.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "embstore/hash.h"
#include "embstore/index_view.h"
#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

struct KeyIndexOptions {
  int64_t init_capacity = 1 << 14;
  int64_t max_capacity = 1 << 30;
  int64_t bucket_capacity = 128;  // a multiple of 16
  double max_load_factor = 0.9;   // grows beyond it while there are fewer keys than max_capacity
  uint64_t seed = 0;              // of the hash
};

struct IndexEntry {
  int64_t key;
  uint64_t score;
  Row row;
};

class KeyIndex {
 public:
  // The most keys that slots can number.
  static constexpr int64_t kMaxCapacity = 1'600'000'000;

  // Throws InvalidArgument naming the field, or OutOfMemory.
  explicit KeyIndex(const KeyIndexOptions& options);

  int64_t size() const { return size_; }
  int64_t capacity() const;  // keys that fit without growing; at load factor 1
  int64_t max_capacity() const { return max_capacity_; }
  // Bytes of an index that holds max_capacity keys.
  static size_t FullBytes(const KeyIndexOptions& options);
  size_t bytes() const {
    return groups_.size() + overflow_.capacity() * sizeof(OverflowEntry) +
           overflow_links_.capacity() * sizeof(OverflowLink) +
           (overflow_places_.size() + overflow_chains_.size()) * sizeof(uint32_t);
  }
  static bool IsAside(Slot slot) { return slot >= kFirstOverflowSlot; }  // in the overflow area
  int64_t overflow_size() const { return std::ssize(overflow_); }
  // The most places that a search in the overflow area looks at.
  int64_t LongestOverflowSearch() const;

  IndexView view() const;
  const HashSecret& secret() const { return secret_; }
  uint64_t Hash(int64_t key) const { return KeyedHash(key, secret_); }
  // Keys whose hashes differ in so many leading bits are of different stripes.
  int stripe_bits() const {
    return static_cast<int>(not_grown_ ? before_.stripe_bits : grown_.stripe_bits);
  }

  int64_t key(Slot slot) const { return entry(slot).key; }
  uint64_t score(Slot slot) const { return entry(slot).score; }
  Row row(Slot slot) const { return entry(slot).row; }
  IndexEntry entry(Slot slot) const {
    if (slot >= kFirstOverflowSlot) {
      const OverflowEntry& e = overflow_[static_cast<size_t>(slot - kFirstOverflowSlot)];
      return {e.key, e.score, e.row};
    }
    const IndexGroup& g = groups()[slot / IndexGroup::kSlots];
    const int64_t at = slot % IndexGroup::kSlots;
    return {g.keys[at], g.scores[at], g.rows[at]};
  }
  void set_score(Slot slot, uint64_t score) { view().score(slot) = score; }

  // The slot of the key or kNoSlot. A slot is valid until the index changes.
  Slot Find(int64_t key) const { return Find(key, Hash(key)); }
  Slot Find(int64_t key, uint64_t hash) const;

  // Prefetch what Find reads first; what Insert does, and then what it reads if there is no free
  // slot; what VisitRuns does.
  void PrefetchHome(uint64_t hash) const;
  void Prefetch(uint64_t hash) const;
  void PrefetchFree(uint64_t hash) const;
  void PrefetchHomes(uint64_t first, uint64_t last) const;
  // The row of a key that is in its home group. Else prefetches where it may be, and kMissingRow.
  Row PeekRow(int64_t key) const;

  void PrefetchSlot(Slot slot) const {
    if (slot < kFirstOverflowSlot) __builtin_prefetch(groups() + slot / IndexGroup::kSlots, 1);
  }

  // Makes room for this many keys in all. Throws OutOfMemory and leaves the keys as they were.
  void Reserve(int64_t keys);

  // Inserts a key that is not there. Insert returns false when its stripe has no room: then call
  // InsertAside, which needs exclusive access. Neither changes size(): call AddSize. InsertAside
  // may throw std::bad_alloc, or OutOfMemory beyond kMostOverflowEntries, and then changes nothing.
  bool Insert(const IndexEntry& entry, uint64_t hash);
  void InsertAside(const IndexEntry& entry, uint64_t hash);
  // Both, for one thread.
  void InsertNew(const IndexEntry& entry) {
    const uint64_t hash = Hash(entry.key);
    if (!Insert(entry, hash)) InsertAside(entry, hash);
    ++size_;
  }

  void Erase(Slot slot);  // size() stays; other slots of the overflow area may change
  // Among the keys with the home group of this hash, the one with the highest score that is away
  // comes home, to a free slot or in exchange for a key that is not at home there or has a lower
  // score. Slots change. False if there was none.
  bool BringHome(uint64_t hash);
  // Undoes an Erase. REQUIRES: whatever was inserted since has been erased.
  void PutBack(Slot slot, const IndexEntry& entry);
  void AddSize(int64_t delta) { size_ += delta; }

  void Clear();

  // For tests: checks the whole index, and throws std::logic_error that names what does not hold.
  void CheckInvariants() const;

  // Calls visit(slot, entry) for the slots of [begin, end) whose score is wanted(score), ascending.
  // Slots of stripes are below slots(); while the index grows, there is a gap among them.
  int64_t slots() const {
    return static_cast<int64_t>(grown_.buckets) * bucket_groups_ * IndexGroup::kSlots;
  }
  template <typename Wanted, typename Visit>
  void VisitScores(Slot begin, Slot end, const Wanted& wanted, const Visit& visit) const;
  template <typename Visit>
  void VisitUsed(Slot begin, Slot end, const Visit& visit) const {
    VisitScores(begin, end, [](uint64_t score) { return score != 0; }, visit);
  }
  template <typename Visit>
  void VisitOverflow(const Visit& visit) const;
  // The same for keys with a hash from `first` to `last`.
  template <typename Visit>
  void VisitAside(uint64_t first, uint64_t last, const Visit& visit) const;
  // Calls look(groups, n) for runs of groups, none twice, that hold the keys with a hash from
  // `first` to `last`, and others. Returns whether some may be in the overflow area instead.
  template <typename Look>
  bool VisitRuns(uint64_t first, uint64_t last, const Look& look) const;
  // Calls visit(slot, entry) for the keys with a hash from `first` to `last` whose score is
  // wanted(score), wherever they lie. wanted(0) is false.
  template <typename Wanted, typename Visit>
  void VisitHashes(uint64_t first, uint64_t last, const Wanted& wanted, const Visit& visit) const;
  template <typename Visit>
  void VisitAll(const Visit& visit) const {
    const auto [gap_begin, gap_end] = Gap();
    VisitUsed(0, gap_begin, visit);
    VisitUsed(gap_end, static_cast<Slot>(slots()), visit);
    VisitOverflow(visit);
  }

  // A walk over all keys in the order of their hash, in several steps. Whatever the index does in
  // between, a key that stays is visited exactly once.
  struct Walk {
    uint64_t next = 0;  // the first hash that was not visited
    bool ended = false;
  };
  // Calls visit(entry) for the next keys that are wanted(entry): at most `room`, of one stripe.
  template <typename Wanted, typename Visit>
  void Advance(Walk& walk, int64_t room, const Wanted& wanted, const Visit& visit) const;

 private:
  int64_t buckets() const;  // that keys are spread over
  int64_t BucketsFor(int64_t keys) const;
  size_t BytesOf(const IndexLayout& layout) const {
    return static_cast<size_t>(layout.buckets) * bucket_groups_ * sizeof(IndexGroup);
  }
  IndexGroup* groups() const { return reinterpret_cast<IndexGroup*>(groups_.data()); }
  const IndexLayout& LayoutAt(uint64_t hash) const {
    return hash >= grown_from_ ? grown_ : before_;
  }
  // The first and last hash of a stripe, and its slots.
  struct Stripe {
    uint64_t first, last;
    Slot begin, end;
  };
  Stripe StripeAt(uint64_t hash) const;
  std::pair<Slot, Slot> Gap() const;  // slots that are unused while the index grows
  std::pair<int64_t, int64_t> BucketsOf(uint64_t hash) const;  // home and second
  struct Place {
    int64_t bucket;
    uint32_t group;  // in the bucket
  };
  Place HomeAt(uint64_t hash) const;

  uint32_t AnchorIn(int64_t bucket, uint64_t hash) const;
  void Leave(int64_t group, uint32_t anchor);
  bool PutNear(IndexGroup* groups, int64_t bucket, uint32_t group, const IndexEntry& entry) const;
  bool InsertInto(IndexGroup* groups, const IndexLayout& layout, const IndexEntry& entry,
                  uint64_t hash) const;
  void CountElsewhere(IndexGroup* groups, const IndexLayout& layout, uint64_t hash) const;
  void SettleHome(IndexGroup* groups, const IndexLayout& layout, IndexEntry entry,
                  std::vector<IndexEntry>& others) const;
  // What SettleHome left; appends to `homeless` what finds no room in its stripe.
  void SettleOthers(IndexGroup* groups, const IndexLayout& layout,
                    std::span<const IndexEntry> others, std::vector<IndexEntry>& homeless) const;
  void GrowStripes(const IndexLayout& from, const IndexLayout& to, int64_t left, int64_t count);
  void Rebuild(const IndexLayout& layout);
  void ReserveFor(std::span<const std::vector<IndexEntry>> homeless);
  void PutAllAside(std::span<const std::vector<IndexEntry>> homeless, IndexGroup* groups,
                   const IndexLayout& layout);
  void ReserveOverflow(int64_t entries);
  void PutAside(const IndexEntry& entry);
  size_t OverflowHome(int64_t key) const {
    return KeyedHash(key, overflow_secret_) & (overflow_places_.size() - 1);
  }
  size_t OverflowPlace(int64_t key) const;  // of the key, or the free one where it would be
  size_t ChainOf(uint64_t hash) const {     // chains are in the order of hashes
    const int bits = std::countr_zero(overflow_chains_.size());
    return bits ? hash >> (64 - bits) : 0;
  }
  void Chain(size_t number);
  void Rechain(size_t number, uint32_t to, uint32_t back);
  void EraseAside(Slot slot);

  int64_t bucket_capacity_, max_capacity_;
  double max_load_factor_;
  uint32_t bucket_groups_, block_bits_ = 0;
  HashSecret secret_, overflow_secret_ = ProcessSecret();
  // Stripes below `not_grown_` (in units of before_) have the layout before_, the others grown_.
  IndexLayout before_, grown_;
  int64_t not_grown_ = 0;
  uint64_t grown_from_ = 0;  // the hash where they meet
  int64_t size_ = 0;
  mutable HugeBuffer groups_;
  mutable std::vector<OverflowEntry> overflow_;
  std::vector<uint32_t>
      overflow_places_;  // number + 1, 0 is free; a power of two, half full at most
  struct OverflowLink {
    uint32_t before = 0, next = 0;  // number + 1, 0: none
  };
  std::vector<OverflowLink> overflow_links_;  // of each entry
  std::vector<uint32_t> overflow_chains_;     // the first + 1, 0: none; a power of two, or empty
};

template <typename Wanted, typename Visit>
void KeyIndex::VisitScores(Slot begin, Slot end, const Wanted& wanted, const Visit& visit) const {
  const IndexGroup* group = groups() + begin / IndexGroup::kSlots;
  int64_t at = begin % IndexGroup::kSlots;
  for (Slot slot = begin; slot < end; ++slot) {
    if (wanted(group->scores[at])) {
      visit(slot, IndexEntry{group->keys[at], group->scores[at], group->rows[at]});
    }
    if (++at == IndexGroup::kSlots) {
      at = 0;
      ++group;
    }
  }
}

template <typename Visit>
void KeyIndex::VisitOverflow(const Visit& visit) const {
  for (size_t i = 0; i < overflow_.size(); ++i) {
    const OverflowEntry& e = overflow_[i];
    visit(kFirstOverflowSlot + static_cast<Slot>(i), IndexEntry{e.key, e.score, e.row});
  }
}

template <typename Visit>
void KeyIndex::VisitAside(uint64_t first, uint64_t last, const Visit& visit) const {
  if (overflow_.empty()) return;
  for (size_t chain = ChainOf(first); chain <= ChainOf(last); ++chain) {
    for (uint32_t at = overflow_chains_[chain]; at; at = overflow_links_[at - 1].next) {
      const OverflowEntry& e = overflow_[at - 1];
      if (const uint64_t hash = Hash(e.key); hash < first || hash > last) continue;
      visit(kFirstOverflowSlot + static_cast<Slot>(at - 1), IndexEntry{e.key, e.score, e.row});
    }
  }
}

template <typename Look>
bool KeyIndex::VisitRuns(uint64_t first, uint64_t last, const Look& look) const {
  if (first < grown_from_ && last >= grown_from_) {  // two layouts
    const bool aside = VisitRuns(first, grown_from_ - 1, look);
    return VisitRuns(grown_from_, last, look) || aside;
  }
  // The home groups of these hashes, which name the blocks where the rest of their keys are.
  const Place from = HomeAt(first), to = HomeAt(last);
  const int64_t begin = from.bucket * bucket_groups_ + from.group;
  const int64_t end = to.bucket * bucket_groups_ + to.group + 1;
  const auto away_from = [&](int64_t group, int64_t until) {
    uint32_t away = 0;
    for (; group < until; ++group) away |= groups()[group].away;
    return away;
  };
  if (away_from(begin, end) >= IndexGroup::kElsewhere) {  // anywhere in their stripes, or aside
    const int64_t start = StripeAt(first).begin / IndexGroup::kSlots;
    look(groups() + start, StripeAt(last).end / IndexGroup::kSlots - start);
    return true;
  }
  look(groups() + begin, end - begin);
  // Only the first and the last bucket have blocks beyond these groups.
  for (int64_t bucket = from.bucket;; bucket = to.bucket) {
    const int64_t base = bucket * bucket_groups_, after = base + bucket_groups_;
    for (uint32_t blocks = away_from(std::max(begin, base), std::min(end, after)); blocks;
         blocks &= blocks - 1) {
      const int64_t block = base + (int64_t{std::countr_zero(blocks)} << block_bits_);
      const int64_t until = std::min(block + (int64_t{1} << block_bits_), after);
      if (block < begin) look(groups() + block, std::min(until, begin) - block);
      if (until > end) look(groups() + std::max(block, end), until - std::max(block, end));
    }
    if (bucket == to.bucket) break;
  }
  return false;
}

template <typename Wanted, typename Visit>
void KeyIndex::VisitHashes(uint64_t first, uint64_t last, const Wanted& wanted,
                           const Visit& visit) const {
  const auto filter = [&](Slot slot, const IndexEntry& entry) {
    const uint64_t hash = Hash(entry.key);
    if (hash >= first && hash <= last) visit(slot, entry);
  };
  const bool aside = VisitRuns(first, last, [&](const IndexGroup* run, int64_t n) {
    const int64_t group = run - groups();
    VisitScores(static_cast<Slot>(group * IndexGroup::kSlots),
                static_cast<Slot>((group + n) * IndexGroup::kSlots), wanted, filter);
  });
  if (!aside) return;
  VisitAside(first, last, [&](Slot slot, const IndexEntry& entry) {
    if (wanted(entry.score)) visit(slot, entry);
  });
}

template <typename Wanted, typename Visit>
void KeyIndex::Advance(Walk& walk, int64_t room, const Wanted& wanted, const Visit& visit) const {
  struct Met {
    uint64_t hash;
    IndexEntry entry;
  };
  std::vector<Met> met;
  const auto collect = [&](Slot, const IndexEntry& entry) {
    const uint64_t hash = Hash(entry.key);
    if (hash >= walk.next && wanted(entry)) met.push_back({hash, entry});
  };
  if (walk.ended) return;
  const Stripe stripe = StripeAt(walk.next);
  VisitUsed(stripe.begin, stripe.end, collect);
  VisitAside(walk.next, stripe.last, collect);
  const auto by_hash = [](const Met& a, const Met& b) { return a.hash < b.hash; };
  if (std::ssize(met) > room) {
    const auto rest = met.begin() + room;
    std::nth_element(met.begin(), rest, met.end(), by_hash);
    walk.next = rest->hash;
    met.erase(rest, met.end());
  } else {
    walk.next = stripe.last + 1;
    walk.ended = stripe.last == UINT64_MAX;
  }
  for (const Met& m : met) visit(m.entry);
}

}  // namespace embstore
