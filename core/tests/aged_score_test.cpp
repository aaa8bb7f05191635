#include "embstore/aged_score.h"

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "embstore/score_clock.h"

namespace embstore {
namespace {

TEST(Aged scores add up as numbers do and compare as integers) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 1000; ++round) {
    double sum = 0.0;
    uint64_t score = 0;
    for (int64_t half_life = 0; half_life < 40; half_life += static_cast<int64_t>(random() % 5)) {
      const double amount = std::ldexp(static_cast<double>(random() % 1000 + 1), -5);
      score = AddAged(score, AgedScore(amount, half_life));
      sum += std::ldexp(amount, static_cast<int>(half_life));
    }
    CHECK(std::abs(AgedAmount(score, 0) / sum - 1.0) < 1e-9);
    CHECK_EQ(AgedAmount(score, 3), AgedAmount(score, 0) / 8);
    CHECK(AgedScore(AgedAmount(score, 11), 11) == score);
    CHECK(AddAged(score, AgedScore(sum, 0)) > score);
  }
  CHECK_EQ(AddAged(0, 5), uint64_t{5});
  CHECK(AddAged(UINT64_MAX, UINT64_MAX) == UINT64_MAX);
  CHECK(AgedScore(3.0, 9) < AgedScore(2.0, 10));
  CHECK(AgedScore(4.0, 9) == AgedScore(2.0, 10));
  CHECK(AgedScore(1e-12, 0) > 0);
}

TEST(Aged scores are those of frexp and ldexp for all amounts) {
  std::mt19937_64 random(11);
  std::vector<double> amounts = {1.0, 0.5, 3.0, 5e-324, 0x1p-1022, 0x1.8p-1030, 1e300, 0x1p1023};
  for (int i = 0; i < 10000; ++i) {
    const auto fraction = static_cast<double>(random() >> 11 | 1);
    amounts.push_back(std::ldexp(fraction, static_cast<int>(random() % 2020) - 1074));
  }
  for (const double amount : amounts) {
    for (const int64_t half_life : {0, 7, 3000}) {
      int exponent = 0;
      const double fraction = 2.0 * std::frexp(amount, &exponent) - 1.0;
      const auto biased = static_cast<uint64_t>(kAgedBias + half_life + exponent - 1);
      const uint64_t score = AgedScore(amount, half_life);
      CHECK_EQ(score >> kAgedFractionBits, biased);
      CHECK_EQ(score % kAgedOne, static_cast<uint64_t>(fraction * static_cast<double>(kAgedOne)));
      for (const int64_t later : {int64_t{0}, half_life, half_life + 1, half_life + 9000}) {
        const int64_t left = half_life + exponent - 1 - later - kAgedFractionBits;
        CHECK_EQ(
            AgedAmount(score, later),
            std::ldexp(static_cast<double>(score % kAgedOne | kAgedOne), static_cast<int>(left)));
      }
    }
  }
}

TEST(A clock of aged scores stops at the largest moment) {
  for (const bool in_batches : {false, true}) {
    ScoreClock clock(ScoreStrategy::kAgedLfu, {.length = 3, .in_batches = in_batches}, "t");
    clock.set_step(UINT64_MAX - (kAgedOne / 2));
    uint64_t before = clock.Peek();
    for (int batch = 0; batch < 10; ++batch) {
      const uint64_t score = clock.Next(1).score;
      CHECK(score >= before);
      before = score;
    }
    CHECK_EQ(before, UINT64_MAX);
    CHECK_EQ(clock.Peek(), UINT64_MAX);
    clock.set_step(before);
    CHECK(clock.Next(1).score > UINT64_MAX - kAgedOne);
  }
}

TEST(A clock of batches or of keys goes on where it was) {
  for (const bool in_batches : {true, false}) {
    for (const int64_t length : {1, 3, 97, 1 << 20}) {
      ScoreClock clock(ScoreStrategy::kAgedLfu, {length, in_batches}, "t");
      for (int64_t batch = 1; batch < 300; ++batch) {
        clock.Next(7);
        const int64_t ticks = in_batches ? batch : 7 * batch;
        CHECK_EQ(clock.half_life(), ticks / length);
        ScoreClock other(ScoreStrategy::kAgedLfu, {length, in_batches}, "t");
        other.set_step(clock.Peek());
        CHECK_EQ(other.Peek(), clock.Peek());
        CHECK_EQ(other.half_life(), clock.half_life());
      }
    }
  }
  ScoreClock clock(ScoreStrategy::kImportance, {5, true}, "t");
  CHECK_THROWS(InvalidArgument, "should be one that an aged table gave, for table 't', but is: 7",
               clock.set_step(7));
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
