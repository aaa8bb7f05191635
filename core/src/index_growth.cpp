// How a KeyIndex moves its keys when it grows.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "embstore/key_index.h"
#include "embstore/parallel.h"
#include "probe.h"

namespace embstore {

// Puts the key into its home group. The three with the lowest rows stay there; the others are
// appended to `others`. Rows are given in the order of arrival, and frequent keys arrive early.
void KeyIndex::SettleHome(IndexGroup* groups, const IndexLayout& layout, IndexEntry entry,
                          std::vector<IndexEntry>& others) const {
  const Anchor home = AnchorOf(Hash(entry.key), layout.buckets, bucket_groups_);
  IndexGroup& g = groups[home.bucket * bucket_groups_ + home.group];
  const auto rank = [&](int at) { return g.scores[at] ? g.rows[at] : INT32_MAX; };
  int last = rank(1) > rank(0);
  if (rank(2) > rank(last)) last = 2;
  if (rank(last) > entry.row) {
    IndexEntry before{g.keys[last], g.scores[last], g.rows[last]};
    g.keys[last] = entry.key;
    g.scores[last] = entry.score;
    g.rows[last] = entry.row;
    if (before.score == 0) return;  // the slot was free
    entry = before;
  }
  others.push_back(entry);
}

void KeyIndex::SettleOthers(IndexGroup* groups, const IndexLayout& layout,
                            std::span<const IndexEntry> others,
                            std::vector<IndexEntry>& homeless) const {
  for (const IndexEntry& entry : others) {
    if (!InsertInto(groups, layout, entry, Hash(entry.key))) homeless.push_back(entry);
  }
}

// Grows the last `count` of the `left` stripes that have the layout `from`.
void KeyIndex::GrowStripes(const IndexLayout& from, const IndexLayout& to, int64_t left,
                           int64_t count) {
  const int64_t first = left - count;
  const int64_t old_groups = int64_t{from.stripe_buckets} * bucket_groups_;
  const auto new_groups = static_cast<int64_t>(to.buckets >> from.stripe_bits) * bucket_groups_;
  IndexGroup* const all = groups();
  std::vector<std::vector<IndexEntry>> homeless(static_cast<size_t>(count));
  // The first stripes grow into the memory that they occupy, so they need a copy.
  std::vector<IndexGroup> copy;
  const bool overlap = first * new_groups < left * old_groups;
  if (overlap) copy.assign(all + first * old_groups, all + left * old_groups);
  const IndexGroup* const source = overlap ? copy.data() : all + first * old_groups;
  const uint64_t begin =
      from.stripe_bits ? static_cast<uint64_t>(first) << (64 - from.stripe_bits) : 0;
  const uint64_t last = (not_grown_ ? grown_from_ : 0) - 1;
  std::vector<int64_t> aside;  // there may be room for them now
  VisitAside(begin, last, [&](Slot, const IndexEntry& entry) { aside.push_back(entry.key); });
  try {
    ParallelFor(count, [&](int64_t i) {
      const IndexGroup* const stripe = source + i * old_groups;
      // The gap still holds old entries.
      std::memset(static_cast<void*>(all + (first + i) * new_groups), 0,
                  static_cast<size_t>(new_groups) * sizeof(IndexGroup));
      std::vector<IndexEntry> others;
      others.reserve(static_cast<size_t>(old_groups));
      for (int64_t g = 0; g < old_groups; ++g) {
        for (int64_t at = 0; at < kGroup; ++at) {
          if (stripe[g].scores[at] == 0) continue;
          SettleHome(all, to, {stripe[g].keys[at], stripe[g].scores[at], stripe[g].rows[at]},
                     others);
        }
      }
      SettleOthers(all, to, others, homeless[static_cast<size_t>(i)]);
    });
    ReserveFor(homeless);
  } catch (...) {
    if (overlap) std::copy(copy.begin(), copy.end(), all + first * old_groups);
    throw;
  }
  for (const int64_t key : aside) {
    const Slot slot = FindInOverflow(view(), key);
    if (InsertInto(all, to, entry(slot), Hash(key))) {
      EraseAside(slot);
    } else {
      CountElsewhere(all, to, Hash(key));
    }
  }
  PutAllAside(homeless, all, to);
  before_ = from;
  grown_ = to;
  not_grown_ = first;
  grown_from_ = begin;
}

void KeyIndex::ReserveFor(std::span<const std::vector<IndexEntry>> homeless) {
  int64_t count = 0;
  for (const auto& part : homeless) count += std::ssize(part);
  if (count) ReserveOverflow(overflow_size() + count);
}

void KeyIndex::PutAllAside(std::span<const std::vector<IndexEntry>> homeless, IndexGroup* groups,
                           const IndexLayout& layout) {
  for (const auto& part : homeless) {
    for (const IndexEntry& entry : part) {
      PutAside(entry);
      CountElsewhere(groups, layout, Hash(entry.key));
    }
  }
}

// Moves all keys to a new array. For growth by a large factor.
void KeyIndex::Rebuild(const IndexLayout& layout) {
  RequireAvailableMemory(BytesOf(layout), "growing an index of " + std::to_string(size_) + " keys");
  HugeBuffer buffer(BytesOf(layout));
  auto* const fresh = reinterpret_cast<IndexGroup*>(buffer.data());
  // A stripe becomes several whole stripes, so threads do not write to the same ones.
  const int64_t grown_stripes = int64_t{1} << grown_.stripe_bits;
  const int64_t first_grown = not_grown_ << (grown_.stripe_bits - before_.stripe_bits);
  const int64_t stripes = size_ == 0 ? 0 : not_grown_ + grown_stripes - first_grown;
  std::vector<std::vector<IndexEntry>> homeless(static_cast<size_t>(stripes));
  ParallelFor(stripes, [&](int64_t i) {
    const bool grown = i >= not_grown_;
    const IndexLayout& from = grown ? grown_ : before_;
    const int64_t stripe = grown ? i - not_grown_ + first_grown : i;
    const int64_t slots = int64_t{from.stripe_buckets} * bucket_groups_ * kGroup;
    std::vector<IndexEntry> others;
    VisitUsed(static_cast<Slot>(stripe * slots), static_cast<Slot>((stripe + 1) * slots),
              [&](Slot, const IndexEntry& entry) { SettleHome(fresh, layout, entry, others); });
    SettleOthers(fresh, layout, others, homeless[static_cast<size_t>(i)]);
  });
  ReserveFor(homeless);
  VisitOverflow([&](Slot, const IndexEntry& e) { CountElsewhere(fresh, layout, Hash(e.key)); });
  PutAllAside(homeless, fresh, layout);
  groups_ = std::move(buffer);
  before_ = grown_ = layout;
  not_grown_ = 0;
  grown_from_ = 0;
}

}  // namespace embstore
