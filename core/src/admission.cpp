#include "embstore/admission.h"

#include <algorithm>
#include <bit>
#include <string>

#include "embstore/hash.h"
#include "embstore/types.h"

namespace embstore {
namespace {

constexpr size_t kEntriesPerBucket = 16;
constexpr size_t kFirstBuckets = 64;

// Independent of HashKey, which decides ownership.
uint64_t FilterHash(int64_t key) {
  return HashKey(static_cast<int64_t>(static_cast<uint64_t>(key) ^ 0x9e3779b97f4a7c15ULL));
}

}  // namespace

AdmissionFilter::AdmissionFilter(int64_t threshold)
    : threshold_(threshold), count_bits_(std::bit_width(static_cast<uint64_t>(threshold))) {
  if (threshold < 1 || threshold > kMaxThreshold) {
    throw InvalidArgument("admission_threshold should be between 1 and " +
                          std::to_string(kMaxThreshold) + " but is: " + std::to_string(threshold));
  }
  entries_.resize(kFirstBuckets * kEntriesPerBucket);
}

int64_t AdmissionFilter::BytesFor(int64_t keys) {
  const auto entries = std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(keys, 1)));
  return static_cast<int64_t>(std::max(entries, uint64_t{kFirstBuckets * kEntriesPerBucket}) *
                              sizeof(uint16_t));
}

void AdmissionFilter::Reserve(int64_t keys) {
  // An entry does not know its whole hash, so both halves get a copy; the copy in the wrong half is
  // never counted again and is replaced in time.
  while (static_cast<int64_t>(entries_.size()) < keys) {
    const size_t size = entries_.size();
    entries_.resize(2 * size);
    std::copy_n(entries_.begin(), size, entries_.begin() + static_cast<std::ptrdiff_t>(size));
    if (changes_.is_on()) changes_.Track(counters().size(), /*from_zero=*/true);
  }
}

uint16_t* AdmissionFilter::Bucket(uint64_t hash) {
  const size_t buckets = entries_.size() / kEntriesPerBucket;
  const size_t first = (hash & (buckets - 1)) * kEntriesPerBucket;
  changes_.Mark(first * sizeof(uint16_t));
  return entries_.data() + first;
}

const uint16_t* AdmissionFilter::Bucket(uint64_t hash) const {
  const size_t buckets = entries_.size() / kEntriesPerBucket;
  return entries_.data() + (hash & (buckets - 1)) * kEntriesPerBucket;
}

uint16_t AdmissionFilter::Fingerprint(uint64_t hash) const {
  return static_cast<uint16_t>((hash >> 48) << count_bits_);
}

// A used entry has a count of at least 1, so it is never 0, whatever its fingerprint.
int AdmissionFilter::Find(const uint16_t* bucket, uint16_t fingerprint) const {
  for (size_t i = 0; i < kEntriesPerBucket; ++i) {
    if (bucket[i] != 0 && (bucket[i] >> count_bits_) == (fingerprint >> count_bits_)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void AdmissionFilter::Count(int64_t key) {
  const uint64_t hash = FilterHash(key);
  uint16_t* const bucket = Bucket(hash);
  const uint16_t fingerprint = Fingerprint(hash);
  const auto mask = static_cast<uint16_t>((1 << count_bits_) - 1);
  if (const int at = Find(bucket, fingerprint); at >= 0) {
    if ((bucket[at] & mask) < threshold_) ++bucket[at];
    return;
  }
  size_t smallest = 0;
  for (size_t i = 1; i < kEntriesPerBucket; ++i) {
    if ((bucket[i] & mask) < (bucket[smallest] & mask)) smallest = i;
  }
  bucket[smallest] = static_cast<uint16_t>(fingerprint | 1);
}

bool AdmissionFilter::IsAdmitted(int64_t key) const {
  const uint64_t hash = FilterHash(key);
  const uint16_t* const bucket = Bucket(hash);
  const int at = Find(bucket, Fingerprint(hash));
  return at >= 0 && (bucket[at] & ((1 << count_bits_) - 1)) >= threshold_;
}

void AdmissionFilter::Forget(int64_t key) {
  const uint64_t hash = FilterHash(key);
  uint16_t* const bucket = Bucket(hash);
  if (const int at = Find(bucket, Fingerprint(hash)); at >= 0) bucket[at] = 0;
}

std::vector<uint16_t> AdmissionFilter::Save() const {
  std::vector<uint16_t> saved;
  saved.reserve(entries_.size() + 1);
  saved.push_back(static_cast<uint16_t>(threshold_));
  saved.insert(saved.end(), entries_.begin(), entries_.end());
  return saved;
}

bool AdmissionFilter::Apply(const TakenCounters& taken) {
  if (taken.header.size() != 1 || taken.header[0] != threshold_) return false;
  const size_t size = taken.bytes / sizeof(uint16_t);
  const bool fits = size >= kFirstBuckets * kEntriesPerBucket && std::has_single_bit(size);
  if (taken.from_zero ? !fits : size != entries_.size()) return false;
  entries_.resize(size);
  taken.Apply(counters());
  if (changes_.is_on()) changes_.Track(counters().size(), /*from_zero=*/true);
  return true;
}

void AdmissionFilter::RequireForm(std::span<const uint16_t> saved) {
  const size_t size = saved.empty() ? 0 : saved.size() - 1;
  if (size < kFirstBuckets * kEntriesPerBucket || !std::has_single_bit(size)) {
    throw InvalidArgument(
        "counters should be a threshold and a power of two of entries (at least " +
        std::to_string(kFirstBuckets * kEntriesPerBucket) +
        ") but have this length: " + std::to_string(saved.size()));
  }
}

bool AdmissionFilter::Restore(std::span<const uint16_t> saved) {
  RequireForm(saved);
  if (saved[0] != threshold_) return false;
  entries_.assign(saved.begin() + 1, saved.end());
  if (changes_.is_on()) changes_.Track(counters().size(), /*from_zero=*/true);
  return true;
}

}  // namespace embstore
