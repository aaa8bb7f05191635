// The hot loops, compiled once for each instruction set (EMBSTORE_ISA=plain, avx2, avx512) with
// -ffp-contract=off -fno-math-errno -Wno-psabi. All definitions are in the namespace of the
// instruction set or have internal linkage: if builds shared a function, the linker could pick the
// one that traps on an older machine.

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "embstore/hash.h"
#include "embstore/kernels.h"
#include "probe.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace embstore {
namespace EMBSTORE_ISA {
namespace {

#include "lanes.inc"
#include "optimizers.inc"
#include "probe.inc"
#include "victims.inc"

// kWrite: takes the lines from other cores, so that stores need not wait for them.
template <bool kWrite = false>
EMBSTORE_INLINE void PrefetchLines(const void* p, int64_t bytes) {
  const char* const begin = static_cast<const char*>(p);
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(begin + at, kWrite);
}

// Of what need not start on a cache line.
template <bool kWrite = false>
EMBSTORE_INLINE void PrefetchBytes(const void* p, int64_t bytes) {
  PrefetchLines<kWrite>(p, bytes);
  __builtin_prefetch(static_cast<const char*>(p) + bytes - 1, kWrite);
}

// Calls f with a null pointer to the element type.
template <class F>
EMBSTORE_INLINE void WithElement(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Half*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat*>(nullptr));
  }
}

template <class T>
EMBSTORE_INLINE T* RowAt(const RowsView& rows, int64_t row) {
  return reinterpret_cast<T*>(rows.base + row * rows.stride_bytes);
}

// Where the vector of occurrence i begins, in elements.
EMBSTORE_INLINE int64_t OffsetOf(const VectorsView& v, int64_t i) {
  if (v.bag_of == nullptr) return i * v.stride;
  const int64_t bag = v.bag_of[i];
  return v.positions ? v.positions[bag] : bag * v.stride;
}

template <class T>
EMBSTORE_INLINE const T* VectorAt(const VectorsView& v, int64_t i) {
  return static_cast<const T*>(v.base) + OffsetOf(v, i);
}

// kDim > 0 fixes the number of columns at compile time, so that the copy needs no loop.
template <int64_t kDim = 0, class T, class U>
EMBSTORE_INLINE void Convert(const T* in, U* out, int64_t dim) {
  if constexpr (kDim > 0) {
#pragma GCC unroll 16
    for (int64_t column = 0; column < kDim; column += kLanes)
      Store(Load(in + column), out + column);
  } else if constexpr (std::is_same_v<T, U>) {
    // Bytes, not numbers: a NaN keeps its payload.
    __builtin_memcpy(out, in, dim * sizeof(T));
  } else {
    ForBlocks(0, dim, [&](auto block) { block.Store8(block.Load8(in), out); });
  }
}

// --- gather -----------------------------------------------------------------------------------

// How many items of item_bytes to prefetch: enough to cover a cache miss, few enough that they are
// still in L1 when they are read.
EMBSTORE_INLINE int64_t ItemsAhead(int64_t budget_bytes, int64_t item_bytes, int64_t least,
                                   int64_t most) {
  const int64_t items = budget_bytes / (item_bytes > 0 ? item_bytes : 1);
  return items < least ? least : items > most ? most : items;
}

template <int64_t kDim>
EMBSTORE_INLINE void StreamRow(const float* in, float* out) {
#pragma GCC unroll 16
  for (int64_t column = 0; column < kDim; column += kLanes) Stream(Load(in + column), out + column);
}

// kStream: around the caches. Needs lines that are written as a whole.
template <class T, class U, int64_t kDim, bool kStream = false>
void GatherAs(const RowsView& rows, const Row* numbers, int64_t n, const float* extra, U* out,
              int64_t out_stride) {
  const int64_t dim = kDim > 0 ? kDim : rows.dim;
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(T));
  const int64_t out_bytes = dim * static_cast<int64_t>(sizeof(U));
  const bool whole_lines = row_bytes % kLine == 0 && rows.stride_bytes % kLine == 0;
  const int64_t ahead = ItemsAhead(16384, row_bytes, 4, 128);
  const int64_t out_ahead = ItemsAhead(4096, out_bytes, 4, 32);
  const auto send_for = [&](int64_t i) {
    if (numbers[i] < 0) return;
    const T* const row = RowAt<T>(rows, numbers[i]);
    whole_lines ? PrefetchLines(row, row_bytes) : PrefetchBytes(row, row_bytes);
  };
  for (int64_t i = 0; i < ahead && i < n; ++i) send_for(i);
  for (int64_t i = 0; i < n; ++i) {
    if (i + ahead < n) send_for(i + ahead);
    U* const target = out + i * out_stride;
    // Stores wait for their lines in order, in a store buffer that holds a dozen rows.
    if (!kStream && i + out_ahead < n) {
      PrefetchLines<true>(target + out_ahead * out_stride, out_bytes);
    }
    if (numbers[i] >= 0) [[likely]] {
      if constexpr (kStream) {
        StreamRow<kDim>(RowAt<const T>(rows, numbers[i]), target);
      } else {
        Convert<kDim>(RowAt<const T>(rows, numbers[i]), target, dim);
      }
    } else if (numbers[i] == kMissingRow) {
      __builtin_memset(target, 0, dim * sizeof(U));
    } else {
      Convert<kDim>(extra + ExtraIndex(numbers[i]) * dim, target, dim);
    }
  }
  if constexpr (kStream) FinishStreams();
}

void Gather(const RowsView& rows, const Row* numbers, int64_t n, const float* extra, void* out,
            DType out_dtype, int64_t out_stride, bool around_caches) {
  WithElement(rows.dtype, [&](auto* row_element) {
    using T = std::remove_pointer_t<decltype(row_element)>;
    WithElement(out_dtype, [&](auto* out_element) {
      using U = std::remove_pointer_t<decltype(out_element)>;
      U* const typed = static_cast<U*>(out);
      const bool streams = around_caches && reinterpret_cast<uintptr_t>(out) % kLine == 0 &&
                           out_stride * static_cast<int64_t>(sizeof(U)) % kLine == 0;
      const auto run = [&](auto dim) {
        if constexpr (dim.value * sizeof(float) % kLine == 0 && dim.value > 0) {
          if (streams) {
            return GatherAs<T, U, dim.value, true>(rows, numbers, n, extra, typed, out_stride);
          }
        }
        GatherAs<T, U, dim.value>(rows, numbers, n, extra, typed, out_stride);
      };
      if constexpr (std::is_same_v<T, float> && std::is_same_v<U, float>) {
        switch (rows.dim) {
          case 8:
            return run(std::integral_constant<int64_t, 8>());
          case 16:
            return run(std::integral_constant<int64_t, 16>());
          case 32:
            return run(std::integral_constant<int64_t, 32>());
          case 64:
            return run(std::integral_constant<int64_t, 64>());
          case 128:
            return run(std::integral_constant<int64_t, 128>());
        }
      }
      run(std::integral_constant<int64_t, 0>());
    });
  });
}

// --- pool -------------------------------------------------------------------------------------

// How many rows ahead of the sum to prefetch.
EMBSTORE_INLINE int64_t PoolAhead(int64_t row_bytes) {
  return ItemsAhead(16384, row_bytes, 8, 128);
}

struct Bag {
  int64_t begin, end;
  const float* weights;  // or nullptr
  float divisor;         // 1, or the length of a mean

  EMBSTORE_INLINE float Scale(int64_t i) const { return (weights ? weights[i] : 1.0f) / divisor; }
};

// Sums kBlocks blocks of eight columns of a bag in registers. `out` may have any element type,
// since nothing is accumulated in it.
template <int kBlocks, class T, class U, class Block>
EMBSTORE_INLINE void PoolColumns(const RowsView& rows, const Row* numbers, const float* extra,
                                 const Bag& bag, Block block, U* out) {
  F8 sum[kBlocks] = {};
  const auto add = [&](const auto* vector, float scale) {
    Block at = block;
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b, at.column += kLanes) sum[b] += scale * at.Load8(vector);
  };
  for (int64_t i = bag.begin; i < bag.end; ++i) {
    const float scale = bag.Scale(i);
    if (numbers[i] >= 0) [[likely]] {
      add(RowAt<const T>(rows, numbers[i]), scale);
    } else if (numbers[i] != kMissingRow) {
      add(extra + ExtraIndex(numbers[i]) * rows.dim, scale);
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBlocks; ++b, block.column += kLanes) block.Store8(sum[b], out);
}

template <class T, class U>
void PoolAs(const RowsView& rows, const Row* numbers, const float* extra, const int64_t* offsets,
            const float* weights, bool mean, int64_t bag_begin, int64_t bag_end,
            const VectorsView& out) {
  const int64_t row_bytes = rows.dim * static_cast<int64_t>(sizeof(T));
  const int64_t last = offsets[bag_end], ahead = PoolAhead(row_bytes);
  int64_t prefetched = offsets[bag_begin];
  for (int64_t g = bag_begin; g < bag_end; ++g) {
    const int64_t length = offsets[g + 1] - offsets[g];
    const Bag bag{offsets[g], offsets[g + 1], weights, mean ? static_cast<float>(length) : 1.0f};
    for (; prefetched < last && prefetched < bag.end + ahead; ++prefetched) {
      if (numbers[prefetched] >= 0) PrefetchBytes(RowAt<T>(rows, numbers[prefetched]), row_bytes);
    }
    U* const target =
        static_cast<U*>(out.base) + (out.positions ? out.positions[g] : g * out.stride);
    int64_t column = 0;
    for (; column + 8 * kLanes <= rows.dim; column += 8 * kLanes) {
      PoolColumns<8, T>(rows, numbers, extra, bag, WholeBlock{column}, target);
    }
    if (column + 4 * kLanes <= rows.dim) {
      PoolColumns<4, T>(rows, numbers, extra, bag, WholeBlock{column}, target);
      column += 4 * kLanes;
    }
    ForBlocks(column, rows.dim,
              [&](auto block) { PoolColumns<1, T>(rows, numbers, extra, bag, block, target); });
  }
}

void Pool(const RowsView& rows, const Row* numbers, const float* extra, const int64_t* offsets,
          const float* weights, bool mean, int64_t bag_begin, int64_t bag_end,
          const VectorsView& out) {
  WithElement(rows.dtype, [&](auto* row_element) {
    using T = std::remove_pointer_t<decltype(row_element)>;
    WithElement(out.dtype, [&](auto* out_element) {
      using U = std::remove_pointer_t<decltype(out_element)>;
      PoolAs<T, U>(rows, numbers, extra, offsets, weights, mean, bag_begin, bag_end, out);
    });
  });
}

#include "segment_sum.inc"

// --- update -----------------------------------------------------------------------------------

// What is applied to a gradient before the rule: scale, clipping and weight decay.
struct Conditioning {
  explicit Conditioning(const StepOptions& o)
      : scale(static_cast<float>(o.gradient_scale)),
        clip_value(static_cast<float>(o.clip_value)),
        clip_norm(o.clip_norm) {
    const bool decoupled = o.decoupled_weight_decay;
    coupled_decay = static_cast<float>(decoupled ? 0.0 : o.weight_decay);
    decoupled_decay = static_cast<float>(decoupled ? o.learning_rate * o.weight_decay : 0.0);
  }

  bool Changes() const { return scale != 1.0f || clip_value > 0.0f || clip_norm > 0.0; }
  bool Decays() const { return coupled_decay != 0.0f || decoupled_decay != 0.0f; }

  // Scales and clips. `out` may be `g`.
  void Apply(const float* g, int64_t dim, float* out) const {
    const F8 bound = F8{} + (clip_value > 0.0f ? clip_value : __builtin_inff());
    ForBlocks(0, dim, [&](auto block) {
      F8 v = scale * block.Load8(g);
      v = v > bound ? bound : v;
      v = v < -bound ? -bound : v;
      block.Store8(v, out);
    });
    if (clip_norm <= 0.0) return;
    // In double: the squares of the large gradients that clipping is for overflow float32.
    D8 squares = {};
    ForBlocks(0, dim, [&](auto block) {
      const D8 v = __builtin_convertvector(block.Load8(out), D8);
      squares += v * v;
    });
    const double norm = __builtin_sqrt(Total(squares));
    if (norm <= clip_norm) return;
    const float factor = static_cast<float>(clip_norm / norm);
    ForBlocks(0, dim, [&](auto block) { block.Store8(factor * block.Load8(out), out); });
  }

  float scale, clip_value, coupled_decay, decoupled_decay;
  double clip_norm;
};

// One pass over the columns reads, updates and writes embedding and states together.
template <class Rule, class T, bool kDecay>
EMBSTORE_INLINE void UpdateRow(const Rule& rule, const Conditioning& conditioning, const float* g,
                               int64_t dim, T* weights, float* state) {
  const float coupled = conditioning.coupled_decay, decoupled = conditioning.decoupled_decay;
  const auto gradient = [&](auto block, F8 w) {
    const F8 v = block.Load8(g);
    if constexpr (kDecay) return v + coupled * w;
    return v;
  };
  const auto decay = [&](F8 w) { return kDecay ? decoupled * w : F8{}; };
  const auto mean_square = [&] {
    const float squares = SumColumns(dim, [&](auto block) {
      const F8 v = gradient(block, kDecay ? block.Load8(weights) : F8{});
      return v * v;
    });
    return squares / static_cast<float>(dim);
  };
  constexpr size_t kCount = kColumnStates<Rule>;
  const auto& columns = [&]() -> decltype(auto) {
    if constexpr (Rule::kRowwise) {
      return rule.Begin(mean_square, dim, state + kCount * dim);
    } else {
      return (rule);
    }
  }();
  ForBlocks(0, dim, [&](auto block) {
    F8 s[kCount + 1];  // an array of 0 is not C++
    for (size_t k = 0; k < kCount; ++k) s[k] = block.Load8(state + k * dim);
    const F8 w = block.Load8(weights);
    block.Store8(columns.Update(gradient(block, w), w, decay(w), s), weights);
    for (size_t k = 0; k < kCount; ++k) block.Store8(s[k], state + k * dim);
  });
}

template <class Rule, class T, bool kDecay>
void UpdateAs(const RowsView& rows, const StepOptions& step, int64_t row_bytes,
              const Occurrence* sorted, int64_t n, const VectorsView& gradients, float* scratch) {
  const Rule rule(step);
  const Conditioning conditioning(step);
  const bool changes = conditioning.Changes();
  // A gradient that needs neither a sum nor a conversion is used in place.
  const bool direct = gradients.dtype == DType::kFloat32 && gradients.scale == nullptr;
  const SumGroupFunction sum_group = SumGroupFor(gradients);
  Lookahead lookahead(sorted, n, gradients, rows.dim, &rows, row_bytes);
  for (int64_t i = 0; i < n;) {
    const int64_t end = GroupEnd(sorted, i, n);
    const float* g = scratch;
    if (direct && end == i + 1) {
      g = VectorAt<float>(gradients, sorted[i].index);
      lookahead.Advance(end);
    } else {
      sum_group(sorted, i, end, gradients, rows.dim, scratch, lookahead);
    }
    if (changes) {
      conditioning.Apply(g, rows.dim, scratch);
      g = scratch;
    }
    assert(sorted[i].row <= static_cast<uint32_t>(INT32_MAX));
    std::byte* const row = rows.base + sorted[i].row * rows.stride_bytes;
    UpdateRow<Rule, T, kDecay>(rule, conditioning, g, rows.dim, reinterpret_cast<T*>(row),
                               reinterpret_cast<float*>(row + rows.state_offset_bytes));
    i = end;
  }
}

template <class Rule>
int64_t RowBytes(const RowsView& rows) {
  const int64_t width = WidthOfStates<Rule>(rows.dim);
  const int64_t vector_bytes = rows.dim * static_cast<int64_t>(SizeOf(rows.dtype));
  return width ? rows.state_offset_bytes + width * static_cast<int64_t>(sizeof(float))
               : vector_bytes;
}

template <class Rule>
void UpdateWith(const RowsView& rows, const StepOptions& step, const Occurrence* sorted, int64_t n,
                const VectorsView& gradients, float* scratch) {
  const bool decays = Conditioning(step).Decays();
  const int64_t row_bytes = RowBytes<Rule>(rows);
  WithElement(rows.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const auto function = decays ? UpdateAs<Rule, T, true> : UpdateAs<Rule, T, false>;
    function(rows, step, row_bytes, sorted, n, gradients, scratch);
  });
}

void Update(const RowsView& rows, const OptimizerOptions& options, const StepOptions& step,
            const Occurrence* sorted, int64_t n, const VectorsView& gradients, float* scratch) {
  switch (options.kind) {
#define EMBSTORE_CASE(kind, name) \
  case OptimizerKind::k##kind:    \
    return UpdateWith<kind>(rows, step, sorted, n, gradients, scratch);
    EMBSTORE_OPTIMIZERS(EMBSTORE_CASE)
#undef EMBSTORE_CASE
  }
}

// --- dot, load and store ----------------------------------------------------------------------

void Dot(const RowsView& rows, const Row* numbers, const float* extra, int64_t begin, int64_t end,
         const VectorsView& gradients, float* out) {
  WithElement(rows.dtype, [&](auto* row_element) {
    using T = std::remove_pointer_t<decltype(row_element)>;
    WithElement(gradients.dtype, [&](auto* gradient_element) {
      using G = std::remove_pointer_t<decltype(gradient_element)>;
      const int64_t row_bytes = rows.dim * static_cast<int64_t>(sizeof(T));
      const int64_t ahead = PoolAhead(row_bytes);
      for (int64_t i = begin; i < end; ++i) {
        if (i + ahead < end && numbers[i + ahead] >= 0) {
          PrefetchBytes(RowAt<T>(rows, numbers[i + ahead]), row_bytes);
        }
        const G* const g = VectorAt<G>(gradients, i);
        const auto product = [&](const auto* vector) {
          return SumColumns(rows.dim,
                            [&](auto block) { return block.Load8(g) * block.Load8(vector); });
        };
        if (numbers[i] >= 0) [[likely]] {
          out[i] = product(RowAt<const T>(rows, numbers[i]));
        } else {
          out[i] =
              numbers[i] == kMissingRow ? 0.0f : product(extra + ExtraIndex(numbers[i]) * rows.dim);
        }
      }
    });
  });
}

void StoreVector(const float* in, int64_t dim, DType dtype, void* row) {
  WithElement(dtype, [&](auto* element) { Convert(in, static_cast<decltype(element)>(row), dim); });
}

void LoadVector(const void* row, int64_t dim, DType dtype, float* out) {
  WithElement(dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    Convert(static_cast<const T*>(row), out, dim);
  });
}

#define EMBSTORE_TEXT(name) #name
#define EMBSTORE_NAME_OF(name) EMBSTORE_TEXT(name)

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {EMBSTORE_NAME_OF(EMBSTORE_ISA),
                          Find,
                          FindAnnounced,
                          Select,
                          Collect,
                          Smallest,
                          Gather,
                          Pool,
                          Update,
                          Reduce,
                          Dot,
                          StoreVector,
                          LoadVector};

}  // namespace EMBSTORE_ISA
}  // namespace embstore
