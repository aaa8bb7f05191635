#include "embstore/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "check.h"

namespace embstore {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr int64_t kDims[] = {1, 7, 8, 16, 32, 40, 64, 97, 128, 1023};

uint64_t Mix(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ULL;
  i = (i ^ (i >> 30)) * 0xBF58476D1CE4E5B9ULL;
  return i ^ (i >> 27);
}

float Noise(uint64_t i) {
  return static_cast<float>(static_cast<double>(static_cast<int64_t>(Mix(i)) >> 11) * 0x1p-52);
}

// --- the oracle of the number formats: one scalar at a time, by searching in double --------------

double HalfValue(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double magnitude = exponent == 0    ? std::ldexp(mantissa, -24)
                           : exponent == 31 ? (mantissa ? std::nan("") : HUGE_VAL)
                                            : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

uint16_t NearestHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = (bits >> 16) & 0x8000;
  if (std::isnan(value)) return sign | 0x7e00 | ((bits >> 13) & 0x3ff);
  const double magnitude = std::abs(static_cast<double>(value));
  if (magnitude >= 65520.0) return sign | 0x7c00;
  // The largest half that is not above the value; then the nearer neighbour, the even one on a tie.
  uint16_t low = 0, high = 0x7bff;
  while (low < high) {
    const uint16_t middle = (low + high + 1) / 2;
    if (HalfValue(middle) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const double above = low == 0x7bff ? 65536.0 : HalfValue(low + 1);
  const double to_low = magnitude - HalfValue(low), to_above = above - magnitude;
  const bool up = to_above < to_low || (to_above == to_low && (low & 1));
  return sign | static_cast<uint16_t>(low + up);
}

uint16_t NearestBFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t truncated = bits >> 16;
  if (std::isnan(value)) return truncated | 0x40;
  const uint32_t rest = bits & 0xffff;
  return truncated + (rest > 0x8000 || (rest == 0x8000 && (truncated & 1)));
}

// A buffer of elements of one type, read and written as float.
class Elements {
 public:
  Elements(DType dtype, int64_t count) : dtype_(dtype), bytes_(count * SizeOf(dtype), 0xcd) {}

  void* data() { return bytes_.data(); }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(bytes_.data()); }

  float Get(int64_t i) const {
    if (dtype_ == DType::kFloat32) return Read<float>(i);
    const uint16_t bits = Read<uint16_t>(i);
    return dtype_ == DType::kFloat16 ? static_cast<float>(HalfValue(bits))
                                     : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }

  void Set(int64_t i, float value) {
    if (dtype_ == DType::kFloat32) return Write(i, value);
    Write(i, dtype_ == DType::kFloat16 ? NearestHalf(value) : NearestBFloat(value));
  }

  bool operator==(const Elements&) const = default;

 private:
  template <class T>
  T Read(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void Write(int64_t i, T value) {
    std::memcpy(bytes_.data() + i * sizeof(T), &value, sizeof(T));
  }

  DType dtype_;
  std::vector<uint8_t> bytes_;
};

// Rows without state, filled with noise.
struct Rows {
  Rows(DType dtype, int64_t count, int64_t dim) : elements(dtype, count * dim) {
    for (int64_t i = 0; i < count * dim; ++i) elements.Set(i, Noise(i));
    const int64_t bytes = dim * static_cast<int64_t>(SizeOf(dtype));
    view = {elements.bytes(), bytes, dim, dtype, bytes};
  }
  Elements elements;
  RowsView view;
};

// What a slot reads as, in float.
float Value(const Rows& rows, const std::vector<float>& extra, Slot slot, int64_t column) {
  const int64_t dim = rows.view.dim;
  if (slot >= 0) return rows.elements.Get(slot * dim + column);
  return slot == kNoSlot ? 0.0f : extra[ExtraIndex(slot) * dim + column];
}

// Slots with repeats, misses and extra rows.
std::vector<Slot> MixedSlots(int64_t n, int64_t row_count) {
  std::vector<Slot> slots(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t r = Mix(i + 99);
    slots[i] = r % 11 == 0   ? kNoSlot
               : r % 11 == 1 ? ExtraRow(static_cast<int64_t>(r >> 8) % 3)
                             : static_cast<Slot>((r >> 8) % row_count);
  }
  return slots;
}

std::vector<float> ExtraRows(int64_t dim) {
  std::vector<float> extra(3 * dim);
  for (size_t i = 0; i < extra.size(); ++i) extra[i] = Noise(i + 777);
  return extra;
}

TEST(Half and bfloat conversions equal the oracle for every value) {
  for (const Kernels* kernels : AvailableKernels()) {
    std::vector<uint16_t> halves(65536);
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
    std::vector<float> floats(halves.size());
    kernels->load_vector(halves.data(), 65536, DType::kFloat16, floats.data());
    for (uint32_t h = 0; h < 65536; ++h) {
      if (std::isnan(HalfValue(h))) {
        const uint32_t expected = (h & 0x8000) << 16 | 0x7fc00000 | (h & 0x3ff) << 13;
        CHECK_EQ(std::bit_cast<uint32_t>(floats[h]), expected);
      } else {
        CHECK_EQ(floats[h], static_cast<float>(HalfValue(h)));
        CHECK_EQ(std::signbit(floats[h]), (h & 0x8000) != 0);
      }
    }
    kernels->load_vector(halves.data(), 65536, DType::kBFloat16, floats.data());
    for (uint32_t h = 0; h < 65536; ++h) CHECK_EQ(std::bit_cast<uint32_t>(floats[h]), h << 16);

    // Every exponent, with mantissas at and around the ties of both formats; and noise.
    std::vector<float> inputs;
    for (uint32_t top = 0; top < 65536; top += 1) {
      for (const uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu,
                                 0x8000u, 0x8001u, 0xf000u, 0xffffu}) {
        inputs.push_back(std::bit_cast<float>(top << 16 | low));
      }
    }
    for (int i = 0; i < 100000; ++i) inputs.push_back(std::bit_cast<float>(uint32_t(Mix(i) >> 7)));
    std::vector<uint16_t> out(inputs.size());
    const auto count = static_cast<int64_t>(inputs.size());
    kernels->store_vector(inputs.data(), count, DType::kFloat16, out.data());
    for (size_t i = 0; i < inputs.size(); ++i) CHECK_EQ(out[i], NearestHalf(inputs[i]));
    kernels->store_vector(inputs.data(), count, DType::kBFloat16, out.data());
    for (size_t i = 0; i < inputs.size(); ++i) CHECK_EQ(out[i], NearestBFloat(inputs[i]));
  }
}

TEST(Gather copies and converts rows and misses and extra rows) {
  for (const Kernels* kernels : AvailableKernels()) {
    for (const DType from : kDTypes) {
      for (const DType to : kDTypes) {
        for (const int64_t dim : kDims) {
          const int64_t n = 97, stride = dim + 3;
          Rows rows(from, 50, dim);
          const std::vector<float> extra = ExtraRows(dim);
          const std::vector<Slot> slots = MixedSlots(n, 50);
          Elements out(to, n * stride), expected(to, n * stride);
          for (int64_t i = 0; i < n; ++i) {
            for (int64_t c = 0; c < dim; ++c) {
              expected.Set(i * stride + c, Value(rows, extra, slots[i], c));
            }
          }
          kernels->gather(rows.view, slots.data(), n, extra.data(), out.data(), to, stride, false);
          CHECK(out == expected);  // and nothing between the rows is written
        }
      }
    }
  }
}

TEST(Gather around the caches writes the same bytes) {
  for (const Kernels* kernels : AvailableKernels()) {
    for (const int64_t dim : kDims) {
      for (const int64_t stride : {dim, dim + 16, (dim + 31) / 16 * 16}) {
        const int64_t n = 97;
        Rows rows(DType::kFloat32, 50, dim);
        const std::vector<float> extra = ExtraRows(dim);
        const std::vector<Slot> slots = MixedSlots(n, 50);
        // Whole lines, and shifted by a column.
        std::vector<float> through(static_cast<size_t>(n * stride + 32), -1.0f), around = through;
        for (const int64_t shift : {0, 1}) {
          const auto gather = [&](std::vector<float>& out, bool around_caches) {
            const auto address = reinterpret_cast<uintptr_t>(out.data());
            float* const line = reinterpret_cast<float*>((address + 63) / 64 * 64);
            kernels->gather(rows.view, slots.data(), n, extra.data(), line + shift, DType::kFloat32,
                            stride, around_caches);
            return std::vector<float>(line, line + n * stride);
          };
          CHECK(gather(around, true) == gather(through, false));
        }
      }
    }
  }
}

TEST(Pool sums bags in order with weights and means) {
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t dim : kDims) {
        Rows rows(from, 50, dim);
        const std::vector<float> extra = ExtraRows(dim);
        const std::vector<int64_t> lengths = {0, 1, 3, 0, 17, 2, 1, 0};
        std::vector<int64_t> offsets = {0};
        for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
        const std::vector<Slot> slots = MixedSlots(offsets.back(), 50);
        std::vector<float> weights(slots.size());
        for (size_t i = 0; i < weights.size(); ++i) weights[i] = Noise(i + 5);
        const auto bags = static_cast<int64_t>(lengths.size());
        std::vector<int64_t> positions;  // the last bag comes first
        for (int64_t g = 0; g < bags; ++g) positions.push_back((bags - 1 - g) * dim);
        for (const bool weighted : {false, true}) {
          for (const bool mean : {false, true}) {
            for (const bool positioned : {false, true}) {
              Elements expected(to, bags * dim);
              for (int64_t g = 0; g < bags; ++g) {
                for (int64_t c = 0; c < dim; ++c) {
                  float sum = 0.0f;
                  for (int64_t i = offsets[g]; i < offsets[g + 1]; ++i) {
                    const float weight = weighted ? weights[i] : 1.0f;
                    const float scale = mean ? weight / static_cast<float>(lengths[g]) : weight;
                    const float term = scale * Value(rows, extra, slots[i], c);
                    sum = sum + term;
                  }
                  expected.Set((positioned ? positions[g] : g * dim) + c, sum);
                }
              }
              for (const Kernels* kernels : AvailableKernels()) {
                Elements out(to, bags * dim);
                const VectorsView view{.base = out.data(),
                                       .dtype = to,
                                       .stride = dim,
                                       .positions = positioned ? positions.data() : nullptr};
                // Two calls, as two threads would: each writes its own bags.
                kernels->pool(rows.view, slots.data(), extra.data(), offsets.data(),
                              weighted ? weights.data() : nullptr, mean, 0, 3, view);
                kernels->pool(rows.view, slots.data(), extra.data(), offsets.data(),
                              weighted ? weights.data() : nullptr, mean, 3, bags, view);
                CHECK(out == expected);
              }
            }
          }
        }
      }
    }
  }
}

// Gradients of a batch in one of the layouts of VectorsView.
struct Gradients {
  Gradients(DType dtype, int64_t n, int64_t dim, bool bagged, bool positioned, bool scaled)
      : elements(dtype, n * (dim + 2)) {
    for (int64_t i = 0; i < n * (dim + 2); ++i) elements.Set(i, Noise(i + 31337));
    for (int64_t i = 0; i < n; ++i) {
      bag_of.push_back(static_cast<uint32_t>(i / 2));
      positions.push_back((n - 1 - i) * (dim + 2));
      scale.push_back(Noise(i + 4242));
    }
    view = {.base = elements.data(),
            .dtype = dtype,
            .stride = dim + 2,
            .bag_of = bagged ? bag_of.data() : nullptr,
            .positions = bagged && positioned ? positions.data() : nullptr,
            .scale = scaled ? scale.data() : nullptr};
  }

  float Unscaled(int64_t i, int64_t column) const {
    const int64_t bag = view.bag_of ? bag_of[i] : i;
    return elements.Get((view.positions ? positions[bag] : bag * view.stride) + column);
  }
  float At(int64_t i, int64_t column) const {
    return view.scale ? scale[i] * Unscaled(i, column) : Unscaled(i, column);
  }

  Elements elements;
  std::vector<uint32_t> bag_of;
  std::vector<int64_t> positions;
  std::vector<float> scale;
  VectorsView view;
};

// Skewed slots: one group of many, some of a few, many of one; sorted by slot, then index.
std::vector<Occurrence> SkewedOccurrences(int64_t n, int64_t row_count) {
  std::vector<Occurrence> sorted;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t r = Mix(i + 17);
    const uint64_t slot = r % 4 == 0 ? 5 : r % 4 == 1 ? (r >> 8) % 7 : (r >> 8) % row_count;
    sorted.push_back({static_cast<uint32_t>(slot), static_cast<uint32_t>(i)});
  }
  std::sort(sorted.begin(), sorted.end(), [](const Occurrence& a, const Occurrence& b) {
    return a.row != b.row ? a.row < b.row : a.index < b.index;
  });
  return sorted;
}

std::map<uint32_t, std::vector<float>> SumsInOrder(const std::vector<Occurrence>& sorted,
                                                   const Gradients& gradients, int64_t dim) {
  std::map<uint32_t, std::vector<float>> sums;
  for (const Occurrence& occurrence : sorted) {
    auto [sum, is_new] = sums.try_emplace(occurrence.row, dim);
    for (int64_t c = 0; c < dim; ++c) {
      const float term = gradients.At(occurrence.index, c);
      sum->second[c] = is_new ? term : sum->second[c] + term;
    }
  }
  return sums;
}

// Runs check(gradients, dim, n) over all layouts, types and ugly sizes.
template <class Body>
void ForGradients(const Body& body) {
  for (const DType dtype : kDTypes) {
    for (const int64_t dim : {1, 7, 32, 64, 97}) {
      for (const int64_t n : {1, 7, 97, 1023}) {
        for (int layout = 0; layout < 6; ++layout) {
          const Gradients gradients(dtype, n, dim, layout / 2 > 0, layout / 2 > 1, layout % 2);
          body(gradients, dim, n);
        }
      }
    }
  }
}

TEST(Reduce sums each group in the order of the batch) {
  ForGradients([](const Gradients& gradients, int64_t dim, int64_t n) {
    const std::vector<Occurrence> sorted = SkewedOccurrences(n, 300);
    const auto sums = SumsInOrder(sorted, gradients, dim);
    std::vector<float> expected;
    for (const auto& [slot, sum] : sums) expected.insert(expected.end(), sum.begin(), sum.end());
    for (const Kernels* kernels : AvailableKernels()) {
      std::vector<float> out(expected.size());
      kernels->reduce(dim, sorted.data(), n, gradients.view, out.data());
      CHECK(out == expected);
    }
  });
}

TEST(Update sums duplicates first and moves only touched rows once) {
  const OptimizerOptions options{OptimizerKind::kSgd};
  const StepOptions step{.learning_rate = 0.5};
  ForGradients([&](const Gradients& gradients, int64_t dim, int64_t n) {
    const std::vector<Occurrence> sorted = SkewedOccurrences(n, 300);
    for (const DType dtype : kDTypes) {
      Rows rows(dtype, 300, dim);
      Elements expected = rows.elements;
      for (const auto& [slot, sum] : SumsInOrder(sorted, gradients, dim)) {
        for (int64_t c = 0; c < dim; ++c) {
          expected.Set(slot * dim + c, rows.elements.Get(slot * dim + c) - 0.5f * sum[c]);
        }
      }
      for (const Kernels* kernels : AvailableKernels()) {
        Rows moved(dtype, 300, dim);
        std::vector<float> scratch(dim);
        kernels->update(moved.view, options, step, sorted.data(), n, gradients.view,
                        scratch.data());
        CHECK(moved.elements == expected);
      }
    }
  });
}

TEST(Update gives the same bits on all instruction sets with state behind any element type) {
  for (const char* name : {"momentum", "rowwise_adagrad", "adam", "smart_decay_adam", "ftrl"}) {
    const OptimizerOptions options{OptimizerFromName(name), 0.1f};
    const StepOptions step{.weight_decay = 0.01, .clip_norm = 1.0, .step = 3, .momentum = 0.9};
    for (const DType dtype : kDTypes) {
      for (const int64_t dim : {7, 32, 97}) {
        const int64_t n = 1023, count = 300;
        const Gradients gradients(dtype, n, dim, true, false, true);
        const std::vector<Occurrence> sorted = SkewedOccurrences(n, count);
        const int64_t offset = (dim * static_cast<int64_t>(SizeOf(dtype)) + 3) / 4 * 4;
        const int64_t stride = offset + StateWidth(options, dim) * 4;
        std::vector<std::vector<float>> results;
        for (const Kernels* kernels : AvailableKernels()) {
          std::vector<float> memory(count * stride / 4);
          auto* const base = reinterpret_cast<std::byte*>(memory.data());
          std::vector<float> scratch(dim), vector(dim);
          for (int64_t s = 0; s < count; ++s) {
            for (int64_t c = 0; c < dim; ++c) vector[c] = Noise(s * dim + c);
            kernels->store_vector(vector.data(), dim, dtype, base + s * stride);
            InitState(options, dim, reinterpret_cast<float*>(base + s * stride + offset));
          }
          kernels->update({base, stride, dim, dtype, offset}, options, step, sorted.data(), n,
                          gradients.view, scratch.data());
          for (const float v : memory) CHECK(dtype != DType::kFloat32 || std::isfinite(v));
          results.push_back(memory);
        }
        for (const auto& result : results) {
          CHECK(std::memcmp(result.data(), results[0].data(), result.size() * 4) == 0);
        }
      }
    }
  }
}

TEST(Dot is the product of unscaled gradient and row) {
  for (const DType row_dtype : kDTypes) {
    ForGradients([&](const Gradients& gradients, int64_t dim, int64_t n) {
      if (n > 97) return;
      Rows rows(row_dtype, 50, dim);
      const std::vector<float> extra = ExtraRows(dim);
      const std::vector<Slot> slots = MixedSlots(n, 50);
      const int64_t begin = n / 3;
      std::vector<float> first;
      for (const Kernels* kernels : AvailableKernels()) {
        std::vector<float> out(n, 9.0f);
        kernels->dot(rows.view, slots.data(), extra.data(), begin, n, gradients.view, out.data());
        for (int64_t i = 0; i < n; ++i) {
          double expected = 0.0;
          for (int64_t c = 0; c < dim; ++c) {
            expected +=
                static_cast<double>(gradients.Unscaled(i, c)) * Value(rows, extra, slots[i], c);
          }
          CHECK_NEAR(out[i], i < begin ? 9.0 : expected, 1e-6 * (1 + dim));
        }
        if (first.empty()) first = out;
        CHECK(out == first);
      }
    });
  }
}

TEST(Calls with nothing to do write nothing) {
  for (const Kernels* kernels : AvailableKernels()) {
    Rows rows(DType::kFloat32, 2, 7);
    const Elements before = rows.elements;
    const int64_t offsets[] = {0};
    float scratch[7];
    kernels->gather(rows.view, nullptr, 0, nullptr, nullptr, DType::kFloat32, 7, true);
    kernels->pool(rows.view, nullptr, nullptr, offsets, nullptr, true, 0, 0, {});
    kernels->update(rows.view, {}, {}, nullptr, 0, {}, scratch);
    kernels->reduce(7, nullptr, 0, {}, nullptr);
    kernels->dot(rows.view, nullptr, nullptr, 0, 0, {}, nullptr);
    CHECK(rows.elements == before);
  }
}

TEST(The environment picks the kernels and an unknown name is refused) {
  // ActiveKernels chooses once, so the refusal comes first: a failed choice is not kept.
  setenv("EMBSTORE_ISA", "avx9000", 1);
  CHECK_THROWS(InvalidArgument, "but is: avx9000", ActiveKernels());
  setenv("EMBSTORE_ISA", "plain", 1);
  CHECK_EQ(std::string(ActiveKernels().name), "plain");
  unsetenv("EMBSTORE_ISA");
  CHECK_EQ(std::string(AvailableKernels().back()->name), "plain");
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
