// ScoreClock: which score the next training batch of a table gives to its keys.
//
// Thread safety: none; the table guards it. RenewScore may run on several threads.
//
// Invariants
//  1. Every score is at least 1: 0 means that a slot is free.
//  2. kTimestamp and kNoEviction: each score is larger than all that were given out or seen before.
//  3. kStep: scores rise by one with each batch and stop at UINT64_MAX.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "embstore/types.h"

namespace embstore {

// What a hit does to the score of its key.
enum class ScoreUpdate : uint8_t { kKeep = 0, kSet = 1, kCount = 2 };

// Threads may renew the same score together.
inline void RenewScore(uint64_t& of_key, ScoreUpdate update, uint64_t score) {
  std::atomic_ref<uint64_t> stored(of_key);
  // Frequent keys are read by many and need the write once.
  if (update == ScoreUpdate::kSet && stored.load(std::memory_order_relaxed) != score) {
    stored.store(score, std::memory_order_relaxed);
  }
  if (update != ScoreUpdate::kCount) return;
  // The largest count stays: one more would be 0, which says that the slot is free.
  if (stored.fetch_add(1, std::memory_order_relaxed) == UINT64_MAX) [[unlikely]] {
    stored.store(UINT64_MAX, std::memory_order_relaxed);
  }
}

// The score of a training batch, and what a hit does with it.
struct BatchScore {
  ScoreUpdate update = ScoreUpdate::kKeep;
  uint64_t score = 0;
};

class ScoreClock {
 public:
  // `table` is named in messages.
  ScoreClock(ScoreStrategy strategy, std::string table)
      : strategy_(strategy), table_(std::move(table)) {}

  // The score of the next batch; advances. Throws InvalidState as RequireScore does.
  BatchScore Next();
  // What Next would give, without advancing: 0 for kLfu, and for kCustomized before a score is set.
  // A later Next never gives less.
  uint64_t Peek();
  void RequireScore() const;  // throws InvalidState when kCustomized has no score yet

  // Throw InvalidArgument for another strategy, and for 0.
  void set_custom_score(uint64_t score);  // kCustomized
  void set_step(uint64_t step);           // kStep

  // Later timestamps are at least `score`, or larger than `score`.
  void RaiseTo(uint64_t score);
  void RaiseAbove(uint64_t score);

 private:
  ScoreStrategy strategy_;
  std::string table_;
  uint64_t last_timestamp_ = 0, step_ = 1, custom_score_ = 0;
};

}  // namespace embstore
