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

}  // namespace

BatchScore ScoreClock::Next() {
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
    case ScoreStrategy::kLfu:
      break;
  }
  return {ScoreUpdate::kCount, 1};
}

uint64_t ScoreClock::Peek() {
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
    case ScoreStrategy::kLfu:
      break;
  }
  return 0;
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

void ScoreClock::set_step(uint64_t step) {
  if (strategy_ != ScoreStrategy::kStep) {
    throw InvalidArgument("step should be set only on a table whose strategy is step, and '" +
                          table_ + "' has another");
  }
  if (step == 0) throw InvalidArgument("step should be at least 1 but is: 0");
  step_ = step;
}

void ScoreClock::RaiseTo(uint64_t score) {
  if (score > 0) RaiseAbove(score - 1);
}

void ScoreClock::RaiseAbove(uint64_t score) { last_timestamp_ = std::max(last_timestamp_, score); }

}  // namespace embstore
