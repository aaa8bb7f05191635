// The backward pass: sums the gradients of a batch for each row and applies the optimizer.
//
// Thread safety: every function may be called from any thread and locks its tables.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "embstore/table.h"

namespace embstore {

// The gradients of one table's batch. Pooled batches pass what LookUp got; `gradients` are then
// those of the bags.
struct GradientRequest {
  const SlotList* slots = nullptr;
  Pooling pooling = Pooling::kNone;
  std::span<const int64_t> offsets;
  const float* weights = nullptr;
  VectorsView gradients;  // base, dtype, stride, positions
  StepOptions step;
  bool by_number = false;  // the keys of the list are numbers of shared rows
};

// Sums the gradients of each row in the order of the batch and updates the row once.
// All requests are validated before the first row changes.
void ApplyGradients(std::span<const GradientRequest> requests);

// The sums alone: keys (u) in the order of their rows and their gradients (u, dim). Shared rows
// come first; `shared` are their numbers, which stand for several keys.
struct ReducedGradients {
  std::vector<int64_t> keys;
  std::vector<float> sums;
  std::vector<int64_t> shared;
};
ReducedGradients ReduceGradients(const GradientRequest& request);

// The derivative by the weights of a pooled batch: out (n).
void WeightGradients(const GradientRequest& request, float* out);

// The gradients of one table by key: one for each key, or for each bag where offsets divide the
// keys into bags that were summed.
struct KeyGradients {
  std::shared_ptr<Table> table;
  std::span<const int64_t> keys;
  std::span<const int64_t> offsets;
  VectorsView gradients;
  StepOptions step;
};

// Applies gradients given by key, for several tables, each at most once. Keys that are not there
// move their shared row if that is in use, else they are skipped; returns how many occurrences were
// not there. With renew_scores the rows get the score of a training batch, so that an increment
// since a moment before the call holds them even if they were looked up earlier.
int64_t ApplyGradientsByKey(std::span<const KeyGradients> requests, bool renew_scores = false);
int64_t ApplyGradientsByKey(Table& table, std::span<const int64_t> keys,
                            const VectorsView& gradients, const StepOptions& step,
                            bool renew_scores = false);

// The same for shared rows, by number. Throws InvalidArgument when one is not below shared_rows.
void ApplyGradientsToShared(Table& table, std::span<const int64_t> numbers,
                            const VectorsView& gradients, const StepOptions& step);

}  // namespace embstore
