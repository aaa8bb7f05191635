// ScoreClock: which score the next training batch of a table gives to its keys.
//
// Thread safety: none; the table guards it. RenewScore may run on several threads.
//
// Invariants
//  1. Every score is at least 1: 0 means that a slot is free.
//  2. kTimestamp and kNoEviction: each score is larger than all that were given out or seen before.
//  3. kStep: scores rise by one with each batch and stop at UINT64_MAX.
//  4. kAgedLfu and kImportance: half-lives pass with the batches, or with the keys of batches.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "embstore/aged_score.h"
#include "embstore/types.h"

namespace embstore {

// What a hit does to the score of its key.
enum class ScoreUpdate : uint8_t { kKeep = 0, kSet = 1, kCount = 2, kAge = 3 };

// Whether each occurrence of a key counts.
constexpr bool AddsUp(ScoreUpdate update) {
  return update == ScoreUpdate::kCount || update == ScoreUpdate::kAge;
}

// Where the score stays, it writes elsewhere, because a branch on which one it is would be
// mispredicted.
inline void SetScoreUnless(bool stays, uint64_t& of_key, uint64_t score) {
  uint64_t elsewhere;
  uint64_t* target = stays ? &elsewhere : &of_key;
  asm("" : "+r"(target));  // else compilers make it a branch again
  std::atomic_ref<uint64_t>(*target).store(score, std::memory_order_relaxed);
}

// Threads may renew the same score together, unless they say that they are alone, which is cheaper.
inline void RenewScore(uint64_t& of_key, ScoreUpdate update, uint64_t score, bool alone = false) {
  std::atomic_ref<uint64_t> stored(of_key);
  if (update == ScoreUpdate::kSet) {
    // Frequent keys are read by many threads and need the write once.
    SetScoreUnless(stored.load(std::memory_order_relaxed) == score, of_key, score);
  }
  if (update == ScoreUpdate::kAge) {
    uint64_t seen = stored.load(std::memory_order_relaxed);
    if (alone) {
      stored.store(AddAged(seen, score), std::memory_order_relaxed);
      return;
    }
    while (!stored.compare_exchange_weak(seen, AddAged(seen, score), std::memory_order_relaxed)) {
    }
  }
  if (update != ScoreUpdate::kCount) return;
  // The largest count stays: one more would be 0, which says that the slot is free.
  if (alone) {
    const uint64_t seen = stored.load(std::memory_order_relaxed);
    stored.store(seen + (seen != UINT64_MAX), std::memory_order_relaxed);
  } else if (stored.fetch_add(1, std::memory_order_relaxed) == UINT64_MAX) [[unlikely]] {
    stored.store(UINT64_MAX, std::memory_order_relaxed);
  }
}

// The score of a training batch, and what a hit does with it.
struct BatchScore {
  ScoreUpdate update = ScoreUpdate::kKeep;
  uint64_t score = 0;
};

// No key that a batch has found has a smaller score.
inline uint64_t LeastScoreOfHit(const BatchScore& batch) {
  switch (batch.update) {
    case ScoreUpdate::kKeep:
      return 0;
    case ScoreUpdate::kCount:
      return 2;
    case ScoreUpdate::kSet:
    case ScoreUpdate::kAge:
      return batch.score;
  }
  return 0;
}

// How long it takes an aged score to lose half of its worth.
struct HalfLife {
  int64_t length = 1;
  bool in_batches = false;  // else in keys of batches
};

class ScoreClock {
 public:
  // `table` is named in messages.
  ScoreClock(ScoreStrategy strategy, HalfLife half_life, std::string table)
      : strategy_(strategy), age_(half_life), table_(std::move(table)) {}

  // The score of the next batch, which has this many keys; advances. Throws InvalidState as
  // RequireScore does.
  BatchScore Next(int64_t keys);
  // What Next would give, without advancing: 0 for kLfu, and for kCustomized before a score is set.
  // A later Next never gives less. Aged strategies: the moment in half-lives, with a fraction.
  uint64_t Peek();
  int64_t half_life() const { return half_life_; }  // the current one, from 0
  void RequireScore() const;  // throws InvalidState when kCustomized has no score yet

  // Throw InvalidArgument for another strategy, and for 0.
  void set_custom_score(uint64_t score);  // kCustomized
  void set_step(uint64_t step);           // kStep, or what Peek gave with an aged strategy
  void RequireStep(uint64_t step) const;  // throws as set_step does

  // Later timestamps are at least `score`, or larger than `score`.
  void RaiseTo(uint64_t score);
  void RaiseAbove(uint64_t score);

 private:
  bool ages() const {
    return strategy_ == ScoreStrategy::kAgedLfu || strategy_ == ScoreStrategy::kImportance;
  }

  ScoreStrategy strategy_;
  HalfLife age_;
  std::string table_;
  int64_t half_life_ = 0, ticks_ = 0;  // ticks_ of age_.length have passed
  uint64_t last_timestamp_ = 0, step_ = 1, custom_score_ = 0;
};

}  // namespace embstore
