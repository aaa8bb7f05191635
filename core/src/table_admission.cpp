// Which missing keys get a row: by a threshold, or in competition with the keys that have one.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <shared_mutex>

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

FrequencySketch Table::EmptySketch() const { return {SketchKeys(row_limit_), options_.index.seed}; }

void Table::Contest(const int64_t* keys, Newcomers& fresh) {
  const int64_t n = fresh.size(), now = clock_.half_life();
  const auto key_of = [&](int64_t j) { return keys[fresh.first[static_cast<size_t>(j)]]; };
  if (!sketch_) {
    if (fresh.plain == n) return;  // every key has a row so far
    sketch_ = EmptySketch();
  }
  if (floors_.empty()) floors_.resize(size_t{1} << class_bits_, 0);
  constexpr int64_t kAhead = 8;
  for (int64_t j = 0; j < n; ++j) {
    if (j + kAhead < n) sketch_->Prefetch(key_of(j + kAhead));
    uint64_t& score = fresh.scores[static_cast<size_t>(j)];
    if (j < fresh.plain) {
      const double before = sketch_->Take(key_of(j), now);
      if (before > 0) score = AddAged(score, AgedScore(before, now));
    } else {
      score = AgedScore(sketch_->Add(key_of(j), AgedAmount(score, now), now), now);
    }
  }

  // The most frequent first; ties in the order of the batch.
  struct Challenger {
    size_t in_class;
    uint64_t score;
    int64_t newcomer;
  };
  std::vector<Challenger> all;
  for (int64_t j = fresh.plain; j < n; ++j) {
    const size_t in_class = ClassOf(fresh.hashes[static_cast<size_t>(j)]);
    const uint64_t score = fresh.scores[static_cast<size_t>(j)];
    if (score > floors_[in_class]) all.push_back({in_class, score, j});
  }
  std::sort(all.begin(), all.end(), [](const Challenger& a, const Challenger& b) {
    if (a.in_class != b.in_class) return a.in_class < b.in_class;
    return a.score != b.score ? a.score > b.score : a.newcomer < b.newcomer;
  });
  std::vector<size_t> begins;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i == 0 || all[i].in_class != all[i - 1].in_class) begins.push_back(i);
  }
  // A class is in one stripe, so threads that divide the work by stripe do not collide. Only the
  // overflow area is shared.
  constexpr size_t kWorthSharing = 64;
  const int64_t parts =
      begins.size() < kWorthSharing || index_->overflow_size() > 0 ? 1 : NumThreads();
  ParallelFor(parts, [&](int64_t part) {
    struct Holder {
      uint64_t score, tie;
      int64_t key;
    };
    const auto goes_later = [](const Holder& a, const Holder& b) {
      return a.score != b.score ? a.score > b.score : a.tie > b.tie;
    };
    std::vector<Holder> holders;  // evictable ones
    for (size_t i = 0; i < begins.size(); ++i) {
      const size_t in_class = all[begins[i]].in_class;
      const uint64_t first = class_bits_ ? uint64_t{in_class} << (64 - class_bits_) : 0;
      const uint64_t last = class_bits_ ? first + (UINT64_MAX >> class_bits_) : UINT64_MAX;
      if (parts > 1 && index_->StripeOf(first) % parts != part) continue;
      if (i + 1 < begins.size()) {  // what the next class reads
        const auto next = static_cast<size_t>(all[begins[i + 1]].newcomer);
        index_->Prefetch(fresh.hashes[next], /*whole=*/true);
      }
      holders.clear();
      const uint64_t most = all[begins[i]].score;  // of the first challenger, the largest
      uint64_t least = UINT64_MAX;
      index_->VisitHashes(first, last, [&](Slot, const IndexEntry& entry) {
        least = std::min(least, entry.score);
        if (entry.score >= most || pins_.IsHeld(entry.row)) return;
        holders.push_back({entry.score, HashKey(entry.key), entry.key});
      });
      std::make_heap(holders.begin(), holders.end(), goes_later);
      const size_t end = i + 1 < begins.size() ? begins[i + 1] : all.size();
      for (size_t c = begins[i]; c < end; ++c) {
        if (holders.empty() || all[c].score <= holders.front().score) break;
        Evict(index_->Find(holders.front().key), all[c].newcomer, fresh);
        std::pop_heap(holders.begin(), holders.end(), goes_later);
        holders.pop_back();
      }
      floors_[in_class] = least;
    }
  });
  // An evicted key keeps its frequency.
  for (int64_t j = fresh.plain; j < n; ++j) {
    const Evicted& gone = fresh.evicted[static_cast<size_t>(j - fresh.plain)];
    if (gone.slot == kNoSlot) continue;
    sketch_->Take(key_of(j), now);
    sketch_->Add(gone.entry.key, AgedAmount(gone.entry.score, now), now);
  }
}

namespace {

// Precedes the sketch: a magic number, and the time of the clock.
constexpr uint16_t kSketchForm = 0x5ce7;
constexpr size_t kHeader = 1 + sizeof(uint64_t) / sizeof(uint16_t);

}  // namespace

std::vector<uint16_t> Table::AdmissionCounters() {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!options_.admit_by_frequency) {
    return admission_ ? admission_->Save() : std::vector<uint16_t>();
  }
  std::vector<uint16_t> saved(kHeader);
  saved[0] = kSketchForm;
  const uint64_t moment = clock_.Peek();
  std::memcpy(saved.data() + 1, &moment, sizeof moment);
  if (!sketch_) return saved;
  const std::vector<uint16_t> entries = sketch_->Save();
  saved.insert(saved.end(), entries.begin(), entries.end());
  return saved;
}

bool Table::RestoreAdmissionCounters(std::span<const uint16_t> counters) {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!options_.admit_by_frequency) return admission_ && admission_->Restore(counters);
  if (counters.size() < kHeader || counters[0] != kSketchForm) return false;
  std::optional<FrequencySketch> sketch;
  if (counters.size() > kHeader) {
    sketch = EmptySketch();
    if (!sketch->Restore(counters.subspan(kHeader))) return false;
  }
  uint64_t moment = 0;
  std::memcpy(&moment, counters.data() + 1, sizeof moment);
  clock_.set_step(moment);
  sketch_ = std::move(sketch);
  return true;
}

}  // namespace embstore
