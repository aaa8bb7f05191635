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

}  // namespace

FrequencySketch::FrequencySketch(int64_t keys, uint64_t seed)
    : secret_(SecretOf(seed ^ 0x9e3779b97f4a7c15ULL)), buckets_(BucketsFor(keys), Bucket{}) {}

size_t FrequencySketch::BucketsFor(int64_t keys) {
  return std::bit_ceil(static_cast<size_t>(std::max<int64_t>(keys / kEntries, 1)));
}

int64_t FrequencySketch::BytesFor(int64_t keys) {
  return static_cast<int64_t>(BucketsFor(keys) * sizeof(Bucket));
}

FrequencySketch::Bucket& FrequencySketch::Aged(uint64_t hash, int64_t half_life) {
  Bucket& bucket = buckets_[BucketOf(hash)];
  const auto now = static_cast<uint32_t>(half_life);
  if (bucket.half_life == now) return bucket;
  const float factor = std::ldexp(1.0f, -static_cast<int>(std::min(now - bucket.half_life, 200u)));
  for (uint16_t& sum : bucket.sums) sum = Narrow(Widen(sum) * factor);
  bucket.half_life = now;
  return bucket;
}

double FrequencySketch::Add(int64_t key, double amount, int64_t half_life) {
  const uint64_t hash = Hash(key);
  Bucket& bucket = Aged(hash, half_life);
  const uint16_t tag = TagOf(hash);
  int smallest = 0;
  for (int i = 0; i < kEntries; ++i) {
    if (bucket.tags[i] == tag && bucket.sums[i] != 0) {
      const double sum = Widen(bucket.sums[i]) + amount;
      bucket.sums[i] = Narrow(static_cast<float>(sum));
      return sum;
    }
    if (bucket.sums[i] < bucket.sums[smallest]) smallest = i;
  }
  bucket.tags[smallest] = tag;
  bucket.sums[smallest] = Narrow(static_cast<float>(amount));
  return amount;
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
  std::vector<uint16_t> saved(buckets_.size() * sizeof(Bucket) / sizeof(uint16_t));
  std::memcpy(saved.data(), buckets_.data(), buckets_.size() * sizeof(Bucket));
  return saved;
}

bool FrequencySketch::Restore(std::span<const uint16_t> saved) {
  if (saved.size_bytes() != buckets_.size() * sizeof(Bucket)) return false;
  std::memcpy(buckets_.data(), saved.data(), saved.size_bytes());
  return true;
}

}  // namespace embstore
