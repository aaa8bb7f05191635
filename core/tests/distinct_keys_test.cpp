#include "embstore/distinct_keys.h"

#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace embstore {
namespace {

TEST(Keys are numbered in the order in which they first come) {
  std::mt19937_64 random(7);
  DistinctKeys distinct;
  for (const size_t expected : {size_t{0}, size_t{7}, size_t{1023}, size_t{100000}}) {
    distinct.Reset(expected);
    std::unordered_map<int64_t, uint32_t> numbers;
    std::vector<int64_t> order;
    for (int i = 0; i < 20011; ++i) {
      int64_t key = static_cast<int64_t>(random() % 4999) - 2500;
      if (key == 3) key = INT64_MIN;
      if (key == 4) key = INT64_MAX;
      const auto [at, is_new] = numbers.emplace(key, static_cast<uint32_t>(order.size()));
      CHECK_EQ(distinct.Find(key), is_new ? int64_t{-1} : int64_t{at->second});
      const DistinctKeys::Added added = distinct.Add(key);
      if (is_new) order.push_back(key);
      CHECK_EQ(added.is_new, is_new);
      CHECK_EQ(added.number, at->second);
    }
    CHECK(distinct.keys() == order);
    CHECK_EQ(distinct.Find(123456), int64_t{-1});
  }
}

// Found by trying: at most 4096 steps for each.
TEST(Keys that collide for the seed of a table are found as soon as others) {
  const HashSecret of_table = SecretOf(0);
  DistinctKeys distinct;
  distinct.Reset(1000);
  for (int64_t key = 0; distinct.size() < 1000; ++key) {
    if (KeyedHash(key, of_table) % 2048 == 7) distinct.Add(key);
  }
  CHECK(distinct.LongestSearch() < 100);  // 1000 if they had one place
}

TEST(A reset list knows no key) {
  DistinctKeys distinct;
  CHECK_EQ(distinct.Find(0), int64_t{-1});
  distinct.Add(0);
  CHECK_EQ(distinct.Find(0), int64_t{0});
  distinct.Reset(1);
  CHECK(distinct.empty());
  CHECK_EQ(distinct.Find(0), int64_t{-1});
}

TEST(Sorting drops repeated keys) {
  std::vector<int64_t> keys = {5, -1, 5, INT64_MIN, -1, 7};
  SortDistinct(keys);
  CHECK(keys == std::vector<int64_t>({INT64_MIN, -1, 5, 7}));
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
