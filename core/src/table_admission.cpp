// Which missing keys get a row: by a threshold, or in competition with the keys that have one.
#include <algorithm>
#include <cmath>

#include "embstore/parallel.h"
#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "newcomers.h"

namespace embstore {

std::vector<uint32_t> Table::Admit(const int64_t* keys, std::vector<uint32_t>& missing,
                                   const uint8_t* admitted) {
  if (missing.empty()) return {};
  if (admitted) {
    std::vector<uint32_t> waiting;
    std::erase_if(missing, [&](uint32_t i) {
      if (!admitted[i]) waiting.push_back(i);
      return !admitted[i];
    });
    stats_.unadmitted += std::ssize(waiting);
    return waiting;
  }
  if (!admission_) return {};
  admission_->Reserve(kTrackedPerRow * index_->capacity());
  for (const uint32_t i : missing) admission_->Count(keys[i]);
  const FetchedRows below = Fetch(keys, missing);  // keys that are stored stay admitted
  const auto first = std::stable_partition(missing.begin(), missing.end(), [&](uint32_t i) {
    return admission_->IsAdmitted(keys[i]) || below.Find(keys[i]).data != nullptr;
  });
  std::vector<uint32_t> waiting(first, missing.end());
  missing.erase(first, missing.end());
  for (const uint32_t i : missing) admission_->Forget(keys[i]);
  stats_.unadmitted += static_cast<int64_t>(waiting.size());
  return waiting;
}

uint64_t Table::SumOfScores(uint64_t a, uint64_t b) const {
  if (ages()) return AddAged(a, b);
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

void Table::AddToScore(int64_t key, double amount) {
  const Slot slot = index_->Find(key);
  if (slot == kNoSlot || !(amount > 0.0) || std::isinf(amount)) return;
  const int64_t now = clock_.half_life();
  const double weight = AgedAmount(clock_.Peek(), now);
  RenewScore(index_->view().score(slot), ScoreUpdate::kAge, AgedScore(weight * amount, now));
}

void Table::AddToSketch(int64_t key, double amount) {
  if (!sketch_ || !(amount > 0.0) || std::isinf(amount) || index_->Find(key) != kNoSlot) return;
  const int64_t now = clock_.half_life();
  sketch_->Add(key, AgedAmount(clock_.Peek(), now) * amount, now);
}

FrequencySketch Table::EmptySketch() const {
  FrequencySketch sketch(SketchKeys(row_limit_), options_.index.seed);
  if (changes_) sketch.changes().Track(sketch.counters().size(), /*from_zero=*/true);
  return sketch;
}

void Table::Recall(Newcomers& fresh) {
  const int64_t n = fresh.size(), now = clock_.half_life();
  const auto key_of = [&](int64_t j) { return fresh.at(static_cast<size_t>(j)).key; };
  if (!sketch_) {
    if (fresh.plain == n) return;  // every key has a row so far
    sketch_ = EmptySketch();
  }
  constexpr int64_t kAhead = 16;
  for (int64_t j = 0; j < n; ++j) {
    if (j + kAhead < n) sketch_->Prefetch(key_of(j + kAhead));
    uint64_t& score = fresh.at(static_cast<size_t>(j)).score;
    if (j < fresh.plain) {
      const double before = sketch_->Take(key_of(j), now);
      if (before > 0) score = AddAged(score, AgedScore(before, now));
    } else {
      score = AgedScore(sketch_->Add(key_of(j), AgedAmount(score, now), now), now);
    }
  }
  // The most frequent of a class comes first; ties in the order of the batch.
  using Newcomer = Newcomers::Newcomer;
  const auto goes_first = [&](const Newcomer& a, const Newcomer& b) {
    const size_t class_a = ClassOf(a.hash), class_b = ClassOf(b.hash);
    if (class_a != class_b) return class_a < class_b;
    return a.score != b.score ? a.score > b.score : a.number < b.number;
  };
  const int bits = std::min(fresh.order_bits, class_bits_);
  const auto run_of = [&](const Newcomer& own) { return bits ? own.hash >> (64 - bits) : 0; };
  for (auto begin = fresh.placed.begin(); begin != fresh.placed.end();) {
    auto end = begin + 1;
    while (end != fresh.placed.end() && run_of(*end) == run_of(*begin)) ++end;
    if (end - begin > 1) std::sort(begin, end, goes_first);
    begin = end;
  }
  for (size_t i = 0; i < fresh.placed.size(); ++i) {
    fresh.place[fresh.placed[i].number] = static_cast<uint32_t>(i);
  }
}

void Table::Remember(const Newcomers& fresh) {
  if (!sketch_) return;
  const int64_t now = clock_.half_life();
  const auto gone_for = [&](int64_t j) -> const Evicted& {
    return fresh.fates[fresh.place[static_cast<size_t>(j)]].evicted;
  };
  constexpr int64_t kAhead = 16;
  for (int64_t j = fresh.plain; j < fresh.size(); ++j) {
    if (j + kAhead < fresh.size()) {
      sketch_->Prefetch(gone_for(j + kAhead).entry.key);
      sketch_->Prefetch(fresh.at(static_cast<size_t>(j + kAhead)).key);
    }
    const Evicted& gone = gone_for(j);
    if (gone.slot == kNoSlot) continue;
    sketch_->Take(fresh.at(static_cast<size_t>(j)).key, now);
    sketch_->Add(gone.entry.key, AgedAmount(gone.entry.score, now), now);
  }
}

}  // namespace embstore
