// MissSampler: what a table of another size would miss, measured on a sample of the keys.
//
// A key belongs to the sample or not by its hash, so of a sampled key every use is seen. What
// counts is the reuse distance: how many other keys were used since the last use of a key. A table
// that keeps the most recently used keys finds those whose distance is below its capacity. A batch
// is looked up as a whole, so its own keys do not count, and the occurrences of a key in it share
// one fate. Distances within the sample, divided by the sampling rate, are those of the whole
// stream (spatial sampling, as in SHARDS).
//
// A batch pays for its sampled occurrences: where they are more than one in kSpacing, half of the
// hashes leave the sample as well, down to about kMinKeys / 2.
//
// Memory is bounded by kMaxKeys. When there are more, half of the hashes leave the sample, until it
// reaches back `window` keys; from then on the keys that were used longest ago are forgotten.
//
// Thread safety: Select is const and may run together with itself; the rest needs exclusive access.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "embstore/hash.h"

namespace embstore {

class MissSampler {
 public:
  static constexpr int64_t kMaxKeys = 8192, kMinKeys = 1024;
  static constexpr int64_t kSpacing = 512;
  static constexpr int64_t kBinsPerDoubling = 8;
  static constexpr int64_t kBins = 40 * kBinsPerDoubling;

  // Weights are those of the whole stream: each is divided by the rate when it was seen, and those
  // of `counts` by the rate of now, as all uses of a key that is still in the sample were seen.
  struct Sample {
    double rate = 1.0;
    double uses = 0;        // occurrences of training batches
    double first_uses = 0;  // of them, of keys that were not known, or not any more
    double evicted = 0,
           returned = 0;            // rows that were evicted, and those that were asked for again
    std::vector<double> distances;  // [b]: uses whose distance is in [2^(b/8), 2^((b+1)/8)) - 1
    std::vector<double> counts;     // occurrences of each key that is known, largest first
  };

  explicit MissSampler(int64_t window) : window_(window), order_(kMaxPositions + 1) {}

  // One multiplication, since every key of every batch pays for it.
  static uint64_t SampleHash(int64_t key) {
    const auto bits = static_cast<uint64_t>(key);
    return (bits ^ bits >> 32) * 0x9e3779b97f4a7c15ULL;
  }
  // Appends the positions of sampled keys, counted from `first`.
  void Select(std::span<const int64_t> keys, int64_t first, std::vector<uint32_t>& chosen) const {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (SampleHash(keys[i]) <= highest_) chosen.push_back(static_cast<uint32_t>(first + i));
    }
  }

  // The sampled occurrences of a batch of `batch_keys`.
  void Use(std::span<const int64_t> keys, int64_t batch_keys);
  void Evict(int64_t key);  // its row went
  // Makes what was seen so far count less beside what comes: factor < 1.
  void Age(double factor);
  void set_window(int64_t window) { window_ = window; }

  Sample sample() const;

 private:
  static constexpr int64_t kMaxPositions = 4 * kMaxKeys;
  struct Known {
    int64_t position = -1;  // of the last use, ascending with time
    double count = 0;       // uses, divided by the rate of now
    double new_uses = 0;    // in the running batch
    bool evicted = false;
  };

  double weight() const { return 1.0 / rate_; }
  size_t BinOf(const Known& known) const;  // of its distance; kBins: it is new
  void Place(Known& known);                // its use is the newest
  int64_t After(int64_t position) const;
  void Move(int64_t position, int delta);
  void Renumber();
  void MakeRoom();
  void Halve();

  int64_t window_;
  double rate_ = 1.0;
  uint64_t highest_ = UINT64_MAX;   // hashes up to it are sampled
  int64_t seen_ = 0, sampled_ = 0;  // occurrences since the rate was last looked at
  int64_t next_position_ = 0;
  int64_t placed_ = 0;  // known keys that have a position
  std::unordered_map<int64_t, Known> known_;
  std::vector<int32_t> order_;  // a Fenwick tree: 1 at the position of each known key
  std::vector<double> distances_ = std::vector<double>(kBins + 1);
  double all_uses_ = 0;  // of sampled keys or not
  double uses_ = 0, evicted_ = 0, returned_ = 0;
  double forgotten_ = 0;  // uses of keys that are not known any more
};

}  // namespace embstore
