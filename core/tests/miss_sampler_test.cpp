#include "embstore/miss_sampler.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <list>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace {

using embstore::MissSampler;

// Ids with a long tail, as a stream of clicks has them.
std::vector<int64_t> Stream(size_t n, int64_t ids, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<int64_t> keys(n);
  for (int64_t& key : keys) {
    key = static_cast<int64_t>(std::pow(static_cast<double>(ids), uniform(random))) * 7919 - 500;
  }
  return keys;
}

void Feed(MissSampler& sampler, const std::vector<int64_t>& keys, size_t batch) {
  for (size_t begin = 0; begin < keys.size(); begin += batch) {
    const size_t n = std::min(batch, keys.size() - begin);
    std::vector<uint32_t> chosen;
    sampler.Select({keys.data() + begin, n}, 0, chosen);
    std::vector<int64_t> sampled;
    for (const uint32_t i : chosen) sampled.push_back(keys[begin + i]);
    sampler.Use(sampled, static_cast<int64_t>(n));
  }
}

// Uses that a table of the `capacity` most recently used keys finds.
double HitRate(const MissSampler::Sample& sample, double capacity) {
  double hits = 0;
  for (size_t b = 0; b < sample.distances.size(); ++b) {
    if (std::exp2((b + 1.0) / MissSampler::kBinsPerDoubling) <= capacity + 1) {
      hits += sample.distances[b];
    }
  }
  return hits / sample.uses;
}

double LruHitRate(const std::vector<int64_t>& keys, size_t capacity) {
  std::list<int64_t> recent;
  std::unordered_map<int64_t, std::list<int64_t>::iterator> where;
  int64_t hits = 0;
  for (const int64_t key : keys) {
    if (const auto at = where.find(key); at != where.end()) {
      ++hits;
      recent.erase(at->second);
    } else if (recent.size() == capacity) {
      where.erase(recent.back());
      recent.pop_back();
    }
    recent.push_front(key);
    where[key] = recent.begin();
  }
  return static_cast<double>(hits) / static_cast<double>(keys.size());
}

TEST(The curve of few keys is that of an LRU cache) {
  const std::vector<int64_t> keys = Stream(40000, 5000, 1);
  MissSampler sampler(1 << 20);
  Feed(sampler, keys, 1);
  const MissSampler::Sample sample = sampler.sample();
  CHECK_EQ(sample.rate, 1.0);
  CHECK_EQ(sample.uses, 40000.0);
  // Where bins end.
  for (const int64_t capacity : {15, 127, 1023, 4095}) {
    CHECK_EQ(std::abs(HitRate(sample, static_cast<double>(capacity)) -
                      LruHitRate(keys, static_cast<size_t>(capacity))) < 0.002,
             true);
  }
}

TEST(A sample of many keys tells nearly the same and stays small) {
  const std::vector<int64_t> keys = Stream(600000, 400000, 2);
  MissSampler sampler(1 << 30);
  Feed(sampler, keys, 1);
  const MissSampler::Sample sample = sampler.sample();
  CHECK_EQ(sample.rate < 0.5, true);
  CHECK_EQ(std::ssize(sample.counts) <= MissSampler::kMaxKeys, true);
  for (const size_t capacity : {1000u, 10000u, 60000u}) {
    CHECK_EQ(std::abs(HitRate(sample, static_cast<double>(capacity)) - LruHitRate(keys, capacity)) <
                 0.05,
             true);
  }
}

TEST(Keys that never come back do not wear the sample out) {
  MissSampler sampler(4000);
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 500000; ++i) keys.push_back(i % 4 == 0 ? i % 1000 : 1000000 + i);
  Feed(sampler, keys, 100);
  const MissSampler::Sample sample = sampler.sample();
  CHECK_EQ(std::ssize(sample.counts) >= MissSampler::kMinKeys, true);
  CHECK_EQ(std::abs(HitRate(sample, 3000) - 0.25) < 0.05, true);
  CHECK_EQ(HitRate(sample, 700) < 0.01, true);
}

TEST(Occurrences of a batch share the fate of the first) {
  MissSampler sampler(1000);
  Feed(sampler, {5, 5, 5, 6}, 4);
  CHECK_EQ(sampler.sample().first_uses, 4.0);
  Feed(sampler, {5, 6, 5}, 3);
  const MissSampler::Sample sample = sampler.sample();
  CHECK_EQ(sample.first_uses, 4.0);
  CHECK_EQ(sample.distances[0], 1.0);                              // 6: nothing came after it
  CHECK_EQ(sample.distances[MissSampler::kBinsPerDoubling], 2.0);  // 5: one other
  CHECK_EQ(sample.counts == (std::vector<double>{5, 2}), true);
}

TEST(Evicted keys that come back are counted once) {
  MissSampler sampler(1000);
  Feed(sampler, {1, 2, 3}, 3);
  sampler.Evict(1);
  sampler.Evict(2);
  sampler.Evict(99);
  Feed(sampler, {1, 1, 3}, 3);
  Feed(sampler, {1}, 1);
  CHECK_EQ(sampler.sample().evicted, 3.0);
  CHECK_EQ(sampler.sample().returned, 1.0);
  sampler.Age(0.5);
  CHECK_EQ(sampler.sample().evicted, 1.5);
  CHECK_EQ(sampler.sample().uses, 3.5);
}

}  // namespace

TEST_MAIN()
