#include "embstore/initializer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "argument_check.h"
#include "embstore/hash.h"
#include "embstore/kernels.h"
#include "embstore/philox.h"

namespace embstore {

namespace {

uint64_t Fnv1a64(std::string_view text) {
  uint64_t h = 0xcbf29ce484222325ULL;
  for (const char ch : text) h = (h ^ static_cast<unsigned char>(ch)) * 0x100000001b3ULL;
  return h;
}

// Natural logarithm of 0 < x < 1 to about 1e-16. Not std::log, whose last bit differs between C
// libraries: rows must not.
double Log(double x) {
  constexpr double kLn2 = 0.693147180559945309417232121458;
  constexpr double kSqrtHalf = 0.707106781186547524400844362105;
  int exponent;
  double mantissa = std::frexp(x, &exponent);  // in [0.5, 1)
  if (mantissa < kSqrtHalf) {
    mantissa *= 2.0;
    --exponent;
  }
  // log(m) = 2 atanh(z) with |z| < 0.172: eleven terms of the series reach double precision.
  const double z = (mantissa - 1.0) / (mantissa + 1.0);
  const double zz = z * z;
  double series = 0.0;
  for (int odd = 21; odd >= 1; odd -= 2) series = series * zz + 1.0 / odd;
  return exponent * kLn2 + 2.0 * z * series;
}

template <int kTerms>
double Polynomial(const double (&coefficients)[kTerms], double x) {
  double sum = coefficients[kTerms - 1];
  for (int i = kTerms - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// Inverse of the standard normal CDF: algorithm AS 241 (PPND16) of Wichura, 1988, split into its
// centre, which is plain arithmetic and covers 85% of all draws, and its tails.
constexpr double kCentre = 0.425;

double InverseNormalCentre(double q) {  // q = p - 0.5, |q| <= kCentre
  constexpr double kNumerator[] = {3.3871328727963666080e0,  1.3314166789178437745e+2,
                                   1.9715909503065514427e+3, 1.3731693765509461125e+4,
                                   4.5921953931549871457e+4, 6.7265770927008700853e+4,
                                   3.3430575583588128105e+4, 2.5090809287301226727e+3};
  constexpr double kDenominator[] = {1.0,
                                     4.2313330701600911252e+1,
                                     6.8718700749205790830e+2,
                                     5.3941960214247511077e+3,
                                     2.1213794301586595867e+4,
                                     3.9307895800092710610e+4,
                                     2.8729085735721942674e+4,
                                     5.2264952788528545610e+3};
  const double r = kCentre * kCentre - q * q;
  return q * Polynomial(kNumerator, r) / Polynomial(kDenominator, r);
}

double InverseNormalLowerTail(double p) {  // 0 < p < 0.5 - kCentre
  constexpr double kNearNumerator[] = {1.42343711074968357734e0,  4.63033784615654529590e0,
                                       5.76949722146069140550e0,  3.64784832476320460504e0,
                                       1.27045825245236838258e0,  2.41780725177450611770e-1,
                                       2.27238449892691845833e-2, 7.74545014278341407640e-4};
  constexpr double kNearDenominator[] = {1.0,
                                         2.05319162663775882187e0,
                                         1.67638483018380384940e0,
                                         6.89767334985100004550e-1,
                                         1.48103976427480074590e-1,
                                         1.51986665636164571966e-2,
                                         5.47593808499534494600e-4,
                                         1.05075007164441684324e-9};
  constexpr double kFarNumerator[] = {6.65790464350110377720e0,  5.46378491116411436990e0,
                                      1.78482653991729133580e0,  2.96560571828504891230e-1,
                                      2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                      2.71155556874348757815e-5, 2.01033439929228813265e-7};
  constexpr double kFarDenominator[] = {1.0,
                                        5.99832206555887937690e-1,
                                        1.36929880922735805310e-1,
                                        1.48753612908506148525e-2,
                                        7.86869131145613259100e-4,
                                        1.84631831751005468180e-5,
                                        1.42151175831644588870e-7,
                                        2.04426310338993978564e-15};
  const double r = std::sqrt(-Log(p));
  if (r <= 5.0) {
    return -Polynomial(kNearNumerator, r - 1.6) / Polynomial(kNearDenominator, r - 1.6);
  }
  return -Polynomial(kFarNumerator, r - 5.0) / Polynomial(kFarDenominator, r - 5.0);
}

double NormalCdf(double x) { return 0.5 * std::erfc(-x * 0.707106781186547524400844362105); }

// The CDF at both ends of a truncated normal, mirrored below the mean when it lies above it.
struct TruncatedMass {
  double lower, upper, sign;
};

TruncatedMass MassOf(const InitializerOptions& o) {
  double lower = (static_cast<double>(o.lower) - o.mean) / o.std_dev;
  double upper = (static_cast<double>(o.upper) - o.mean) / o.std_dev;
  double sign = 1.0;
  if (lower > 0.0) {
    sign = -1.0;
    const double mirrored = -upper;
    upper = -lower;
    lower = mirrored;
  }
  return {NormalCdf(lower), NormalCdf(upper), sign};
}

// z[i] = inverse normal CDF of cdf_lower + u (cdf_upper - cdf_lower), u strictly inside (0, 1).
void NormalQuantiles(const uint32_t words[kPhiloxWords], double cdf_lower, double cdf_upper,
                     double z[kPhiloxWords]) {
  const double cdf_range = cdf_upper - cdf_lower;
  double p[kPhiloxWords];
  for (int i = 0; i < kPhiloxWords; ++i) {
    // Through int32: SSE2 and AVX2 have no conversion from uint32.
    const double centred = static_cast<double>(static_cast<int32_t>(words[i] ^ 0x80000000u));
    p[i] = cdf_lower + (centred + 2147483648.5) * 0x1p-32 * cdf_range;
  }
  // The centre formula is harmless outside its range, so all lanes compute it without a branch.
  for (int i = 0; i < kPhiloxWords; ++i) z[i] = InverseNormalCentre(p[i] - 0.5);
  for (int i = 0; i < kPhiloxWords; ++i) {
    if (std::abs(p[i] - 0.5) <= kCentre) continue;
    z[i] = p[i] < 0.5 ? InverseNormalLowerTail(p[i]) : -InverseNormalLowerTail(1.0 - p[i]);
  }
}

[[gnu::always_inline]] inline void UniformLoop(const uint32_t words[kPhiloxWords], float lower,
                                               float upper, float below_upper,
                                               float out[kPhiloxWords]) {
  for (int i = 0; i < kPhiloxWords; ++i) {
    // A weighted mean of both ends: the range of lower + u * range may overflow.
    const float u = static_cast<float>(static_cast<int32_t>(words[i] >> 8)) * 0x1p-24f;
    const float value = lower * (1.0f - u) + upper * u;
    out[i] = std::max(lower, std::min(value, below_upper));
  }
}

#if defined(__x86_64__)
// Without fused multiply-adds, so the bits are the same.
__attribute__((target("avx2"))) void UniformAvx2(const uint32_t words[kPhiloxWords], float lower,
                                                 float upper, float below_upper,
                                                 float out[kPhiloxWords]) {
  UniformLoop(words, lower, upper, below_upper, out);
}
#endif

// out[i] is uniform in [lower, below_upper].
void Uniform(const uint32_t words[kPhiloxWords], float lower, float upper, float below_upper,
             float out[kPhiloxWords]) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return UniformAvx2(words, lower, upper, below_upper, out);
#endif
  UniformLoop(words, lower, upper, below_upper, out);
}

}  // namespace

void Validate(const InitializerOptions& o) {
  switch (o.kind) {
    case InitializerKind::kConstant:
      CheckFinite("value", o.value);
      return;
    case InitializerKind::kUniform:
      CheckFinite("lower", o.lower);
      CheckFinite("upper", o.upper);
      CheckArgument(o.lower <= o.upper, "lower", "at most upper", o.lower);
      return;
    case InitializerKind::kNormal:
      CheckFinite("mean", o.mean);
      CheckNotNegative("std_dev", o.std_dev);
      return;
    case InitializerKind::kTruncatedNormal: {
      CheckFinite("mean", o.mean);
      CheckNotNegative("std_dev", o.std_dev);
      CheckFinite("lower", o.lower);
      CheckFinite("upper", o.upper);
      CheckArgument(o.lower <= o.upper, "lower", "at most upper", o.lower);
      if (o.std_dev == 0.0f) {
        CheckArgument(o.lower <= o.mean && o.mean <= o.upper, "mean",
                      "between lower and upper when std_dev is 0", o.mean);
        return;
      }
      const TruncatedMass mass = MassOf(o);
      std::ostringstream interval;
      interval << "[" << o.lower << ", " << o.upper << "]";
      CheckArgument(mass.upper > mass.lower, "[lower, upper]",
                    "an interval that the normal distribution reaches", interval.str());
      return;
    }
    case InitializerKind::kDebug:
      return;
  }
  CheckArgument(false, "kind", "a known initializer", static_cast<int>(o.kind));
}

Initializer::Initializer(const InitializerOptions& options, uint64_t seed, std::string_view table)
    : options_(options), below_upper_(options.upper) {
  Validate(options);
  // For one table different seeds never share a stream: HashKey is a bijection.
  const uint64_t seed_hash = HashKey(static_cast<int64_t>(seed));
  const uint64_t mixed = HashKey(static_cast<int64_t>(seed_hash ^ Fnv1a64(table)));
  philox_key_[0] = static_cast<uint32_t>(mixed);
  philox_key_[1] = static_cast<uint32_t>(mixed >> 32);
  if (options.lower < options.upper) {
    below_upper_ = std::nextafter(options.upper, -std::numeric_limits<float>::infinity());
  }
  if (options.kind == InitializerKind::kTruncatedNormal && options.std_dev > 0.0f) {
    const TruncatedMass mass = MassOf(options);
    cdf_lower_ = mass.lower;
    cdf_upper_ = mass.upper;
    sign_ = mass.sign;
  }
}

void Initializer::Fill(int64_t key, std::span<float> out) const {
  const InitializerOptions& o = options_;
  if (o.kind == InitializerKind::kConstant) {
    std::fill(out.begin(), out.end(), o.value);
    return;
  }
  if (o.kind == InitializerKind::kDebug) {
    std::fill(out.begin(), out.end(), static_cast<float>(static_cast<uint64_t>(key) % 100000));
    return;
  }

  const bool truncated = o.kind == InitializerKind::kTruncatedNormal;
  const float lowest = truncated ? o.lower : -std::numeric_limits<float>::max();
  const float highest = truncated ? o.upper : std::numeric_limits<float>::max();
  uint32_t counter[4] = {static_cast<uint32_t>(key),
                         static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32), 0, 0};
  uint32_t words[kPhiloxWords];
  float values[kPhiloxWords];
  for (size_t column = 0; column < out.size(); column += kPhiloxWords) {
    Philox4x32(philox_key_, counter, words);
    counter[2] += kPhiloxBlocks;
    const bool whole = out.size() - column >= kPhiloxWords;
    float* const target = whole ? out.data() + column : values;
    if (o.kind == InitializerKind::kUniform) {
      Uniform(words, o.lower, o.upper, below_upper_, target);
    } else {
      double z[kPhiloxWords];
      NormalQuantiles(words, cdf_lower_, cdf_upper_, z);
      for (int i = 0; i < kPhiloxWords; ++i) {
        const float value = static_cast<float>(o.mean + sign_ * o.std_dev * z[i]);
        target[i] = std::max(lowest, std::min(value, highest));
      }
    }
    if (!whole) std::copy(values, values + (out.size() - column), out.begin() + column);
  }
}

void Initializer::FillRounded(int64_t key, DType dtype, std::span<float> out) const {
  Fill(key, out);
  if (dtype == DType::kFloat32) return;
  thread_local std::vector<uint16_t> rounded;
  rounded.resize(out.size());
  const auto dim = static_cast<int64_t>(out.size());
  ActiveKernels().store_vector(out.data(), dim, dtype, rounded.data());
  ActiveKernels().load_vector(rounded.data(), dim, dtype, out.data());
}

}  // namespace embstore
