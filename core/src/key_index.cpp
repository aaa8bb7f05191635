#include "embstore/key_index.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "embstore/parallel.h"
#include "probe.h"

namespace embstore {
namespace {

constexpr int64_t kMaxSlots = int64_t{1} << 31;
constexpr int kMaxSplits = 24;  // bits of the hash that are kept for them

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
  Check(options.max_capacity <= kMaxSlots - 16384, "max_capacity", "below 2^31 - 16384",
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
         rounded(doublings) * bucket_capacity_ > kMaxSlots) {
    --doublings;
  }
  base_buckets_ = CeilDiv(max_buckets, int64_t{1} << doublings);
  capacity_ = base_buckets_ * bucket_capacity_;
  max_capacity_ = capacity_ << doublings;
  lines_per_bucket_ = CeilDiv(bucket_capacity_, kLine);
  const auto digest_bytes = static_cast<size_t>(base_buckets_ * lines_per_bucket_ * kLine);
  const auto entry_bytes = static_cast<size_t>(capacity_) * sizeof(IndexEntry);
  // Padding touches every page of the digests, so ask first.
  RequireAvailableMemory(digest_bytes + entry_bytes,
                         "an index of " + std::to_string(capacity_) + " rows");
  digests_ = HugeBuffer(digest_bytes);
  entries_ = HugeBuffer(entry_bytes);
  PadDigests(0, base_buckets_);
}

void KeyIndex::PadDigests(int64_t first_bucket, int64_t last_bucket) {
  const int64_t width = lines_per_bucket_ * kLine;
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
  view.entries = const_cast<IndexEntry*>(entries());
  view.base_buckets = static_cast<uint64_t>(base_buckets_);
  view.split_mask = (uint64_t{1} << splits_) - 1;
  view.bucket_capacity = static_cast<uint32_t>(bucket_capacity_);
  view.lines_per_bucket = static_cast<uint32_t>(lines_per_bucket_);
  // A key away from home costs a line more when its home group is read first, one at home saves a
  // line.
  view.mostly_home =
      2 * std::atomic_ref(const_cast<int64_t&>(away_)).load(std::memory_order_relaxed) <= size_;
  return view;
}

uint8_t* KeyIndex::digest_of(Slot slot) {
  const int64_t bucket = slot / bucket_capacity_;
  return reinterpret_cast<uint8_t*>(digests_.data()) + bucket * lines_per_bucket_ * kLine +
         (slot - bucket * bucket_capacity_);
}

uint8_t KeyIndex::digest(Slot slot) const { return *const_cast<KeyIndex*>(this)->digest_of(slot); }

int64_t KeyIndex::BucketOf(int64_t key) const {
  const IndexView v = view();
  return HomeOf(HashKey(key), v).bucket;
}

Slot KeyIndex::Find(int64_t key) const {
  const IndexView v = view();
  const Home home = HomeOf(HashKey(key), v);
  const int64_t first = home.bucket * bucket_capacity_;
  const int64_t position = VisitMatches(
      v.digests + home.bucket * lines_per_bucket_ * kLine, v.lines_per_bucket, home.line(),
      home.digest, [&](int64_t at) { return v.entries[first + at].key == key; });
  return position < 0 ? kNoSlot : static_cast<Slot>(first + position);
}

void KeyIndex::Prefetch(int64_t key, bool entries) const {
  const IndexView v = view();
  const Home home = HomeOf(HashKey(key), v);
  const uint8_t* digests = v.digests + home.bucket * lines_per_bucket_ * kLine;
  for (int64_t line = 0; line < std::min<int64_t>(lines_per_bucket_, 4); ++line) {
    __builtin_prefetch(digests + line * kLine);
  }
  if (!entries) {
    __builtin_prefetch(v.entries + home.bucket * bucket_capacity_ + home.position, 1);
    return;
  }
  const auto* begin =
      reinterpret_cast<const std::byte*>(v.entries + home.bucket * bucket_capacity_);
  const int64_t bytes = std::min<int64_t>(bucket_capacity_, 256) * int64_t{sizeof(IndexEntry)};
  for (int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(begin + byte);
}

KeyIndex::Insertion KeyIndex::FindOrInsert(int64_t key, uint64_t score) {
  const IndexView v = view();
  const Home home = HomeOf(HashKey(key), v);
  const uint8_t* digests = v.digests + home.bucket * lines_per_bucket_ * kLine;
  const int64_t first = home.bucket * bucket_capacity_;
  const int64_t found = VisitMatches(digests, v.lines_per_bucket, home.line(), home.digest,
                                     [&](int64_t at) { return v.entries[first + at].key == key; });
  if (found >= 0) return {static_cast<Slot>(first + found), false};
  const int64_t free = FirstFree(digests, v.lines_per_bucket, home);
  if (free < 0) return {kNoSlot, false};
  const auto slot = static_cast<Slot>(first + free);
  Put(slot, key, score);
  return {slot, true};
}

void KeyIndex::Put(Slot slot, int64_t key, uint64_t score) {
  const Home home = HomeOf(HashKey(key), view());
  *digest_of(slot) = home.digest;
  entries()[slot] = {key, score};
  CountAway(slot, home.position, 1);
}

void KeyIndex::CountAway(Slot slot, uint32_t home_position, int64_t delta) {
  const int64_t offset = slot % bucket_capacity_ - home_position;
  if (offset >= 0 && offset < kGroup) return;
  std::atomic_ref<int64_t>(away_).fetch_add(delta, std::memory_order_relaxed);
}

void KeyIndex::Replace(Slot slot, int64_t key, uint64_t score) {
  Erase(slot);
  Put(slot, key, score);
}

void KeyIndex::Erase(Slot slot) {
  CountAway(slot, HomeOf(HashKey(entries()[slot].key), view()).position, -1);
  *digest_of(slot) = kFreeDigest;
  entries()[slot] = {0, 0};
}

void KeyIndex::Grow(const std::function<void(Slot from, Slot to)>& moved) {
  const int64_t buckets = capacity_ / bucket_capacity_;
  const int64_t width = lines_per_bucket_ * kLine;
  // Both buffers first: growing them moves no key, so a failure leaves the index as it was.
  digests_.Grow(static_cast<size_t>(2 * buckets * width));
  entries_.Grow(static_cast<size_t>(2 * capacity_) * sizeof(IndexEntry));
  PadDigests(buckets, 2 * buckets);
  const uint64_t new_bit = uint64_t{1} << splits_;
  constexpr int64_t kBucketsPerTask = 256;
  ParallelFor(CeilDiv(buckets, kBucketsPerTask), [&](int64_t task) {
    const int64_t begin = task * kBucketsPerTask;
    const int64_t end = std::min(begin + kBucketsPerTask, buckets);
    for (auto slot = static_cast<Slot>(begin * bucket_capacity_); slot < end * bucket_capacity_;
         ++slot) {
      uint8_t* from = digest_of(slot);
      if (*from == kFreeDigest || !(HashKey(entries()[slot].key) & new_bit)) continue;
      const auto to = static_cast<Slot>(slot + capacity_);
      *digest_of(to) = *from;
      entries()[to] = entries()[slot];  // at the same position: whether it is at home stays
      *from = kFreeDigest;
      entries()[slot] = {0, 0};
      moved(slot, to);
    }
  });
  ++splits_;
  capacity_ *= 2;
}

void KeyIndex::Clear() {
  digests_.Clear();
  entries_.Clear();
  PadDigests(0, capacity_ / bucket_capacity_);
  size_ = away_ = 0;
}

}  // namespace embstore
