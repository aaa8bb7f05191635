// Finding many keys in an index, on several threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "embstore/index_view.h"
#include "embstore/kernels.h"
#include "embstore/parallel.h"
#include "embstore/score_clock.h"

namespace embstore {

// Calls visit(first, slots, rows, count) for blocks of keys: slots[i] and rows[i] are those of
// keys[first + i], or kNoSlot and kMissingRow. Scores stay.
template <typename Visit>
void ForKeyBlocks(const IndexView& index, std::span<const int64_t> keys, const Visit& visit) {
  constexpr int64_t kKeysPerTask = 4096;
  const auto n = static_cast<int64_t>(keys.size());
  ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
    const int64_t first = task * kKeysPerTask, count = std::min(kKeysPerTask, n - first);
    Slot slots[kKeysPerTask];
    Row rows[kKeysPerTask];
    ActiveKernels().find(index, keys.data() + first, count, slots, rows, ScoreUpdate::kKeep, 0,
                         true);
    visit(first, slots, rows, count);
  });
}

}  // namespace embstore
