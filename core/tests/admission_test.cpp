#include "embstore/admission.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "embstore/types.h"

namespace {

using embstore::AdmissionFilter;

TEST(A key is admitted once it was counted often enough and forgotten on demand) {
  for (const int64_t threshold : {1, 2, 3, 31, 255}) {
    AdmissionFilter filter(threshold);
    for (const int64_t key : {int64_t{0}, int64_t{-1}, INT64_MIN, INT64_MAX}) {
      CHECK_EQ(filter.IsAdmitted(key), false);
      for (int64_t count = 1; count < threshold; ++count) {
        filter.Count(key);
        CHECK_EQ(filter.IsAdmitted(key), false);
      }
      for (int again = 0; again < 300; ++again) filter.Count(key);
      CHECK_EQ(filter.IsAdmitted(key), true);
      filter.Forget(key);
      CHECK_EQ(filter.IsAdmitted(key), false);
    }
  }
}

TEST(Few keys are admitted early and growing loses no count) {
  AdmissionFilter filter(3);
  constexpr int64_t kKeys = 100000;
  filter.Reserve(kKeys / 2);
  for (int64_t key = 0; key < kKeys / 4; ++key) filter.Count(key);
  filter.Reserve(4 * kKeys);
  for (int64_t key = 0; key < kKeys; ++key) filter.Count(key);
  int64_t early = 0;
  for (int64_t key = 0; key < kKeys; ++key) early += filter.IsAdmitted(key);
  CHECK_EQ(early < kKeys / 100, true);
  for (int64_t key = 0; key < kKeys / 4; ++key) filter.Count(key);
  int64_t late = 0;
  for (int64_t key = 0; key < kKeys / 4; ++key) late += !filter.IsAdmitted(key);
  CHECK_EQ(late < kKeys / 100, true);
  CHECK_EQ(filter.bytes() <= 4 * 2 * 2 * kKeys, true);
}

TEST(Keys that are seen once do not drive out those that are seen often) {
  // Room for what comes between two sightings of a key, not for all the noise.
  AdmissionFilter filter(10);
  filter.Reserve(16384);
  for (int round = 0; round < 10; ++round) {
    for (int64_t key = 0; key < 50; ++key) filter.Count(key);
    for (int64_t noise = 0; noise < 5000; ++noise) filter.Count(1000000 + round * 5000 + noise);
  }
  int64_t admitted = 0;
  for (int64_t key = 0; key < 50; ++key) admitted += filter.IsAdmitted(key);
  CHECK_EQ(admitted >= 45, true);
}

TEST(Every place of a filter is used) {
  AdmissionFilter filter(10);
  for (int64_t key = 0; key < 100'000; ++key) filter.Count(key);
  const std::vector<uint16_t> saved = filter.Save();
  CHECK_EQ(std::count(saved.begin(), saved.end(), 0), 0);
}

TEST(Counts that were saved go on in another filter of the same threshold) {
  AdmissionFilter filter(3), other(3), higher(4);
  filter.Reserve(5000);
  for (int64_t key = 0; key < 1000; ++key) {
    for (int64_t i = 0; i < key % 3; ++i) filter.Count(key);
  }
  const std::vector<uint16_t> saved = filter.Save();
  CHECK(other.Restore(saved));
  CHECK(other.Save() == saved);
  CHECK_EQ(other.bytes(), filter.bytes());
  for (int64_t key = 0; key < 1000; ++key) {
    filter.Count(key);
    other.Count(key);
    CHECK_EQ(other.IsAdmitted(key), filter.IsAdmitted(key));
  }
  const std::vector<uint16_t> empty = higher.Save();
  CHECK(!higher.Restore(saved));
  CHECK(higher.Save() == empty);
  CHECK_THROWS(embstore::InvalidArgument, "have this length: 0", other.Restore({}));
  CHECK_THROWS(embstore::InvalidArgument, "have this length: 1026",
               other.Restore(std::vector<uint16_t>(1026, 3)));
  CHECK_THROWS(embstore::InvalidArgument, "have this length: 513",
               other.Restore(std::vector<uint16_t>(513, 3)));
}

TEST(A threshold that does not fit is refused) {
  CHECK_THROWS(embstore::InvalidArgument, "is: 0", AdmissionFilter(0));
  CHECK_THROWS(embstore::InvalidArgument, "is: 256", AdmissionFilter(256));
}

}  // namespace

TEST_MAIN()
