#include "embstore/frequency_sketch.h"

#include <cstdint>
#include <vector>

#include "check.h"

namespace embstore {
namespace {

TEST(Few keys are counted exactly and lose half with every half - life) {
  FrequencySketch sketch(1 << 14, 3);
  for (const int64_t key : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX, int64_t{97}}) {
    for (int count = 1; count <= 500; ++count) CHECK_EQ(sketch.Add(key, 1.0, 5), count);
    CHECK_EQ(sketch.Add(key, 3.0, 7), 128.0);
    CHECK_EQ(sketch.Take(key, 9), 32.0);
    CHECK_EQ(sketch.Take(key, 9), 0.0);
    CHECK_EQ(sketch.Add(key, 1.0, 9), 1.0);
    CHECK_EQ(sketch.Take(key, 1000), 0.0);
  }
}

TEST(Frequent keys stay known while many others pass) {
  FrequencySketch sketch(1 << 12, 3);
  int64_t passing = 1'000'000;
  for (int round = 0; round < 50; ++round) {
    for (int64_t key = 0; key < 1000; ++key) sketch.Add(key, 1.0, 0);
    for (int i = 0; i < 1000; ++i) sketch.Add(passing++, 1.0, 0);
  }
  int64_t known = 0;
  for (int64_t key = 0; key < 1000; ++key) known += sketch.Take(key, 0) >= 50.0;
  CHECK(known > 990);
}

// Meets 1000 keys once, or a hundred at a time twice.
void MeetAll(FrequencySketch& sketch, int64_t first, bool again, int64_t half_life) {
  for (int64_t from = first; from < first + 1000; from += 100) {
    for (int64_t key = from; key < from + 100; ++key) {
      CHECK(sketch.Meet(key, true, 1.0, half_life).is_new);
    }
    for (int64_t key = from; again && key < from + 100; ++key) {
      const auto [sum, is_new, is_sample] = sketch.Meet(key, true, 1.0, half_life);
      CHECK_EQ(sum, 2.0);
      CHECK_EQ(is_new, false);
    }
  }
}

TEST(Samples tell whether new keys come back) {
  FrequencySketch sketch(1 << 18, 3);
  int64_t first = 0;
  MeetAll(sketch, first, false, 0);
  CHECK_EQ(sketch.ReturnsAreRare(), false);  // too few to tell
  for (int round = 0; round < 5; ++round) MeetAll(sketch, first += 1000, false, 0);
  CHECK_EQ(sketch.ReturnsAreRare(), true);
  // A key that comes twice in its first batch is not new.
  CHECK_EQ(sketch.Meet(-5, false, 2.0, 0).is_new, false);
  int64_t samples = 0;
  for (int64_t key = -20'000; key < -10'000; ++key) {
    samples += sketch.Meet(key, true, 1.0, 0).is_sample;
  }
  CHECK(samples > 200 && samples < 500);
  // What is known is saved, and grows old.
  FrequencySketch same(1 << 18, 3), older(1 << 18, 3);
  std::vector<uint16_t> saved = sketch.Save();
  CHECK(same.Restore(saved));
  CHECK_EQ(same.ReturnsAreRare(), true);
  CHECK(same.Save() == saved);
  saved.resize(saved.size() - 6);  // as before there were samples
  CHECK(older.Restore(saved));
  CHECK_EQ(older.ReturnsAreRare(), false);
  for (int round = 0; round < 5; ++round) MeetAll(sketch, first += 1000, true, 2 + 2 * round);
  CHECK_EQ(sketch.ReturnsAreRare(), false);
}

TEST(What is saved is restored and another size is not) {
  FrequencySketch sketch(1 << 12, 3), same(1 << 12, 3), larger(1 << 13, 3);
  for (int64_t key = 0; key < 777; ++key) sketch.Add(key, static_cast<double>(key), 4);
  const std::vector<uint16_t> saved = sketch.Save();
  CHECK(same.Restore(saved));
  CHECK(same.Save() == saved);
  CHECK_EQ(same.Take(7, 5), 3.5);
  const std::vector<uint16_t> before = larger.Save();
  CHECK_EQ(larger.Restore(saved), false);
  CHECK(larger.Save() == before);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
