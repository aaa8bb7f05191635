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

// Calls use(number, hash) for the numbers below `count` that are wanted(number), in ascending
// order, with the hash that the sketch has for key_of(number).
template <typename KeyOf, typename Wanted, typename Use>
void Table::UseSketch(const Newcomers& fresh, size_t count, const KeyOf& key_of,
                      const Wanted& wanted, const Use& use) {
  auto* const uses = fresh.sketch_uses.as<Newcomers::SketchUse>();
  size_t n = 0;
  for (uint32_t number = 0; number < count; ++number) {
    if (wanted(number)) uses[n++] = {sketch_->Hash(key_of(number)), number};
  }
  constexpr size_t kAhead = 24;
  for (size_t i = 0; i < n + kAhead; ++i) {
    if (i < n) sketch_->Prefetch(uses[i].hash);
    if (i >= kAhead) use(uses[i - kAhead].number, uses[i - kAhead].hash);
  }
}

void Table::Recall(Newcomers& fresh) {
  const auto n = static_cast<size_t>(fresh.size());
  if (!sketch_) {
    if (fresh.plain == fresh.size()) return;  // every key has a row so far
    sketch_ = EmptySketch();
  }
  fresh.sketch_uses = RecycledBuffer(2 * n * sizeof(Newcomers::SketchUse));
  const int64_t now = clock_.half_life();
  UseSketch(
      fresh, n, [&](uint32_t j) { return fresh.at(j).key; }, [](uint32_t) { return true; },
      [&](uint32_t j, uint64_t hash) {
        uint64_t& score = fresh.at(j).score;
        if (j < fresh.plain) {
          const double before = sketch_->TakeHash(hash, now);
          if (before > 0) score = AddAged(score, AgedScore(before, now));
        } else {
          score = AgedScore(sketch_->AddHash(hash, AgedAmount(score, now), now), now);
        }
      });
}

void Table::Remember(const Newcomers& fresh) {
  if (!sketch_) return;
  const int64_t now = clock_.half_life();
  const auto first = static_cast<uint32_t>(fresh.plain);
  const auto gone_for = [&](uint32_t j) -> const Evicted& {
    return fresh.fates[fresh.place[first + j / 2]].evicted;
  };
  // Two for each: the key that came in, and the one that went.
  UseSketch(
      fresh, 2 * static_cast<size_t>(fresh.size() - fresh.plain),
      [&](uint32_t j) { return j % 2 == 0 ? fresh.at(first + j / 2).key : gone_for(j).entry.key; },
      [&](uint32_t j) { return gone_for(j).slot != kNoSlot; },
      [&](uint32_t j, uint64_t hash) {
        if (j % 2 == 0) {
          sketch_->TakeHash(hash, now);
        } else {
          sketch_->AddHash(hash, AgedAmount(gone_for(j).entry.score, now), now);
        }
      });
}

// The most frequent of a class comes first; ties in the order of the batch.
void Table::SortByScore(Newcomers& fresh, size_t begin, size_t end) const {
  using Newcomer = Newcomers::Newcomer;
  const auto goes_first = [&](const Newcomer& a, const Newcomer& b) {
    const size_t class_a = ClassOf(a.hash), class_b = ClassOf(b.hash);
    if (class_a != class_b) return class_a < class_b;
    return a.score != b.score ? a.score > b.score : a.number < b.number;
  };
  const int bits = std::min(fresh.order_bits, class_bits_);
  const auto run_of = [&](const Newcomer& own) { return bits ? own.hash >> (64 - bits) : 0; };
  std::vector<Newcomer>& all = fresh.placed;
  for (size_t next = begin; begin < end; begin = next) {
    for (next = begin + 1; next < end && run_of(all[next]) == run_of(all[begin]);) ++next;
    if (next - begin > 1) std::sort(&all[begin], &all[next - 1] + 1, goes_first);
  }
}

}  // namespace embstore
