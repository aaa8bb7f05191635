// Initial values of rows: a pure function of (seed, table, key, column).
//
// A counter-based generator (Philox4x32-10) is keyed by the seed and the table, and its counter is
// (key, column / 4). So a row does not depend on when, on which thread or on which rank it is made.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "embstore/types.h"

namespace embstore {

enum class InitializerKind : uint8_t {
  kConstant = 0,
  kUniform = 1,          // [lower, upper)
  kNormal = 2,           // mean, std_dev
  kTruncatedNormal = 3,  // mean, std_dev, cut at the absolute bounds lower and upper
  kDebug = 4,            // every component is float(uint64(key) % 100000)
};

struct InitializerOptions {
  InitializerKind kind = InitializerKind::kUniform;
  float value = 0.0f;
  float mean = 0.0f;
  float std_dev = 1.0f;
  float lower = 0.0f;
  float upper = 1.0f;
};

// Throws InvalidArgument that names the field: NaN or infinite numbers, lower > upper,
// std_dev < 0, a truncated normal whose interval has no mass.
void Validate(const InitializerOptions& options);

// Thread safety: immutable after construction.
class Initializer {
 public:
  // `table` separates the streams of tables that share a seed.
  Initializer(const InitializerOptions& options, uint64_t seed, std::string_view table);

  // Writes the initial vector of `key`: columns [0, out.size()) as float32.
  void Fill(int64_t key, std::span<float> out) const;
  // The same, rounded to the element type of the row that would hold it.
  void FillRounded(int64_t key, DType dtype, std::span<float> out) const;

 private:
  InitializerOptions options_;
  // Rounding may lift the largest draws to `upper`, which a half-open interval excludes.
  float below_upper_;
  uint32_t philox_key_[2];
  // Truncated normal. An interval above the mean is mirrored below it, where the CDF is small and
  // keeps its digits; `sign_` mirrors the result back.
  double cdf_lower_ = 0.0, cdf_upper_ = 1.0, sign_ = 1.0;
};

}  // namespace embstore
