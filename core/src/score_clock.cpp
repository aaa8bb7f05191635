#include "embstore/score_clock.h"

#include <time.h>

#include <algorithm>

namespace embstore {
namespace {

uint64_t NowNanoseconds() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000ULL + static_cast<uint64_t>(now.tv_nsec);
}

// A new row needs a score before its first gradient arrives.
constexpr double kLeastImportance = 1e-12;

}  // namespace

BatchScore ScoreClock::Next(int64_t keys) {
  if (ages()) {
    const bool counts = strategy_ == ScoreStrategy::kAgedLfu;
    // An occurrence counts 1 + f of a half-life that has passed by the part f: straight lines
    // through 2^h, so that of two keys that came once the later one counts more.
    const uint64_t score = counts ? Peek() : AgedScore(kLeastImportance, half_life_);
    ticks_ += age_.in_batches ? 1 : keys;
    half_life_ += ticks_ / age_.length;
    ticks_ %= age_.length;
    return {counts ? ScoreUpdate::kAge : ScoreUpdate::kKeep, score};
  }
  switch (strategy_) {
    case ScoreStrategy::kTimestamp:
    case ScoreStrategy::kNoEviction:
      last_timestamp_ = std::max(last_timestamp_ + 1, NowNanoseconds());
      return {ScoreUpdate::kSet, last_timestamp_};
    case ScoreStrategy::kStep:
      // Stays at the largest: 0 would say that the slot is free.
      return {ScoreUpdate::kSet, step_ == UINT64_MAX ? step_ : step_++};
    case ScoreStrategy::kCustomized:
      RequireScore();
      return {ScoreUpdate::kSet, custom_score_};
    default:
      return {ScoreUpdate::kCount, 1};
  }
}

uint64_t ScoreClock::Peek() {
  if (ages()) {
    const auto fraction = static_cast<unsigned __int128>(ticks_) << kAgedFractionBits;
    const int64_t exponent = kAgedBias + half_life_;
    if (exponent > kAgedMostExponent) return UINT64_MAX;  // 0 would say that the slot is free
    return static_cast<uint64_t>(exponent) << kAgedFractionBits |
           static_cast<uint64_t>(fraction / static_cast<uint64_t>(age_.length));
  }
  switch (strategy_) {
    case ScoreStrategy::kTimestamp:
    case ScoreStrategy::kNoEviction: {
      const uint64_t score = std::max(last_timestamp_ + 1, NowNanoseconds());
      last_timestamp_ = score - 1;  // so that a later batch cannot fall below what was shown
      return score;
    }
    case ScoreStrategy::kStep:
      return step_;
    case ScoreStrategy::kCustomized:
      return custom_score_;
    default:
      return 0;
  }
}

void ScoreClock::RequireScore() const {
  if (strategy_ == ScoreStrategy::kCustomized && custom_score_ == 0) {
    throw InvalidState("score of table '" + table_ +
                       "' should be set before its first training batch");
  }
}

void ScoreClock::set_custom_score(uint64_t score) {
  if (strategy_ != ScoreStrategy::kCustomized) {
    throw InvalidArgument(
        "score should be set only on a table whose strategy is customized, and '" + table_ +
        "' has another");
  }
  if (score == 0) throw InvalidArgument("score should be at least 1 but is: 0");
  custom_score_ = score;
}

void ScoreClock::RequireStep(uint64_t step) const {
  if (ages()) {
    if (static_cast<int64_t>(step >> kAgedFractionBits) < kAgedBias) {
      throw InvalidArgument("score should be one that an aged table gave, for table '" + table_ +
                            "', but is: " + std::to_string(step));
    }
    return;
  }
  if (strategy_ != ScoreStrategy::kStep) {
    throw InvalidArgument("step should be set only on a table whose strategy is step, and '" +
                          table_ + "' has another");
  }
  if (step == 0) throw InvalidArgument("step should be at least 1 but is: 0");
}

void ScoreClock::set_step(uint64_t step) {
  RequireStep(step);
  if (ages()) {
    const auto exponent = static_cast<int64_t>(step >> kAgedFractionBits);
    half_life_ = exponent - kAgedBias;
    const auto ticks =
        static_cast<unsigned __int128>(step % kAgedOne) * static_cast<uint64_t>(age_.length) +
        (kAgedOne - 1);
    ticks_ = static_cast<int64_t>(ticks >> kAgedFractionBits);
    return;
  }
  step_ = step;
}

void ScoreClock::RaiseTo(uint64_t score) {
  if (score > 0) RaiseAbove(score - 1);
}

void ScoreClock::RaiseAbove(uint64_t score) { last_timestamp_ = std::max(last_timestamp_, score); }

}  // namespace embstore
