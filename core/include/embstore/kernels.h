// The hot loops. Each is compiled for plain C++, AVX2 and AVX-512 and picked once at start.
//
// Thread safety: pure functions of their arguments; callers give disjoint outputs or slots.
// Sums are taken in a fixed order that does not depend on the instruction set, and no
// multiplication is fused with an addition, so every build gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "embstore/optimizer.h"
#include "embstore/types.h"

namespace embstore {

struct IndexView;                  // index_view.h
enum class ScoreUpdate : uint8_t;  // score_clock.h

// Rows in memory: row s is at base + s * stride_bytes; state (float32) begins at
// state_offset_bytes.
struct RowsView {
  std::byte* base = nullptr;
  int64_t stride_bytes = 0;
  int64_t dim = 0;
  DType dtype = DType::kFloat32;
  int64_t state_offset_bytes = 0;
};

// Vectors of the batch: for occurrence i (or bag g) of the caller.
//   bag_of == nullptr: vector i lies at base + i * stride (elements)
//   else: g = bag_of[i]; vector at base + (positions ? positions[g] : g * stride)
// scale: one factor for each occurrence (weights and 1/length of a mean), or nullptr for 1.
struct VectorsView {
  void* base = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride = 0;
  const uint32_t* bag_of = nullptr;
  const int64_t* positions = nullptr;
  const float* scale = nullptr;
};

// An occurrence of a key in the batch; sorted by row, then by index.
struct Occurrence {
  uint32_t row;
  uint32_t index;
};

inline constexpr int64_t kLine = 64;  // bytes of a cache line

struct Kernels {
  const char* name;  // "avx512", "avx2" or "plain"

  // slots[i] and rows[i] = slot and row of keys[i], or kNoSlot and kMissingRow. Renews the scores
  // of those that are there. slots may be null.
  void (*find)(const IndexView& index, const int64_t* keys, int64_t n, Slot* slots, Row* rows,
               ScoreUpdate update, uint64_t score);

  // out row i = row numbers[i] (converted), zeros for kMissingRow, extra[j] for ExtraRow(j).
  void (*gather)(const RowsView& rows, const Row* numbers, int64_t n, const float* extra, void* out,
                 DType out_dtype, int64_t out_stride);

  // Bags [bag_begin, bag_end): out(bag) = sum over i in [offsets[bag], offsets[bag + 1]) of
  // scale_i * row(numbers[i]), accumulated in float32 in order. scale_i = weights[i] (or 1), over
  // the length of the bag for a mean. Empty bags are zeros. out(bag) lies at base + (positions ?
  // positions[bag] : bag * stride); bag_of and scale are unused.
  void (*pool)(const RowsView& rows, const Row* numbers, const float* extra, const int64_t* offsets,
               const float* weights, bool mean, int64_t bag_begin, int64_t bag_end,
               const VectorsView& out);

  // Segment sum and fused optimizer. `sorted` holds whole groups of equal rows; the gradients of a
  // group are summed in order in float32 and the row is updated once. `scratch` holds dim floats.
  void (*update)(const RowsView& rows, const OptimizerOptions& options, const StepOptions& step,
                 const Occurrence* sorted, int64_t n, const VectorsView& gradients, float* scratch);

  // Segment sum alone: the j-th group (of equal rows) of `sorted` goes to out + j * dim (float32).
  void (*reduce)(int64_t dim, const Occurrence* sorted, int64_t n, const VectorsView& gradients,
                 float* out);

  // out[i] = <gradient of occurrence i without its scale, row(numbers[i])> for i in [begin, end):
  // the derivative by the per-sample weight of a sum. 0 for kMissingRow.
  void (*dot)(const RowsView& rows, const Row* numbers, const float* extra, int64_t begin,
              int64_t end, const VectorsView& gradients, float* out);

  // dim floats to or from the embedding part of a row.
  void (*store_vector)(const float* in, int64_t dim, DType dtype, void* row);
  void (*load_vector)(const void* row, int64_t dim, DType dtype, float* out);
};

// The best that this machine runs; EMBSTORE_ISA=plain|avx2|avx512 in the environment picks another.
// An unknown name, or one that this machine does not run, throws InvalidArgument.
const Kernels& ActiveKernels();

// All that this machine runs, the best first.
std::vector<const Kernels*> AvailableKernels();

}  // namespace embstore
