#include "embstore/score_clock.h"

#include <chrono>

#include "check.h"

namespace embstore {
namespace {

TEST(Timestamps rise whatever was shown raised or seen) {
  for (const ScoreStrategy strategy : {ScoreStrategy::kTimestamp, ScoreStrategy::kNoEviction}) {
    ScoreClock clock(strategy, {}, "t");
    uint64_t last = 0;
    for (int i = 0; i < 1023; ++i) {
      const BatchScore batch = clock.Next(7);
      CHECK(batch.update == ScoreUpdate::kSet);
      CHECK(batch.score > last);
      last = batch.score;
      const uint64_t shown = clock.Peek();
      CHECK(shown > last);
      CHECK(clock.Next(7).score >= shown);
    }
    const uint64_t ahead = clock.Peek() + (uint64_t{1} << 40);
    clock.RaiseTo(ahead);
    CHECK_EQ(clock.Next(7).score, ahead);
    clock.RaiseAbove(2 * ahead);
    CHECK_EQ(clock.Next(7).score, 2 * ahead + 1);
    clock.RaiseTo(7);  // never back
    clock.RaiseTo(0);
    CHECK(clock.Next(7).score > 2 * ahead + 1);
  }
}

TEST(A timestamp is the time of day in nanoseconds) {
  const auto now = [] {
    const auto since = std::chrono::system_clock::now().time_since_epoch();
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
  };
  ScoreClock clock(ScoreStrategy::kTimestamp, {}, "t");
  const uint64_t before = now(), score = clock.Next(7).score, after = now();
  CHECK(before <= score);
  CHECK(score <= after);
}

TEST(Steps count batches and stop at the largest number) {
  ScoreClock clock(ScoreStrategy::kStep, {}, "t");
  CHECK_EQ(clock.Peek(), uint64_t{1});
  CHECK_EQ(clock.Next(7).score, uint64_t{1});
  CHECK_EQ(clock.Next(7).score, uint64_t{2});
  clock.set_step(UINT64_MAX - 1);
  CHECK_EQ(clock.Next(7).score, UINT64_MAX - 1);
  CHECK_EQ(clock.Next(7).score, UINT64_MAX);
  CHECK_EQ(clock.Next(7).score, UINT64_MAX);
  CHECK_THROWS(InvalidArgument, "step should be at least 1", clock.set_step(0));
  CHECK_THROWS(InvalidArgument, "whose strategy is customized, and 't'", clock.set_custom_score(3));
}

TEST(A customized score has to be set before the first batch) {
  ScoreClock clock(ScoreStrategy::kCustomized, {}, "t");
  CHECK_EQ(clock.Peek(), uint64_t{0});
  CHECK_THROWS(InvalidState, "score of table 't' should be set", clock.Next(7));
  CHECK_THROWS(InvalidArgument, "score should be at least 1", clock.set_custom_score(0));
  CHECK_THROWS(InvalidArgument, "whose strategy is step, and 't'", clock.set_step(3));
  clock.set_custom_score(97);
  CHECK_EQ(clock.Next(7).score, uint64_t{97});
  CHECK_EQ(clock.Next(7).score, uint64_t{97});
}

TEST(Counts rise by one and stay at the largest) {
  ScoreClock clock(ScoreStrategy::kLfu, {}, "t");
  const BatchScore batch = clock.Next(7);
  CHECK(batch.update == ScoreUpdate::kCount);
  uint64_t score = batch.score;
  RenewScore(score, batch.update, batch.score);
  CHECK_EQ(score, uint64_t{2});
  score = UINT64_MAX;
  RenewScore(score, batch.update, batch.score);
  CHECK_EQ(score, UINT64_MAX);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
