#include "embstore/miss_sampler.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>

#include "embstore/table.h"

namespace embstore {

void MissSampler::Use(std::span<const int64_t> keys, int64_t batch_keys) {
  std::vector<Known*> used;
  for (const int64_t key : keys) {
    Known& known = known_.try_emplace(key).first->second;
    if (known.new_uses == 0) used.push_back(&known);
    known.new_uses += weight();
  }
  std::vector<size_t> bins;
  for (const Known* known : used) bins.push_back(BinOf(*known));  // before anything moves
  for (size_t i = 0; i < used.size(); ++i) {
    Known& known = *used[i];
    distances_[bins[i]] += known.new_uses;
    uses_ += known.new_uses;
    known.count += known.new_uses;
    known.new_uses = 0;
    if (known.evicted) returned_ += weight();
    known.evicted = false;
    if (known.position >= 0) Move(known.position, -1);
    Place(known);
  }
  while (std::ssize(known_) > kMaxKeys) MakeRoom();
  all_uses_ += static_cast<double>(batch_keys);
  seen_ += batch_keys;
  sampled_ += std::ssize(keys);
  constexpr int64_t kEnoughToTell = 1 << 16;
  if (seen_ < kEnoughToTell) return;
  if (sampled_ > seen_ / kSpacing && std::ssize(known_) >= kMinKeys) Halve();
  seen_ = sampled_ = 0;
}

size_t MissSampler::BinOf(const Known& known) const {
  if (known.position < 0) return kBins;
  const double distance = static_cast<double>(After(known.position)) / rate_;
  return std::min<size_t>(static_cast<size_t>(std::log2(distance + 1) * kBinsPerDoubling),
                          kBins - 1);
}

void MissSampler::Evict(int64_t key) {
  if (SampleHash(key) > highest_) return;
  evicted_ += weight();
  const auto at = known_.find(key);
  if (at != known_.end()) at->second.evicted = true;
}

void MissSampler::Age(double factor) {
  for (double& weight : distances_) weight *= factor;
  for (auto& [key, known] : known_) known.count *= factor;
  uses_ *= factor;
  forgotten_ *= factor;
  all_uses_ *= factor;
  evicted_ *= factor;
  returned_ *= factor;
}

MissSampler::Sample MissSampler::sample() const {
  Sample sample;
  sample.rate = rate_;
  sample.uses = all_uses_;
  sample.first_uses = distances_[kBins];
  sample.evicted = evicted_;
  sample.returned = returned_;
  sample.distances.assign(distances_.begin(), distances_.end() - 1);
  for (const auto& [key, known] : known_) sample.counts.push_back(known.count);
  std::sort(sample.counts.begin(), sample.counts.end(), std::greater<>());
  // A few keys make much of the stream, and whether they are in the sample is chance. They come
  // back soon and often, so what the sample has too much or too little of belongs to the shortest
  // distances and the largest counts.
  const auto take = [](double surplus, std::vector<double>& weights) {
    for (double& weight : weights) {
      const double taken = std::min(surplus, weight);
      weight -= taken;
      surplus -= taken;
      if (surplus <= 0) break;
    }
  };
  take(uses_ - all_uses_, sample.distances);
  const double counted = std::accumulate(sample.counts.begin(), sample.counts.end(), forgotten_);
  take(counted - all_uses_, sample.counts);
  std::sort(sample.counts.begin(), sample.counts.end(), std::greater<>());
  return sample;
}

void MissSampler::Place(Known& known) {
  if (next_position_ == kMaxPositions) {
    known.position = kMaxPositions;  // after all others
    Renumber();
  } else {
    known.position = next_position_;
    Move(next_position_++, 1);
  }
}

// How many known keys were used after this position.
int64_t MissSampler::After(int64_t position) const {
  int64_t until = 0;
  for (int64_t i = position + 1; i > 0; i -= i & -i) until += order_[static_cast<size_t>(i)];
  return placed_ - until;
}

void MissSampler::Move(int64_t position, int delta) {
  placed_ += delta;
  for (int64_t i = position + 1; i < std::ssize(order_); i += i & -i) {
    order_[static_cast<size_t>(i)] += delta;
  }
}

// Positions from 0 on, in the same order.
void MissSampler::Renumber() {
  std::vector<Known*> by_time;
  by_time.reserve(known_.size());
  for (auto& [key, known] : known_) {
    if (known.position >= 0) by_time.push_back(&known);
  }
  std::sort(by_time.begin(), by_time.end(),
            [](const Known* a, const Known* b) { return a->position < b->position; });
  std::fill(order_.begin(), order_.end(), 0);
  next_position_ = placed_ = 0;
  for (Known* known : by_time) {
    known->position = next_position_;
    Move(next_position_++, 1);
  }
}

void MissSampler::MakeRoom() {
  // An eighth at a time, so that the scan is rare.
  constexpr int64_t kForgotten = kMaxKeys / 8;
  if (static_cast<double>(kMaxKeys - kForgotten) / rate_ < static_cast<double>(window_)) {
    Halve();
    return;
  }
  std::vector<int64_t> positions;
  for (const auto& [key, known] : known_) positions.push_back(known.position);
  std::nth_element(positions.begin(), positions.begin() + kForgotten, positions.end());
  const int64_t first_kept = positions[kForgotten];
  std::erase_if(known_, [&](const auto& entry) {
    if (entry.second.position >= first_kept) return false;
    forgotten_ += entry.second.count;
    return true;
  });
  Renumber();
}

void MissSampler::Halve() {
  highest_ /= 2;
  rate_ /= 2;
  std::erase_if(known_, [&](const auto& entry) { return SampleHash(entry.first) > highest_; });
  for (auto& [key, known] : known_)
    known.count *= 2;  // all its uses were seen: it stands for twice as many
  Renumber();
}

int64_t Table::MissWindow() const {
  constexpr int64_t kTimesAsLarge = 8;  // the largest table that is worth to be asked about
  return std::min(row_limit_, KeyIndex::kMaxCapacity) * kTimesAsLarge;
}

void Table::SampleMisses(bool on) {
  std::unique_lock guard(lock_);
  RequireOpen();
  miss_sampler_ = on ? std::make_unique<MissSampler>(MissWindow()) : nullptr;
}

bool Table::samples_misses() const {
  std::shared_lock guard(lock_);
  return miss_sampler_ != nullptr;
}

MissSampler& Table::RequireMissSampler() const {
  RequireOpen();
  if (!miss_sampler_) {
    throw InvalidState("misses of table '" + options_.name +
                       "' are not sampled: call sample_misses() before training");
  }
  return *miss_sampler_;
}

MissSampler::Sample Table::MissSample() const {
  std::shared_lock guard(lock_);
  return RequireMissSampler().sample();
}

void Table::AgeMissSample(double factor) {
  std::unique_lock guard(lock_);
  RequireMissSampler().Age(factor);
}

}  // namespace embstore
