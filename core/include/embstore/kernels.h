// The hot loops. Each is compiled for plain C++, AVX2 and AVX-512 and picked once at start.
//
// Thread safety: pure functions of their arguments; callers give disjoint outputs or slots.
// Sums are taken in a fixed order that does not depend on the instruction set, and no
// multiplication is fused with an addition, so every build gives the same bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "embstore/hash.h"
#include "embstore/optimizer.h"
#include "embstore/types.h"

namespace embstore {

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

// A cache line of the index: slots 3 g, 3 g + 1 and 3 g + 2. See key_index.h.
struct alignas(64) IndexGroup {
  static constexpr int64_t kSlots = 3;
  static constexpr uint32_t kBlocks = 24, kElsewhere = 1u << kBlocks;
  int64_t keys[kSlots];     // 0 where the slot is free
  uint64_t scores[kSlots];  // 0: the slot is free
  Row rows[kSlots];
  // Of the keys that are looked for here first and are not here: bit i is set when one lies in
  // block i of the bucket, the upper byte counts those outside of the bucket (255: or more).
  uint32_t away;
};
static_assert(sizeof(IndexGroup) == 64);

// Stripes of the index that are alike: there are 2^stripe_bits of them, chosen by the first bits of
// the hash.
struct IndexLayout {
  uint64_t buckets = 1;  // of all stripes
  uint32_t stripe_buckets = 1, stripe_bits = 0;
};

// A key that found no place in its stripe.
struct OverflowEntry {
  int64_t key;
  uint64_t score;  // 0: free
  Row row;
};

// Slots from here on are numbers of overflow entries.
inline constexpr Slot kFirstOverflowSlot = 0x7f000000;

// The tables of KeyIndex as the probe needs them (see key_index.h).
struct IndexView {
  IndexGroup* groups = nullptr;
  HashSecret secret;
  uint64_t grown_from = 0;  // the first hash of the stripes that have grown
  IndexLayout before, grown;
  uint32_t bucket_groups = 1, block_bits = 0;  // of a bucket, and of a block of 2^block_bits groups
  OverflowEntry* overflow = nullptr;           // a power of two of places, or none
  uint64_t overflow_mask = 0;
  HashSecret overflow_secret;

  uint64_t& score(Slot slot) const {
    if (slot >= kFirstOverflowSlot) return overflow[slot - kFirstOverflowSlot].score;
    return groups[slot / IndexGroup::kSlots].scores[slot % IndexGroup::kSlots];
  }
};

inline constexpr int64_t kLine = 64;  // bytes of a cache line

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
