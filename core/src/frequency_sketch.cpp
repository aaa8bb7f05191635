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
    : secret_(SecretOf(seed ^ 0x9e3779b97f4a7c15ULL)),
      count_(BucketsFor(keys)),
      buffer_(count_ * sizeof(Bucket)) {}

size_t FrequencySketch::BucketsFor(int64_t keys) {
  return std::bit_ceil(static_cast<size_t>(std::max<int64_t>(keys / kEntries, 1)));
}

int64_t FrequencySketch::BytesFor(int64_t keys) {
  return static_cast<int64_t>(BucketsFor(keys) * sizeof(Bucket));
}

FrequencySketch::Bucket& FrequencySketch::Aged(uint64_t hash, int64_t half_life) {
  Bucket& bucket = buckets()[BucketOf(hash)];
  changes_.Mark(BucketOf(hash) * sizeof(Bucket));
  const auto now = static_cast<uint32_t>(half_life);
  if (bucket.half_life == now) return bucket;
  const float factor = std::ldexp(1.0f, -static_cast<int>(std::min(now - bucket.half_life, 200u)));
  for (uint16_t& sum : bucket.sums) sum = Narrow(Widen(sum) * factor);
  bucket.half_life = now;
  return bucket;
}

// Without branches on the entries, which the processor could not predict.
int FrequencySketch::Find(const Bucket& bucket, uint16_t tag) {
  uint32_t found = 0;
  for (int i = 0; i < kEntries; ++i) {
    found |= static_cast<uint32_t>((bucket.tags[i] == tag) & (bucket.sums[i] != 0)) << i;
  }
  return found ? std::countr_zero(found) : -1;
}

double FrequencySketch::AddHash(uint64_t hash, double amount, int64_t half_life) {
  Bucket& bucket = Aged(hash, half_life);
  const uint16_t tag = TagOf(hash);
  if (const int at = Find(bucket, tag); at >= 0) {
    const double sum = Widen(bucket.sums[at]) + amount;
    bucket.sums[at] = Narrow(static_cast<float>(sum));
    return sum;
  }
  uint32_t smallest = UINT32_MAX;  // a sum, and its place
  for (uint32_t i = 0; i < kEntries; ++i) {
    smallest = std::min(smallest, static_cast<uint32_t>(bucket.sums[i]) << 4 | i);
  }
  bucket.tags[smallest % 16] = tag;
  bucket.sums[smallest % 16] = Narrow(static_cast<float>(amount));
  return amount;
}

double FrequencySketch::TakeHash(uint64_t hash, int64_t half_life) {
  Bucket& bucket = Aged(hash, half_life);
  const int at = Find(bucket, TagOf(hash));
  if (at < 0) return 0.0;
  const double sum = Widen(bucket.sums[at]);
  bucket.sums[at] = 0;
  return sum;
}

std::vector<uint16_t> FrequencySketch::Save() const {
  std::vector<uint16_t> saved(count_ * sizeof(Bucket) / sizeof(uint16_t));
  std::memcpy(saved.data(), buffer_.data(), count_ * sizeof(Bucket));
  return saved;
}

bool FrequencySketch::Restore(std::span<const uint16_t> saved) {
  if (saved.size_bytes() != count_ * sizeof(Bucket)) return false;
  std::memcpy(buffer_.data(), saved.data(), saved.size_bytes());
  return true;
}

}  // namespace embstore
