#include "embstore/slot_map.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "argument_check.h"
#include "embstore/hash.h"
#include "embstore/kernels.h"
#include "embstore/score_clock.h"
#include "invariant.h"

namespace embstore {
namespace {

constexpr int kTimeBits = 27, kSlotBits = 32;
constexpr int kFrequencyShift = kTimeBits + kSlotBits;
constexpr int64_t kMostTime = (int64_t{1} << kTimeBits) - 1;
constexpr uint64_t kMostFrequency = 31;
constexpr int64_t kMaxSlots = int64_t{1} << 29;
constexpr int64_t kBucket = 128;
constexpr Slot kStretch = 1 << 18;  // slots of the index that one step of Victims reads (5.6 MB)
constexpr double kShare = 0.125;    // of a stretch that is evicted at least
constexpr size_t kSample = 1024;

uint64_t TimeOf(uint64_t record) { return (record >> kSlotBits) & kMostTime; }
int64_t SlotOf(uint64_t record) { return static_cast<int64_t>(record & 0xffffffffu) - 1; }

KeyIndexOptions IndexFor(const SlotMapOptions& options) {
  CheckArgument(options.slots >= 1 && options.slots < kMaxSlots, "slots",
                "at least 1 and below 2^29", options.slots);
  CheckArgument(options.min_used_freq_power >= 0 && options.min_used_freq_power <= 31,
                "min_used_freq_power", "between 0 and 31", options.min_used_freq_power);
  KeyIndexOptions index;
  // Room for a third more, so that most keys are in their home group.
  index.init_capacity = std::max(options.slots + options.slots / 3, kBucket);
  index.max_capacity = index.init_capacity;
  index.bucket_capacity = kBucket;
  index.seed = options.seed;
  return index;
}

}  // namespace

SlotMap::SlotMap(const SlotMapOptions& options)
    : slots_(options.slots),
      first_frequency_(static_cast<uint64_t>(options.min_used_freq_power)),
      index_(IndexFor(options)),
      free_(static_cast<size_t>((options.slots + 63) / 64), ~uint64_t{0}) {
  if (slots_ % 64) free_.back() = (uint64_t{1} << (slots_ % 64)) - 1;
}

size_t SlotMap::bytes() const { return index_.bytes() + free_.size() * sizeof(uint64_t); }

uint64_t SlotMap::Record(uint64_t frequency, int64_t time, int64_t slot) const {
  return frequency << kFrequencyShift | static_cast<uint64_t>(time - time_base_) << kSlotBits |
         static_cast<uint64_t>(slot + 1);
}

template <typename Visit>
void SlotMap::VisitUsed(const Visit& visit) const {
  index_.VisitAll(visit);
}

// Times have 27 bits: after 2^27 batches, the older half of them collapses into one time.
void SlotMap::Advance(int64_t time) {
  CheckArgument(time >= last_time_, "time", "at least " + std::to_string(last_time_), time);
  last_time_ = time;
  if (time - time_base_ <= kMostTime) return;
  const int64_t shift = time - time_base_ - kMostTime / 2;
  VisitUsed([&](Slot at, const IndexEntry& entry) {
    const uint64_t record = entry.score;
    const auto old = static_cast<int64_t>(TimeOf(record));
    index_.set_score(at, Record(record >> kFrequencyShift,
                                time_base_ + std::max<int64_t>(old - shift, 0), SlotOf(record)));
  });
  time_base_ += shift;
}

int64_t SlotMap::Find(std::span<const int64_t> keys, int64_t time, int64_t* out) {
  CheckArgument(keys.size() < UINT32_MAX, "the number of keys", "below 2^32 - 1", keys.size());
  Advance(time);
  out_ = out;
  missing_.Reset(missing_.size());
  admitted_keys_ = 0;
  missing_at_.clear();
  const Kernels& kernels = ActiveKernels();
  const IndexView view = index_.view();
  const uint64_t now = static_cast<uint64_t>(time - time_base_) << kSlotBits;
  constexpr uint64_t kKept = ~(static_cast<uint64_t>(kMostTime) << kSlotBits);
  constexpr int64_t kBlock = 1024;
  Slot found[kBlock];
  Row rows[kBlock];
  const auto n = static_cast<int64_t>(keys.size());
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    kernels.find(view, keys.data() + begin, count, found, rows, ScoreUpdate::kKeep, 0, true);
    for (int64_t i = 0; i < count; ++i) {
      if (found[i] == kNoSlot) [[unlikely]] {
        out[begin + i] = -1;
        const uint32_t number = missing_.Add(keys[static_cast<size_t>(begin + i)]).number;
        missing_at_.push_back({static_cast<uint32_t>(begin + i), number});
        continue;
      }
      uint64_t& record = view.score(found[i]);
      uint64_t renewed = (record & kKept) | now;
      random_ = random_ * 6364136223846793005ULL + 1442695040888963407ULL;
      const uint64_t frequency = record >> kFrequencyShift;
      const bool rises = ((random_ >> 33) & ((uint64_t{1} << frequency) - 1)) == 0;
      renewed += static_cast<uint64_t>(rises & (frequency < kMostFrequency)) << kFrequencyShift;
      record = renewed;
      out[begin + i] = SlotOf(renewed);
    }
  }
  return static_cast<int64_t>(missing_.size());
}

int64_t SlotMap::TakeLowestFree() {
  while (free_[first_free_word_] == 0) ++first_free_word_;
  uint64_t& word = free_[first_free_word_];
  const int bit = std::countr_zero(word);
  word &= word - 1;
  return static_cast<int64_t>(first_free_word_) * 64 + bit;
}

void SlotMap::Free(Slot at) {
  const int64_t slot = SlotOf(index_.score(at));
  const auto word = static_cast<size_t>(slot / 64);
  free_[word] |= uint64_t{1} << (slot % 64);
  first_free_word_ = std::min(first_free_word_, word);
  index_.Erase(at);
}

std::span<const KeySlot> SlotMap::Admit() {
  victims_.clear();
  victims_at_.clear();
  admitted_.clear();
  const std::span<const int64_t> coming = missing();
  const auto count = static_cast<size_t>(std::min<int64_t>(free_slots(), std::ssize(coming)));
  admitted_.reserve(count);
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) index_.Prefetch(index_.Hash(coming[i + kAhead]));
    const int64_t slot = TakeLowestFree();
    index_.InsertNew({coming[i], Record(first_frequency_, last_time_, slot), kMissingRow});
    admitted_.push_back({coming[i], slot});
  }
  const size_t first = std::exchange(admitted_keys_, admitted_keys_ + count);
  std::erase_if(missing_at_, [&](const Occurrence& o) {
    if (o.missing >= admitted_keys_) return false;
    out_[o.position] = admitted_[o.missing - first].slot;
    return true;
  });
  return admitted_;
}

void SlotMap::Forget(std::span<const int64_t> keys) {
  victims_.clear();
  victims_at_.clear();
  for (const int64_t key : keys) {
    const Slot at = index_.Find(key);
    if (at == kNoSlot) continue;
    Free(at);
    index_.AddSize(-1);
  }
}

void SlotMap::VictimsOfStretch(Slot begin, Slot end, double share, uint64_t pinned_time) {
  const auto may_go = [&](uint64_t record) { return record != 0 && TimeOf(record) < pinned_time; };
  // The record below which `share` of the stretch lies, from a sample of it.
  sample_.clear();
  // An odd step, since positions within a bucket are filled in order and tell the age of a key.
  const Slot step = ((end - begin) / static_cast<Slot>(2 * kSample)) | 1;
  for (Slot at = begin; at < end; at += step) {
    if (may_go(index_.score(at))) sample_.push_back(index_.score(at));
  }
  const auto rank = static_cast<size_t>(share * static_cast<double>(sample_.size()));
  uint64_t limit = UINT64_MAX;
  if (rank + 1 < sample_.size()) {
    std::nth_element(sample_.begin(), sample_.begin() + static_cast<std::ptrdiff_t>(rank),
                     sample_.end());
    limit = sample_[rank];
  }
  // A free slot is 0 and wraps around: one comparison, since half of the slots are free.
  const auto goes = [&](uint64_t record) { return record - 1 < limit && may_go(record); };
  const auto take = [&](Slot at, const IndexEntry& entry) {
    victims_at_.push_back(at);
    victims_.push_back({entry.key, SlotOf(entry.score)});
  };
  index_.VisitScores(begin, end, goes, take);
  if (begin > 0) return;
  index_.VisitOverflow([&](Slot at, const IndexEntry& entry) {
    if (goes(entry.score)) take(at, entry);
  });
}

std::span<const KeySlot> SlotMap::Victims(int64_t count, int64_t pinned_from) {
  victims_.clear();
  victims_at_.clear();
  const auto pinned_time =
      static_cast<uint64_t>(std::clamp<int64_t>(pinned_from - time_base_, 0, kMostTime + 1));
  if (count <= 0 || size() == 0) return victims_;
  const auto all = static_cast<Slot>(index_.slots());
  const double needed = 1.25 * static_cast<double>(count) / static_cast<double>(size());
  for (const double share : {std::clamp(needed, kShare, 1.0), 1.0}) {
    // The second round may take everything unpinned, so it starts over.
    victims_.clear();
    victims_at_.clear();
    for (Slot seen = 0; seen < all;) {
      const Slot end = std::min<Slot>(all, hand_ + kStretch);
      VictimsOfStretch(hand_, end, share, pinned_time);
      seen += end - hand_;
      hand_ = end == all ? 0 : end;
      if (static_cast<int64_t>(victims_.size()) >= count) return victims_;
    }
  }
  return victims_;
}

void SlotMap::Drop() {
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < victims_at_.size(); ++i) {
    if (i + kAhead < victims_at_.size()) index_.PrefetchSlot(victims_at_[i + kAhead]);
    // Erasing moves other entries of the overflow area.
    const bool aside = victims_at_[i] >= kFirstOverflowSlot;
    Free(aside ? index_.Find(victims_[i].key) : victims_at_[i]);
  }
  index_.AddSize(-static_cast<int64_t>(victims_at_.size()));
  victims_.clear();
  victims_at_.clear();
}

std::vector<KeySlot> SlotMap::Worst(int64_t count) const {
  std::vector<std::pair<uint64_t, int64_t>> records;
  records.reserve(static_cast<size_t>(size()));
  VisitUsed([&](Slot, const IndexEntry& entry) { records.emplace_back(entry.score, entry.key); });
  const auto kept = static_cast<std::ptrdiff_t>(std::clamp<int64_t>(count, 0, size()));
  std::partial_sort(records.begin(), records.begin() + kept, records.end());
  std::vector<KeySlot> worst;
  worst.reserve(static_cast<size_t>(kept));
  for (std::ptrdiff_t i = 0; i < kept; ++i) {
    worst.push_back(
        {records[static_cast<size_t>(i)].second, SlotOf(records[static_cast<size_t>(i)].first)});
  }
  return worst;
}

std::vector<KeySlot> SlotMap::UsedSince(int64_t since) const {
  std::vector<KeySlot> used;
  VisitUsed([&](Slot, const IndexEntry& entry) {
    if (static_cast<int64_t>(TimeOf(entry.score)) + time_base_ >= since) {
      used.push_back({entry.key, SlotOf(entry.score)});
    }
  });
  std::sort(used.begin(), used.end(),
            [](const KeySlot& a, const KeySlot& b) { return a.slot < b.slot; });
  return used;
}

void SlotMap::CheckInvariants() const {
  index_.CheckInvariants();
  std::vector<uint64_t> unclaimed = free_;
  VisitUsed([&](Slot, const IndexEntry& entry) {
    const int64_t slot = SlotOf(entry.score);
    RequireInvariant(slot >= 0 && slot < slots_, "a key has one of the slots");
    uint64_t& word = unclaimed[static_cast<size_t>(slot / 64)];
    const uint64_t bit = uint64_t{1} << (slot % 64);
    RequireInvariant((word & bit) == 0, "a slot is free or belongs to one key");
    word |= bit;
  });
  for (int64_t slot = 0; slot < slots_; ++slot) {
    RequireInvariant(unclaimed[static_cast<size_t>(slot / 64)] >> (slot % 64) & 1,
                     "a slot without a key is free");
  }
  for (size_t word = 0; word < first_free_word_; ++word) {
    RequireInvariant(free_[word] == 0, "no slot below first_free_word_ is free");
  }
}

}  // namespace embstore
