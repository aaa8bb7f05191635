#include "embstore/key_index.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <string>
#include <utility>

#include "invariant.h"
#include "probe.h"

namespace embstore {
namespace {

constexpr uint32_t kWidths[] = {16, 18, 21, 24, 28};  // of stripes, in buckets; then 2 x 16
constexpr uint32_t kStripe = kWidths[0];
constexpr int kInsertGroups = 4;  // as a rule, one of them has a free slot
// At a higher load the last stripes to grow would overflow.
constexpr double kMostLoad = 0.9;

void Check(bool ok, const char* field, const std::string& should, double value) {
  if (ok) return;
  std::string text = std::to_string(value);
  if (value == std::floor(value) && std::abs(value) < 1e15) {
    text = std::to_string(static_cast<int64_t>(value));
  }
  throw InvalidArgument(std::string(field) + " should be " + should + " but is: " + text);
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

IndexLayout MakeLayout(uint32_t width, uint32_t bits) {
  return {static_cast<uint64_t>(width) << bits, width, bits};
}

// The smallest layout of at least this many buckets. A few buckets make one stripe.
IndexLayout LayoutFor(int64_t buckets) {
  if (buckets <= kStripe)
    return MakeLayout(static_cast<uint32_t>(std::max<int64_t>(buckets, 1)), 0);
  for (uint32_t bits = 0;; ++bits) {
    for (const uint32_t width : kWidths) {
      if (int64_t{width} << bits >= buckets) return MakeLayout(width, bits);
    }
  }
}

int64_t GroupsOfBucket(int64_t bucket_capacity) {
  return CeilDiv(bucket_capacity + bucket_capacity / 8, kGroup);
}

// While some stripes have grown and others have not, their loads differ. So an index of many
// stripes keeps some room even at max_capacity.
int64_t BucketsFor(int64_t keys, int64_t max_capacity, int64_t bucket_capacity,
                   double max_load_factor) {
  const auto at_load = [&](int64_t n, double load) {
    return static_cast<int64_t>(
        std::ceil(static_cast<double>(n) / (load * static_cast<double>(bucket_capacity))));
  };
  const int64_t most = CeilDiv(max_capacity, bucket_capacity);
  const int64_t limit = most <= kStripe ? most : at_load(max_capacity, kMostLoad);
  const double load = most <= kStripe ? max_load_factor : std::min(max_load_factor, kMostLoad);
  const int64_t wanted = at_load(keys, load);
  return keys <= max_capacity ? std::min(wanted, limit) : std::max(at_load(keys, kMostLoad), limit);
}

IndexLayout After(const IndexLayout& layout) {
  return LayoutFor(static_cast<int64_t>(layout.buckets) + 1);
}

}  // namespace

KeyIndex::KeyIndex(const KeyIndexOptions& options)
    : bucket_capacity_(options.bucket_capacity),
      max_capacity_(options.max_capacity),
      max_load_factor_(options.max_load_factor),
      secret_(SecretOf(options.seed)) {
  Check(bucket_capacity_ >= 16 && bucket_capacity_ <= 16384 && bucket_capacity_ % 16 == 0,
        "bucket_capacity", "a multiple of 16 between 16 and 16384",
        static_cast<double>(bucket_capacity_));
  Check(max_capacity_ >= 1, "max_capacity", "at least 1", static_cast<double>(max_capacity_));
  Check(max_capacity_ <= kMaxCapacity, "max_capacity", "at most " + std::to_string(kMaxCapacity),
        static_cast<double>(max_capacity_));
  Check(options.init_capacity >= 1, "init_capacity", "at least 1",
        static_cast<double>(options.init_capacity));
  Check(options.init_capacity <= max_capacity_, "init_capacity", "at most max_capacity",
        static_cast<double>(options.init_capacity));
  Check(max_load_factor_ > 0.0 && max_load_factor_ <= 1.0, "max_load_factor",
        "above 0 and at most 1", max_load_factor_);
  bucket_groups_ = static_cast<uint32_t>(GroupsOfBucket(bucket_capacity_));
  while (bucket_groups_ > IndexGroup::kBlocks << block_bits_) ++block_bits_;
  grown_ = LayoutFor(options.init_capacity < max_capacity_
                         ? CeilDiv(options.init_capacity, bucket_capacity_)
                         : BucketsFor(max_capacity_));
  RequireAvailableMemory(BytesOf(grown_),
                         "an index of " + std::to_string(options.init_capacity) + " rows");
  groups_ = HugeBuffer(BytesOf(grown_));
}

int64_t KeyIndex::BucketsFor(int64_t keys) const {
  return embstore::BucketsFor(keys, max_capacity_, bucket_capacity_, max_load_factor_);
}

size_t KeyIndex::FullBytes(const KeyIndexOptions& options) {
  const IndexLayout layout =
      LayoutFor(embstore::BucketsFor(options.max_capacity, options.max_capacity,
                                     options.bucket_capacity, options.max_load_factor));
  return HugeBuffer::SizeFor(static_cast<size_t>(layout.buckets) *
                             static_cast<size_t>(GroupsOfBucket(options.bucket_capacity)) *
                             sizeof(IndexGroup));
}

int64_t KeyIndex::buckets() const {
  const auto grown_stripe = static_cast<int64_t>(grown_.buckets >> before_.stripe_bits);
  return static_cast<int64_t>(grown_.buckets) -
         not_grown_ * (grown_stripe - int64_t{before_.stripe_buckets});
}

int64_t KeyIndex::capacity() const {
  const int64_t keys = buckets() * bucket_capacity_;
  return keys <= max_capacity_ ? keys : std::max(max_capacity_, size_);
}

IndexView KeyIndex::view() const {
  IndexView view;
  // Scores of hits are renewed through the view; the caller decides who may do so.
  view.groups = groups();
  view.secret = secret_;
  view.grown_from = grown_from_;
  view.before = before_;
  view.grown = grown_;
  view.bucket_groups = bucket_groups_;
  view.block_bits = block_bits_;
  view.overflow = overflow_.data();
  view.overflow_places = overflow_.empty() ? nullptr : overflow_places_.data();
  view.overflow_mask = overflow_places_.size() - 1;
  view.overflow_secret = overflow_secret_;
  return view;
}

std::pair<Slot, Slot> KeyIndex::Gap() const {
  const int64_t bucket = bucket_groups_ * IndexGroup::kSlots;
  const auto grown_stripe = static_cast<int64_t>(grown_.buckets >> before_.stripe_bits);
  return {static_cast<Slot>(not_grown_ * before_.stripe_buckets * bucket),
          static_cast<Slot>(not_grown_ * grown_stripe * bucket)};
}

void KeyIndex::CheckInvariants() const {
  int64_t used = 0, aside = 0;
  VisitAll([&](Slot slot, const IndexEntry& entry) {
    ++used;
    aside += slot >= kFirstOverflowSlot;
    if (slot < kFirstOverflowSlot) {
      const auto [home, second] = BucketsOf(Hash(entry.key));
      const int64_t bucket = slot / kGroup / bucket_groups_;
      RequireInvariant(bucket == home || bucket == second,
                       "a key lies in its home or second bucket");
    }
    RequireInvariant(Find(entry.key) == slot, "a key is found where it lies");
  });
  RequireInvariant(used == size_, "size() counts the keys");
  const auto free = std::count(overflow_places_.begin(), overflow_places_.end(), 0u);
  RequireInvariant(aside + free == std::ssize(overflow_places_), "each key aside has one place");
  RequireInvariant(aside <= free, "half of the overflow area is free");
  int64_t chained = 0;
  VisitAside(0, UINT64_MAX, [&](Slot, const IndexEntry&) { ++chained; });
  RequireInvariant(aside == chained, "each key aside is in the chain of its hash");
  const auto is_free = [](uint64_t score) { return score == 0; };
  const auto check = [](Slot, const IndexEntry& entry) {
    RequireInvariant(entry.key == 0, "the key of a free slot is 0");
  };
  const auto [gap_begin, gap_end] = Gap();
  VisitScores(0, gap_begin, is_free, check);
  VisitScores(gap_end, static_cast<Slot>(slots()), is_free, check);
}

KeyIndex::Stripe KeyIndex::StripeAt(uint64_t hash) const {
  const IndexLayout& layout = LayoutAt(hash);
  const uint64_t stripe = embstore::StripeOf(hash, layout);
  const int64_t slots = int64_t{layout.stripe_buckets} * bucket_groups_ * kGroup;
  const uint64_t width = layout.stripe_bits ? uint64_t{1} << (64 - layout.stripe_bits) : 0;
  return {stripe * width, (stripe + 1) * width - 1,
          static_cast<Slot>(static_cast<int64_t>(stripe) * slots),
          static_cast<Slot>((static_cast<int64_t>(stripe) + 1) * slots)};
}

std::pair<int64_t, int64_t> KeyIndex::BucketsOf(uint64_t hash) const {
  const IndexLayout& layout = LayoutAt(hash);
  const int64_t home = AnchorOf(hash, layout.buckets, bucket_groups_).bucket;
  if (layout.stripe_buckets == 1) return {home, home};
  return {home, SecondOf(hash, layout, bucket_groups_).bucket};
}

Slot KeyIndex::Find(int64_t key, uint64_t hash) const {
  const IndexView v = view();
  const Anchor home = HomeOf(hash, v);
  const int64_t group = home.bucket * bucket_groups_ + home.group;
  const int64_t at = FindInGroup(v.groups[group], key);
  if (at >= 0) return static_cast<Slot>(group * kGroup + at);
  const uint32_t away = v.groups[group].away;
  if (away == 0) return kNoSlot;
  const Slot slot = FindInBlocks(v, home, away, key);
  if (slot != kNoSlot || away < IndexGroup::kElsewhere) return slot;
  return FindElsewhere(v, hash, key);
}

KeyIndex::Place KeyIndex::HomeAt(uint64_t hash) const {
  const Anchor home = AnchorOf(hash, LayoutAt(hash).buckets, bucket_groups_);
  return {home.bucket, home.group};
}

void KeyIndex::PrefetchHome(uint64_t hash) const {
  const Place home = HomeAt(hash);
  __builtin_prefetch(groups() + home.bucket * bucket_groups_ + home.group, 1);
}

// If the home group is full, the search for a free slot starts at its block.
void KeyIndex::Prefetch(uint64_t hash) const {
  const Place home = HomeAt(hash);
  const IndexGroup* const first = groups() + home.bucket * bucket_groups_;
  uint32_t to = home.group >> block_bits_ << block_bits_;
  for (int step = 0; step < kInsertGroups; ++step) {
    __builtin_prefetch(first + to, 1);
    if (++to == bucket_groups_) to = 0;
  }
}

void KeyIndex::PrefetchFree(uint64_t hash) const {
  const Place home = HomeAt(hash);
  const IndexGroup* const first = groups() + home.bucket * bucket_groups_;
  const auto is_full = [](const IndexGroup& g) {
    return (g.scores[0] != 0) & (g.scores[1] != 0) & (g.scores[2] != 0);
  };
  uint32_t to = home.group >> block_bits_ << block_bits_;
  bool all_full = is_full(first[home.group]);
  for (int step = 0; step < kInsertGroups; ++step) {
    all_full &= is_full(first[to]);
    if (++to == bucket_groups_) to = 0;
  }
  if (!all_full) return;
  for (int step = 0; step < 2 * kInsertGroups; ++step) {
    __builtin_prefetch(first + to, 1);
    if (++to == bucket_groups_) to = 0;
  }
}

void KeyIndex::PrefetchHomes(uint64_t first, uint64_t last) const {
  const Place from = HomeAt(first), to = HomeAt(last);
  const IndexGroup* const begin = groups() + from.bucket * bucket_groups_ + from.group;
  const IndexGroup* const end = groups() + to.bucket * bucket_groups_ + to.group;
  constexpr std::ptrdiff_t kMost = 96;  // more would push each other out of the L1 cache
  for (const IndexGroup* group = begin; group <= std::min(end, begin + kMost); ++group) {
    __builtin_prefetch(group);
  }
}

Row KeyIndex::PeekRow(int64_t key) const {
  const Place home = HomeAt(Hash(key));
  const IndexGroup* const bucket = groups() + home.bucket * bucket_groups_;
  const IndexGroup& group = bucket[home.group];
  const int64_t at = FindInGroup(group, key);
  if (at >= 0) return group.rows[at];
  for (uint32_t blocks = group.away % IndexGroup::kElsewhere; blocks; blocks &= blocks - 1) {
    __builtin_prefetch(bucket + (std::countr_zero(blocks) << block_bits_));
  }
  return kMissingRow;
}

// Takes the free slot of the bucket that is nearest to the group. False when there is none.
bool KeyIndex::PutNear(IndexGroup* groups, int64_t bucket, uint32_t group,
                       const IndexEntry& entry) const {
  IndexGroup* const first = groups + bucket * bucket_groups_;
  const auto put = [&](IndexGroup& g) {
    // Without branches, which the processor could not predict here.
    const unsigned free = static_cast<unsigned>(g.scores[0] == 0) |
                          static_cast<unsigned>(g.scores[1] == 0) << 1 |
                          static_cast<unsigned>(g.scores[2] == 0) << 2;
    if (!free) return false;
    const int at = std::countr_zero(free);
    g.keys[at] = entry.key;
    g.scores[at] = entry.score;
    g.rows[at] = entry.row;
    return true;
  };
  if (put(first[group])) return true;
  // From its block on, around the bucket.
  const uint32_t begin = group >> block_bits_ << block_bits_;
  uint32_t to = begin;
  do {
    if (put(first[to])) {
      first[group].away |= 1u << (to >> block_bits_);
      return true;
    }
    if (++to == bucket_groups_) to = 0;
  } while (to != begin);
  return false;
}

void KeyIndex::CountElsewhere(IndexGroup* groups, const IndexLayout& layout, uint64_t hash) const {
  const Anchor home = AnchorOf(hash, layout.buckets, bucket_groups_);
  uint32_t& away = groups[home.bucket * bucket_groups_ + home.group].away;
  if (away < ~(IndexGroup::kElsewhere - 1)) away += IndexGroup::kElsewhere;
}

bool KeyIndex::InsertInto(IndexGroup* groups, const IndexLayout& layout, const IndexEntry& entry,
                          uint64_t hash) const {
  const Anchor home = AnchorOf(hash, layout.buckets, bucket_groups_);
  if (PutNear(groups, home.bucket, home.group, entry)) return true;
  if (layout.stripe_buckets == 1) return false;
  const Anchor second = SecondOf(hash, layout, bucket_groups_);
  if (!PutNear(groups, second.bucket, second.group, entry)) return false;
  CountElsewhere(groups, layout, hash);
  return true;
}

bool KeyIndex::Insert(const IndexEntry& entry, uint64_t hash) {
  assert(entry.score != 0 && hash == Hash(entry.key));
  return InsertInto(groups(), LayoutAt(hash), entry, hash);
}

void KeyIndex::Erase(Slot slot) {
  assert(score(slot) != 0);
  const int64_t key = this->key(slot);
  const uint64_t hash = Hash(key);
  const IndexView v = view();
  const Anchor home = HomeOf(hash, v);
  uint32_t& away = v.groups[home.bucket * bucket_groups_ + home.group].away;
  const auto leave_elsewhere = [&] {
    if (away < ~(IndexGroup::kElsewhere - 1)) away -= IndexGroup::kElsewhere;
  };
  if (slot >= kFirstOverflowSlot) {
    leave_elsewhere();
    EraseAside(slot);
    return;
  }
  const int64_t group = slot / kGroup, bucket = group / bucket_groups_;
  if (home.bucket != bucket) leave_elsewhere();
  v.groups[group].keys[slot % kGroup] = 0;
  v.groups[group].scores[slot % kGroup] = 0;
  Leave(group, AnchorIn(bucket, hash));
}

// The group of the bucket where the search for one of its keys starts.
uint32_t KeyIndex::AnchorIn(int64_t bucket, uint64_t hash) const {
  const IndexLayout& layout = LayoutAt(hash);
  const Anchor home = AnchorOf(hash, layout.buckets, bucket_groups_);
  return home.bucket == bucket ? home.group : SecondOf(hash, layout, bucket_groups_).group;
}

// A key has left the group. Its anchor keeps naming the block if another of its keys is there.
void KeyIndex::Leave(int64_t group, uint32_t anchor) {
  const int64_t bucket = group / bucket_groups_;
  IndexGroup* const first = groups() + bucket * bucket_groups_;
  const auto in_bucket = static_cast<uint32_t>(group - bucket * bucket_groups_);
  if (in_bucket == anchor) return;
  const uint32_t block = in_bucket >> block_bits_;
  const uint32_t end = std::min((block + 1) << block_bits_, bucket_groups_);
  for (uint32_t g = block << block_bits_; g < end; ++g) {
    if (g == anchor) continue;
    for (int64_t at = 0; at < kGroup; ++at) {
      if (first[g].scores[at] && AnchorIn(bucket, Hash(first[g].keys[at])) == anchor) return;
    }
  }
  first[anchor].away &= ~(1u << block);
}

bool KeyIndex::BringHome(uint64_t hash) {
  const Place place = HomeAt(hash);
  IndexGroup* const first = groups() + place.bucket * bucket_groups_;
  IndexGroup& home = first[place.group];
  const auto is_native = [&](int64_t key) {
    const Place its = HomeAt(Hash(key));
    return its.bucket == place.bucket && its.group == place.group;
  };
  // The one that is away with the highest score.
  uint32_t from = 0;
  int64_t slot = -1;
  uint64_t highest = 0;
  for (uint32_t blocks = home.away % IndexGroup::kElsewhere; blocks; blocks &= blocks - 1) {
    uint32_t g = static_cast<uint32_t>(std::countr_zero(blocks)) << block_bits_;
    const uint32_t end = std::min(g + (1u << block_bits_), bucket_groups_);
    for (; g < end; ++g) {
      if (g == place.group) continue;
      for (int64_t at = 0; at < kGroup; ++at) {
        if (first[g].scores[at] <= highest || !is_native(first[g].keys[at])) continue;
        from = g;
        slot = at;
        highest = first[g].scores[at];
      }
    }
  }
  // The one that makes room: none, one that is not at home either, or the one with the lowest
  // score.
  int64_t to = -1;
  for (int64_t at = 0; at < kGroup; ++at) {
    const uint64_t score = home.scores[at] && is_native(home.keys[at]) ? home.scores[at] : 0;
    if (score >= highest) continue;
    to = at;
    highest = score;
  }
  if (slot < 0 || to < 0) return false;
  std::swap(home.keys[to], first[from].keys[slot]);
  std::swap(home.scores[to], first[from].scores[slot]);
  std::swap(home.rows[to], first[from].rows[slot]);
  const int64_t bucket = place.bucket * bucket_groups_;
  if (first[from].scores[slot]) {
    const uint32_t anchor = AnchorIn(place.bucket, Hash(first[from].keys[slot]));
    if (anchor != from) first[anchor].away |= 1u << (from >> block_bits_);
    Leave(bucket + place.group, anchor);
  }
  Leave(bucket + from, place.group);
  return true;
}

void KeyIndex::PutBack(Slot slot, const IndexEntry& entry) {
  const uint64_t hash = Hash(entry.key);
  const IndexLayout& layout = LayoutAt(hash);
  if (slot >= kFirstOverflowSlot) {
    PutAside(entry);
    CountElsewhere(groups(), layout, hash);
    return;
  }
  const int64_t group = slot / kGroup, bucket = group / bucket_groups_;
  Anchor anchor = AnchorOf(hash, layout.buckets, bucket_groups_);
  if (anchor.bucket != bucket) {
    anchor = SecondOf(hash, layout, bucket_groups_);
    CountElsewhere(groups(), layout, hash);
  }
  IndexGroup& g = groups()[group];
  g.keys[slot % kGroup] = entry.key;
  g.scores[slot % kGroup] = entry.score;
  g.rows[slot % kGroup] = entry.row;
  const auto in_bucket = static_cast<uint32_t>(group - bucket * bucket_groups_);
  if (in_bucket == anchor.group) return;
  groups()[bucket * bucket_groups_ + anchor.group].away |= 1u << (in_bucket >> block_bits_);
}

void KeyIndex::Reserve(int64_t keys) {
  const int64_t wanted = BucketsFor(keys);
  if (wanted <= buckets()) return;
  if (keys > kMaxCapacity) {
    throw OutOfMemory("an index holds at most " + std::to_string(kMaxCapacity) + " keys");
  }
  if (wanted > 2 * buckets() || size_ == 0) {
    Rebuild(LayoutFor(wanted));
    return;
  }
  while (buckets() < wanted) {
    const bool growing = not_grown_ > 0;
    const IndexLayout from = growing ? before_ : grown_, to = growing ? grown_ : After(grown_);
    const int64_t left = growing ? not_grown_ : int64_t{1} << from.stripe_bits;
    const auto gain =
        static_cast<int64_t>(to.buckets >> from.stripe_bits) - int64_t{from.stripe_buckets};
    if (!growing) {
      RequireAvailableMemory(BytesOf(to) - BytesOf(from),
                             "growing an index of " + std::to_string(size_) + " keys");
      groups_.Grow(BytesOf(to));
    }
    // Stripes that move beyond all old ones need no copy; of others, these fit the L2 cache.
    constexpr int64_t kCopied = 16;
    const int64_t apart = left * gain / (gain + int64_t{from.stripe_buckets});
    const int64_t at_once = std::max(apart, std::min(left, kCopied));
    GrowStripes(from, to, left, std::min(at_once, CeilDiv(wanted - buckets(), gain)));
  }
}

void KeyIndex::Clear() {
  groups_.Clear();
  overflow_ = {};
  overflow_places_ = {};
  overflow_links_ = {};
  overflow_chains_ = {};
  size_ = 0;
}

}  // namespace embstore
