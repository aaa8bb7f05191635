#include "embstore/key_index.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "embstore/parallel.h"
#include "probe.h"

namespace embstore {
namespace {

constexpr int64_t kMaxSlots = INT32_MAX;
constexpr int64_t kMaxCapacity = 1'900'000'000;  // which has so many slots at most
constexpr int kMaxSplits = 24;                   // bits of the hash that are kept for them

void Check(bool ok, const char* field, const char* should, double value) {
  if (ok) return;
  std::string text = std::to_string(value);
  if (value == std::floor(value) && std::abs(value) < 1e15) {
    text = std::to_string(static_cast<int64_t>(value));
  }
  throw InvalidArgument(std::string(field) + " should be " + should + " but is: " + text);
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

KeyIndex::KeyIndex(const KeyIndexOptions& options)
    : bucket_capacity_(options.bucket_capacity), max_load_factor_(options.max_load_factor) {
  Check(bucket_capacity_ >= 16 && bucket_capacity_ <= 16384 && bucket_capacity_ % 16 == 0,
        "bucket_capacity", "a multiple of 16 between 16 and 16384",
        static_cast<double>(bucket_capacity_));
  const std::string at_least =
      "at least bucket_capacity (" + std::to_string(bucket_capacity_) + ")";
  Check(options.max_capacity >= bucket_capacity_, "max_capacity", at_least.c_str(),
        static_cast<double>(options.max_capacity));
  bucket_groups_ = CeilDiv(bucket_capacity_, kGroup);
  Check(options.max_capacity <= kMaxCapacity, "max_capacity", "at most 1900000000",
        static_cast<double>(options.max_capacity));
  Check(options.init_capacity >= 1, "init_capacity", "at least 1",
        static_cast<double>(options.init_capacity));
  Check(options.init_capacity <= options.max_capacity, "init_capacity", "at most max_capacity",
        static_cast<double>(options.init_capacity));
  Check(max_load_factor_ > 0.0 && max_load_factor_ <= 1.0, "max_load_factor",
        "above 0 and at most 1", max_load_factor_);

  const int64_t max_buckets = CeilDiv(options.max_capacity, bucket_capacity_);
  const int64_t init_buckets = CeilDiv(options.init_capacity, bucket_capacity_);
  int doublings = 0;
  while (doublings < kMaxSplits && (max_buckets >> doublings) > init_buckets) ++doublings;
  // Fewer doublings where they would round max_capacity up by more than a sixteenth,
  const auto rounded = [&](int d) { return CeilDiv(max_buckets, int64_t{1} << d) << d; };
  // or beyond what a slot can name.
  while ((rounded(doublings) - max_buckets) * 16 > max_buckets ||
         rounded(doublings) * bucket_groups_ * kGroup > kMaxSlots) {
    --doublings;
  }
  base_buckets_ = CeilDiv(max_buckets, int64_t{1} << doublings);
  capacity_ = base_buckets_ * bucket_capacity_;
  max_capacity_ = capacity_ << doublings;
  digest_lines_ = CeilDiv(bucket_capacity_, kLine);
  const auto digest_bytes = static_cast<size_t>(base_buckets_ * digest_lines_ * kLine);
  const auto group_bytes = static_cast<size_t>(base_buckets_ * bucket_groups_) * sizeof(IndexGroup);
  // Padding touches every page of the digests, so ask first.
  RequireAvailableMemory(digest_bytes + group_bytes,
                         "an index of " + std::to_string(capacity_) + " rows");
  digests_ = HugeBuffer(digest_bytes);
  groups_ = HugeBuffer(group_bytes);
  PadDigests(0, base_buckets_);
}

void KeyIndex::PadDigests(int64_t first_bucket, int64_t last_bucket) {
  const int64_t width = digest_lines_ * kLine;
  if (width == bucket_capacity_) return;
  for (int64_t bucket = first_bucket; bucket < last_bucket; ++bucket) {
    std::memset(digests_.data() + bucket * width + bucket_capacity_, kPadDigest,
                static_cast<size_t>(width - bucket_capacity_));
  }
}

IndexView KeyIndex::view() const {
  IndexView view;
  view.digests = reinterpret_cast<const uint8_t*>(digests_.data());
  // Scores of hits are renewed through the view; who may do so is the caller's affair.
  view.groups = const_cast<IndexGroup*>(groups());
  view.base_buckets = static_cast<uint64_t>(base_buckets_);
  view.split_mask = (uint64_t{1} << splits_) - 1;
  view.bucket_capacity = static_cast<uint32_t>(bucket_capacity_);
  view.digest_lines = static_cast<uint32_t>(digest_lines_);
  view.bucket_groups = static_cast<uint32_t>(bucket_groups_);
  // A key away from home costs a line more when its home group is read first, one at home saves a
  // line.
  view.mostly_home =
      2 * std::atomic_ref(const_cast<int64_t&>(away_)).load(std::memory_order_relaxed) <= size_;
  return view;
}

int64_t KeyIndex::BucketOf(int64_t key) const {
  const IndexView v = view();
  return HomeOf(HashKey(key), v).bucket;
}

int64_t KeyIndex::PositionOf(int64_t key, const Home& home) const {
  const IndexGroup* bucket = groups() + home.bucket * bucket_groups_;
  if (key != 0) {
    const int64_t at = FindInGroup(bucket[home.group], key);
    if (at >= 0) return home.position() + at;
    if (bucket[home.group].away == 0) return -1;
  }
  return VisitMatches(
      digests_of(home.bucket), static_cast<uint32_t>(digest_lines_), home.line(), home.digest,
      [&](int64_t position) { return bucket[position / kGroup].keys[position % kGroup] == key; });
}

Slot KeyIndex::Find(int64_t key) const {
  const Home home = HomeOf(HashKey(key), view());
  const int64_t position = PositionOf(key, home);
  return position < 0 ? kNoSlot
                      : static_cast<Slot>(home.bucket * bucket_groups_ * kGroup + position);
}

void KeyIndex::Prefetch(int64_t key, bool whole) const {
  const Home home = HomeOf(HashKey(key), view());
  const uint8_t* digests = digests_of(home.bucket);
  const IndexGroup* bucket = groups() + home.bucket * bucket_groups_;
  if (!whole) {
    __builtin_prefetch(digests + home.line() * kLine, 1);
    __builtin_prefetch(bucket + home.group, 1);
    return;
  }
  for (int64_t line = 0; line < std::min<int64_t>(digest_lines_, 4); ++line) {
    __builtin_prefetch(digests + line * kLine);
  }
  for (int64_t group = 0; group < std::min<int64_t>(bucket_groups_, 86); ++group) {
    __builtin_prefetch(bucket + group);
  }
}

KeyIndex::Insertion KeyIndex::FindOrInsert(int64_t key, uint64_t score) {
  const Home home = HomeOf(HashKey(key), view());
  const int64_t first = home.bucket * bucket_groups_ * kGroup;
  const int64_t found = PositionOf(key, home);
  if (found >= 0) return {static_cast<Slot>(first + found), false};
  const uint64_t* scores = groups()[home.bucket * bucket_groups_ + home.group].scores;
  const auto* free_at_home = std::find(scores, scores + kGroup, uint64_t{0});
  const int64_t free =
      free_at_home != scores + kGroup
          ? home.position() + (free_at_home - scores)
          : FirstFree(digests_of(home.bucket), static_cast<uint32_t>(digest_lines_), home);
  if (free < 0) return {kNoSlot, false};
  const auto slot = static_cast<Slot>(first + free);
  Put(slot, key, score, kMissingRow);
  return {slot, true};
}

void KeyIndex::Put(Slot slot, int64_t key, uint64_t score, Row row) {
  const Home home = HomeOf(HashKey(key), view());
  IndexGroup& g = group(slot);
  const int64_t at = slot % kGroup;
  g.keys[at] = key;
  g.scores[at] = score;
  g.rows[at] = row;
  digests_of(home.bucket)[slot - home.bucket * bucket_groups_ * kGroup] = home.digest;
  CountAway(slot, home, 1);
}

void KeyIndex::CountAway(Slot slot, const Home& home, int32_t delta) {
  const int64_t home_group = home.bucket * bucket_groups_ + home.group;
  if (slot / kGroup == home_group) return;
  groups()[home_group].away += static_cast<uint32_t>(delta);
  std::atomic_ref<int64_t>(away_).fetch_add(delta, std::memory_order_relaxed);
}

void KeyIndex::Replace(Slot slot, int64_t key, uint64_t score) {
  const Row same = row(slot);
  Erase(slot);
  Put(slot, key, score, same);
}

void KeyIndex::Erase(Slot slot) {
  const Home home = HomeOf(HashKey(key(slot)), view());
  CountAway(slot, home, -1);
  digests_of(home.bucket)[slot - home.bucket * bucket_groups_ * kGroup] = kFreeDigest;
  IndexGroup& g = group(slot);
  const int64_t at = slot % kGroup;
  g.keys[at] = 0;
  g.scores[at] = 0;
}

void KeyIndex::Grow(const std::function<void(Slot from, Slot to)>& moved) {
  const int64_t buckets = this->buckets(), slots = this->slots();
  const int64_t bucket_slots = bucket_groups_ * kGroup;
  // Both buffers first: growing them moves no key, so a failure leaves the index as it was.
  digests_.Grow(static_cast<size_t>(2 * buckets * digest_lines_ * kLine));
  groups_.Grow(static_cast<size_t>(2 * buckets * bucket_groups_) * sizeof(IndexGroup));
  PadDigests(buckets, 2 * buckets);
  const IndexView old = view();
  const uint64_t new_bit = uint64_t{1} << splits_;
  constexpr int64_t kBucketsPerTask = 256;
  ParallelFor(CeilDiv(buckets, kBucketsPerTask), [&](int64_t task) {
    const int64_t begin = task * kBucketsPerTask;
    const int64_t end = std::min(begin + kBucketsPerTask, buckets);
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      const auto first = static_cast<Slot>(bucket * bucket_slots);
      uint8_t* digests = digests_of(bucket);
      uint8_t* new_digests = digests_of(bucket + buckets);
      const auto split = [&](Slot from, const IndexEntry& entry) {
        const uint64_t hash = HashKey(entry.key);
        if (!(hash & new_bit)) return;
        // At the same position, so whether it is at home stays.
        const auto to = static_cast<Slot>(from + slots);
        const int64_t at = from % kGroup;
        group(to).keys[at] = entry.key;
        group(to).scores[at] = entry.score;
        group(to).rows[at] = entry.row;
        group(from).keys[at] = 0;
        group(from).scores[at] = 0;
        new_digests[from - first] = std::exchange(digests[from - first], kFreeDigest);
        const int64_t home = bucket * bucket_groups_ + HomeOf(hash, old).group;
        if (from / kGroup != home) {
          --groups()[home].away;
          ++groups()[home + buckets * bucket_groups_].away;
        }
        moved(from, to);
      };
      VisitUsed(first, static_cast<Slot>(first + bucket_slots), split);
    }
  });
  ++splits_;
  capacity_ *= 2;
}

void KeyIndex::Clear() {
  digests_.Clear();
  groups_.Clear();
  PadDigests(0, buckets());
  size_ = away_ = 0;
}

}  // namespace embstore
