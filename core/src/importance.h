// Scores by importance: what the gradients of a batch add to the scores of its keys.
#pragma once

#include <span>
#include <vector>

#include "embstore/kernels.h"
#include "embstore/table.h"

namespace embstore {

// A gradient that went to a shared row: for the key that may earn a row of its own.
struct SharedGradient {
  uint32_t index;  // of the occurrence
  double norm;
};

// Adds the norm of each row's summed gradient to the score of its key. `sorted` are whole groups of
// equal rows. Gradients of shared rows are returned. Threads may call it for different rows.
std::vector<SharedGradient> AddImportance(const SlotList& slots, std::span<const Occurrence> sorted,
                                          const VectorsView& gradients);

}  // namespace embstore
