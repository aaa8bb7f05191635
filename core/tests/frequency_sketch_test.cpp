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
