// How often keys without a row were seen: saved, restored, and taken as changes.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "embstore/table.h"

namespace embstore {
namespace {

// Precedes the sketch: a magic number, and the time of the clock.
constexpr uint16_t kSketchForm = 0x5ce7;
constexpr size_t kHeader = 1 + sizeof(uint64_t) / sizeof(uint16_t);

uint64_t MomentIn(std::span<const uint16_t> header) {
  uint64_t moment = 0;
  std::memcpy(&moment, header.data() + 1, sizeof moment);
  return moment;
}

}  // namespace

std::vector<uint16_t> Table::CounterHeader() {
  if (!options_.admit_by_frequency) return {admission_->threshold()};
  std::vector<uint16_t> header(kHeader);
  header[0] = kSketchForm;
  const uint64_t moment = clock_.Peek();
  std::memcpy(header.data() + 1, &moment, sizeof moment);
  return header;
}

std::vector<uint16_t> Table::AdmissionCounters() {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!options_.admit_by_frequency) {
    return admission_ ? admission_->Save() : std::vector<uint16_t>();
  }
  std::vector<uint16_t> saved = CounterHeader();
  if (!sketch_) return saved;
  const std::vector<uint16_t> entries = sketch_->Save();
  saved.insert(saved.end(), entries.begin(), entries.end());
  return saved;
}

void Table::RequireCounters(std::span<const uint16_t> words, bool changes) const {
  if (options_.admit_by_frequency) {
    const std::span<const uint16_t> header = changes ? TakenCounters(words).header : words;
    if (header.size() >= kHeader && header[0] == kSketchForm) clock_.RequireStep(MomentIn(header));
  } else if (changes) {
    const TakenCounters taken(words);
  } else {
    AdmissionFilter::RequireForm(words);
  }
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
  clock_.set_step(MomentIn(counters));
  sketch_ = std::move(sketch);
  return true;
}

void Table::TrackCounters(bool on) {
  const auto track = [&](auto& counters) {
    if (!counters) return;
    if (on) {
      counters->changes().Track(counters->counters().size(), /*from_zero=*/false);
    } else {
      counters->changes().Stop();
    }
  };
  track(sketch_);
  track(admission_);
}

std::vector<uint16_t> Table::TakeCounterChanges() {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!changes_) {
    throw InvalidState("changes of table '" + options_.name + "' should be tracked but are not");
  }
  if (admission_) return admission_->changes().Take(CounterHeader(), admission_->counters());
  if (!options_.admit_by_frequency) return {};
  if (!sketch_) return CounterChanges::Nothing(CounterHeader());
  return sketch_->changes().Take(CounterHeader(), sketch_->counters());
}

void Table::ReturnCounterChanges(std::span<const uint16_t> taken) {
  std::unique_lock guard(lock_);
  if (!changes_) return;
  if (admission_) admission_->changes().PutBack(taken);
  if (sketch_) sketch_->changes().PutBack(taken);
}

bool Table::ApplyCounterChanges(std::span<const uint16_t> changes) {
  std::unique_lock guard(lock_);
  RequireOpen();
  const TakenCounters taken(changes);
  if (admission_) {
    // A few words may say that all other counters are 0. The table that counted had about as many
    // rows as this one, so counters for 64 times as many are none that a table gave.
    const auto most = std::max(admission_->bytes(),
                               64 * AdmissionFilter::BytesFor(kTrackedPerRow * index_->capacity()));
    return std::cmp_less_equal(taken.bytes, most) && admission_->Apply(taken);
  }
  if (!options_.admit_by_frequency || taken.header.size() != kHeader ||
      taken.header[0] != kSketchForm) {
    return false;
  }
  if (taken.bytes == 0) {
    sketch_.reset();
  } else {
    if (!sketch_ && !taken.from_zero) return false;
    if (!sketch_ || taken.from_zero) {
      FrequencySketch empty = EmptySketch();
      if (empty.counters().size() != taken.bytes) return false;
      sketch_ = std::move(empty);
    }
    if (sketch_->counters().size() != taken.bytes) return false;
    taken.Apply(sketch_->counters());
    if (changes_) sketch_->changes().PutBack(changes);
  }
  clock_.set_step(MomentIn(taken.header));
  return true;
}

}  // namespace embstore
