#include "embstore/frequency_sketch.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace embstore {
namespace {

// The upper bits of a positive float32: 8 of the exponent, 8 of the fraction. Exact up to 512.
uint16_t Narrow(float sum) {
  const auto bits = std::bit_cast<uint32_t>(sum);
  return static_cast<uint16_t>(std::min<uint32_t>((bits + 0x4000) >> 15, 0xfeff));
}

float Widen(uint16_t sum) { return std::bit_cast<float>(static_cast<uint32_t>(sum) << 15); }

uint16_t TagOf(uint64_t hash) { return static_cast<uint16_t>(hash >> 48); }

// By bits that choose neither the bucket nor the tag.
bool IsSample(uint64_t hash) { return (hash >> 43) % 32 == 0; }

}  // namespace

FrequencySketch::FrequencySketch(int64_t keys, uint64_t seed)
    : secret_(SecretOf(seed ^ 0x9e3779b97f4a7c15ULL)),
      size_(BucketsFor(keys)),
      memory_(size_ * sizeof(Bucket)) {}

size_t FrequencySketch::BucketsFor(int64_t keys) {
  return std::bit_ceil(static_cast<size_t>(std::max<int64_t>(keys / kEntries, 1)));
}

int64_t FrequencySketch::BytesFor(int64_t keys) {
  return static_cast<int64_t>(BucketsFor(keys) * sizeof(Bucket));
}

FrequencySketch::Bucket& FrequencySketch::Aged(uint64_t hash, int64_t half_life) {
  Bucket& bucket = buckets()[BucketOf(hash)];
  const auto now = static_cast<uint32_t>(half_life);
  if (bucket.half_life == now) return bucket;
  // A half is one less in the exponent, which is in the upper byte.
  const auto halves = static_cast<uint16_t>(std::min(now - bucket.half_life, 255u) << 8);
  for (uint16_t& sum : bucket.sums) sum = sum > halves ? sum - halves : 0;
  bucket.half_life = now;
  return bucket;
}

double FrequencySketch::Add(int64_t key, double amount, int64_t half_life) {
  const uint64_t hash = Hash(key);
  Bucket& bucket = Aged(hash, half_life);
  const uint16_t tag = TagOf(hash);
  // Without branches, which the processor could not predict.
  uint32_t found = 0, smallest = UINT32_MAX;
  for (uint32_t i = 0; i < kEntries; ++i) {
    found |= static_cast<uint32_t>(bucket.tags[i] == tag && bucket.sums[i] != 0) << i;
    smallest = std::min(smallest, uint32_t{bucket.sums[i]} << 4 | i);
  }
  if (found) {
    uint16_t& stored = bucket.sums[std::countr_zero(found)];
    const double sum = Widen(stored) + amount;
    stored = Narrow(static_cast<float>(sum));
    return sum;
  }
  bucket.tags[smallest % 16] = tag;
  bucket.sums[smallest % 16] = Narrow(static_cast<float>(amount));
  return amount;
}

bool FrequencySketch::ReturnsAreRare() const {
  constexpr uint32_t kEnough = 64, kOneIn = 4;
  return samples_.new_keys >= kEnough && kOneIn * samples_.returns < samples_.new_keys;
}

FrequencySketch::Sighting FrequencySketch::Meet(int64_t key, bool once, double amount,
                                                int64_t half_life) {
  const auto now = static_cast<uint32_t>(half_life);
  if (samples_.half_life != now) {
    const uint32_t passed = std::min(now - samples_.half_life, 31u);
    samples_ = {now, samples_.new_keys >> passed, samples_.returns >> passed};
  }
  const double sum = Add(key, amount, half_life);
  const bool is_new = once && sum == amount, is_sample = IsSample(Hash(key));
  constexpr double kOnce = 2.0;  // an occurrence counts less than that
  samples_.new_keys += is_sample && is_new;
  samples_.returns += is_sample && sum > amount && sum - amount < kOnce;
  return {sum, is_new, is_sample};
}

double FrequencySketch::Take(int64_t key, int64_t half_life) {
  const uint64_t hash = Hash(key);
  Bucket& bucket = Aged(hash, half_life);
  for (int i = 0; i < kEntries; ++i) {
    if (bucket.tags[i] != TagOf(hash) || bucket.sums[i] == 0) continue;
    const double sum = Widen(bucket.sums[i]);
    bucket.sums[i] = 0;
    return sum;
  }
  return 0.0;
}

std::vector<uint16_t> FrequencySketch::Save() const {
  const size_t entries = size_ * sizeof(Bucket) / sizeof(uint16_t);
  std::vector<uint16_t> saved(entries + kSampleWords);
  std::memcpy(saved.data(), buckets(), size_ * sizeof(Bucket));
  std::memcpy(saved.data() + entries, &samples_, sizeof(Samples));
  return saved;
}

bool FrequencySketch::Restore(std::span<const uint16_t> saved) {
  const size_t entries = size_ * sizeof(Bucket) / sizeof(uint16_t);
  const bool has_samples = saved.size() == entries + kSampleWords;  // older ones have none
  if (saved.size() != entries && !has_samples) return false;
  std::memcpy(buckets(), saved.data(), size_ * sizeof(Bucket));
  samples_ = {};
  if (has_samples)
    std::memcpy(static_cast<void*>(&samples_), saved.data() + entries, sizeof(Samples));
  return true;
}

}  // namespace embstore
