// Kernels: the hot loops. Each is compiled for plain C++, AVX2 and AVX-512; the set to use is
// chosen once, at the first call.
//
// Thread safety: pure functions of their arguments. Concurrent calls must write different outputs
// and rows.
//
// Invariants
//  1. Every build computes the same bits: sums have a fixed order, the same for every instruction
//     set, and a multiplication is never fused with an addition.
//  2. Rows and outputs outside of the arguments are never written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "embstore/optimizer.h"
#include "embstore/types.h"

namespace embstore {

struct HashSecret;                 // hash.h
struct HashRange;                  // hash.h
struct IndexView;                  // index_view.h
struct IndexGroup;                 // index_view.h
struct EntryColumns;               // index_view.h
enum class ScoreUpdate : uint8_t;  // score_clock.h

// Rows in memory: row s starts at base + s * stride_bytes, its state (float32) state_offset_bytes
// further on.
struct RowsView {
  std::byte* base = nullptr;
  int64_t stride_bytes = 0;
  int64_t dim = 0;
  DType dtype = DType::kFloat32;
  int64_t state_offset_bytes = 0;
};

// The vectors of a batch, one for each occurrence i or bag g. Offsets count elements.
//   bag_of == nullptr: vector i is at base + i * stride
//   else, with g = bag_of[i]: the vector is at base + (positions ? positions[g] : g * stride)
// scale: a factor for each occurrence (its weight, over the length of a mean), or nullptr for 1.
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

// One of so many equal ranges of hashes.
struct HashPart {
  uint32_t part, parts;
};

// Hits whose scores up to `through` were left as they are, until a snapshot or a set of changes has
// heard of them.
struct PostponedHits {
  uint64_t through = 0;
  uint32_t* positions = nullptr;  // in the batch; room for all of it
  Slot* slots = nullptr;          // likewise
  int64_t count = 0;
};

inline constexpr int64_t kLine = 64;  // bytes of a cache line

inline constexpr int64_t kMostCandidates = 512, kMostSmallest = 32;  // of Kernels::smallest

struct Kernels {
  const char* name;  // "avx512", "avx2" or "plain"

  // slots[i] and rows[i] = slot and row of keys[i], or kNoSlot and kMissingRow; returns how many
  // are missing. Renews the scores of the keys it finds. slots may be null. alone: no other thread
  // renews the scores of these keys meanwhile.
  int64_t (*find)(const IndexView& index, const int64_t* keys, int64_t n, Slot* slots, Row* rows,
                  ScoreUpdate update, uint64_t score, bool alone);

  // find with kSet, which does not touch scores up to postponed.through but lists their hits.
  int64_t (*find_announced)(const IndexView& index, const int64_t* keys, int64_t n, Row* rows,
                            uint64_t score, PostponedHits& postponed);

  // Which of the keys are of this part, and their positions; returns how many. Up to eight more are
  // written.
  int64_t (*select)(const HashSecret& secret, const int64_t* keys, int64_t n, const HashPart& of,
                    int64_t* selected, uint32_t* positions);

  // Appends to `out`, which has `count` entries, those of n groups whose keys are in the range and
  // whose score is from 1 to `most`. Returns how many it has then; up to seven more are written.
  int64_t (*collect)(const IndexGroup* groups, int64_t n, const HashRange& range, uint64_t most,
                     const EntryColumns& out, int64_t count);

  // Moves the smallest of n different keys to the front, by worth and then by HashKey, ascending.
  // Others may be lost, and up to seven more worths are written.
  // REQUIRES: wanted <= n <= kMostCandidates, wanted <= kMostSmallest.
  void (*smallest)(uint64_t* worths, int64_t* keys, int64_t n, int64_t wanted);

  // out row i = row numbers[i] (converted), zeros for kMissingRow, extra[j] for ExtraRow(j).
  // around_caches: for outputs that will not be in the caches anyway when they are read.
  void (*gather)(const RowsView& rows, const Row* numbers, int64_t n, const float* extra, void* out,
                 DType out_dtype, int64_t out_stride, bool around_caches);

  // Bags [bag_begin, bag_end): out(bag) = sum over i in [offsets[bag], offsets[bag + 1]) of
  // scale_i * row(numbers[i]), accumulated in float32, in order. scale_i = weights[i] (or 1),
  // divided by the length of the bag for a mean. Empty bags are zeros. out(bag) is at base +
  // (positions ? positions[bag] : bag * stride); bag_of and scale are unused.
  void (*pool)(const RowsView& rows, const Row* numbers, const float* extra, const int64_t* offsets,
               const float* weights, bool mean, int64_t bag_begin, int64_t bag_end,
               const VectorsView& out);

  // Segment sum and fused optimizer. `sorted` holds whole groups of equal rows; the gradients of a
  // group are summed in float32, in order, and the row is updated once. `scratch` holds dim floats.
  void (*update)(const RowsView& rows, const OptimizerOptions& options, const StepOptions& step,
                 const Occurrence* sorted, int64_t n, const VectorsView& gradients, float* scratch);

  // Segment sum alone: the j-th group (of equal rows) of `sorted` goes to out + j * dim (float32).
  void (*reduce)(int64_t dim, const Occurrence* sorted, int64_t n, const VectorsView& gradients,
                 float* out);

  // out[i] = <gradient of occurrence i without its scale, row(numbers[i])> for i in [begin, end):
  // the gradient of the per-sample weight in a sum. 0 for kMissingRow.
  void (*dot)(const RowsView& rows, const Row* numbers, const float* extra, int64_t begin,
              int64_t end, const VectorsView& gradients, float* out);

  // dim floats to or from the embedding part of a row.
  void (*store_vector)(const float* in, int64_t dim, DType dtype, void* row);
  void (*load_vector)(const void* row, int64_t dim, DType dtype, float* out);
};

// The best set that this machine supports, or the one that EMBSTORE_ISA=plain|avx2|avx512 in the
// environment names. Throws InvalidArgument for an unknown or unsupported name.
const Kernels& ActiveKernels();

// All sets that this machine supports, the best first.
std::vector<const Kernels*> AvailableKernels();

}  // namespace embstore
