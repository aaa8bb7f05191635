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
  constexpr int64_t kAhead = 32;
  uint64_t last_score = 0;  // most are equal
  double amount = 0.0;
  for (int64_t j = 0; j < n; ++j) {
    if (j + kAhead < n) sketch_->Prefetch(key_of(j + kAhead));
    uint64_t& score = fresh.scores[static_cast<size_t>(j)];
    if (j < fresh.plain) {
      const double before = sketch_->Take(key_of(j), now);
      if (before > 0) score = AddAged(score, AgedScore(before, now));
      continue;
    }
    if (score != last_score) amount = AgedAmount(last_score = score, now);
    const double sum = sketch_->Add(key_of(j), amount, now);
    if (sum != amount) score = AgedScore(sum, now);
  }

  EvictFor(fresh, /*must_win=*/true);
  // An evicted key keeps its frequency.
  for (int64_t j = fresh.plain; j < n; ++j) {
    if (j + kAhead < n) {
      const Evicted& next = fresh.evicted[static_cast<size_t>(j + kAhead - fresh.plain)];
      if (next.slot != kNoSlot) sketch_->Prefetch(next.entry.key);
    }
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
