#include "embstore/initializer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "embstore/hash.h"
#include "embstore/philox.h"

namespace embstore {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> Row(const Initializer& initializer, int64_t key, size_t dim) {
  std::vector<float> row(dim, kNan);
  initializer.Fill(key, row);
  return row;
}

std::vector<float> Sample(const InitializerOptions& options, int64_t keys, size_t dim) {
  const Initializer initializer(options, 7, "items");
  std::vector<float> all;
  for (int64_t key = 0; key < keys; ++key) {
    const std::vector<float> row = Row(initializer, key * 1000003 - 500, dim);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

struct Moments {
  double mean, variance, smallest, largest;
};

Moments MomentsOf(const std::vector<float>& values) {
  double sum = 0, squares = 0;
  for (const float v : values) sum += v;
  const double mean = sum / values.size();
  for (const float v : values) squares += (v - mean) * (v - mean);
  const auto [lo, hi] = std::minmax_element(values.begin(), values.end());
  return {mean, squares / values.size(), *lo, *hi};
}

// Largest distance between the empirical CDF and `cdf`, times sqrt(n). Above 2 by chance: 0.07%.
template <class Cdf>
double KolmogorovSmirnov(std::vector<float> values, const Cdf& cdf) {
  std::sort(values.begin(), values.end());
  const double n = static_cast<double>(values.size());
  double distance = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double p = cdf(values[i]);
    distance = std::max({distance, p - i / n, (i + 1) / n - p});
  }
  return distance * std::sqrt(n);
}

double Phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }

TEST(Philox gives the published known answers) {
  struct Answer {
    uint32_t counter[4], key[2], words[4];
  };
  const Answer answers[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Answer& answer : answers) {
    // Every block of the batch gives the answer when the counter is moved to it.
    for (uint32_t b = 0; b < kPhiloxBlocks; ++b) {
      const uint32_t counter[4] = {answer.counter[0], answer.counter[1], answer.counter[2] - b,
                                   answer.counter[3]};
      for (const auto philox : {Philox4x32, Philox4x32Plain}) {
        uint32_t out[kPhiloxWords];
        philox(answer.key, counter, out);
        for (int w = 0; w < 4; ++w) CHECK_EQ(out[4 * b + w], answer.words[w]);
      }
    }
  }
}

TEST(xxh64 of a key equals the reference for its eight bytes) {
  // XXH64 of the key's little-endian bytes by libxxhash 0.8.1; python-xxhash 4.1.0 agrees.
  const struct {
    int64_t key;
    uint64_t seed, hash;
  } answers[] = {
      {0, 0, 0x34c96acdcadb1bbbULL},         {0, 1, 0x22c76afd15f0110fULL},
      {1, 0, 0x9f29cb17a2a49995ULL},         {1, 1, 0x8afb45d6a8b39709ULL},
      {-1, 0, 0x85d136adb773c6c9ULL},        {-1, 1, 0x0ad7f61289875125ULL},
      {INT64_MIN, 0, 0x3f425eacf01544e0ULL}, {INT64_MIN, 1, 0xcaf0db6a7176f71eULL},
      {INT64_MAX, 0, 0xff70cc60366e770cULL}, {INT64_MAX, 1, 0x4e9c4f439cae2980ULL},
      {123456789, 0, 0xcb7c2941b198004dULL}, {123456789, 1, 0x98732ca0e8c9123eULL},
  };
  for (const auto& answer : answers) CHECK_EQ(Xxh64OfKey(answer.key, answer.seed), answer.hash);
}

TEST(A row depends on seed and table and key and on nothing else) {
  for (const InitializerKind kind : {InitializerKind::kUniform, InitializerKind::kNormal}) {
    const InitializerOptions options{.kind = kind};
    const Initializer one(options, 1, "items"), same(options, 1, "items");
    const Initializer other_seed(options, 2, "items"), other_table(options, 1, "users");
    for (const int64_t key : {INT64_C(0), INT64_C(-1), INT64_MIN, INT64_MAX, INT64_C(1) << 32}) {
      CHECK(Row(one, key, 97) == Row(same, key, 97));
      CHECK(Row(one, key, 97) != Row(one, key ^ 1, 97));
      CHECK(Row(one, key, 97) != Row(one, key ^ (INT64_C(1) << 40), 97));
      CHECK(Row(one, key, 97) != Row(other_seed, key, 97));
      CHECK(Row(one, key, 97) != Row(other_table, key, 97));
    }
  }
}

TEST(A shorter row is the beginning of a longer one) {
  for (const InitializerKind kind :
       {InitializerKind::kUniform, InitializerKind::kNormal, InitializerKind::kTruncatedNormal}) {
    const Initializer initializer({.kind = kind}, 3, "t");
    const std::vector<float> longest = Row(initializer, -5, 1023);
    for (const size_t dim : {0, 1, 7, 31, 32, 33, 97, 128, 1000}) {
      const std::vector<float> row = Row(initializer, -5, dim);
      CHECK(std::equal(row.begin(), row.end(), longest.begin()));
    }
  }
}

TEST(Columns of a row and rows of a table do not repeat) {
  std::vector<float> values = Sample({.kind = InitializerKind::kNormal}, 100, 1023);
  const size_t count = values.size();
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  // float32 normals collide by chance; a reused counter would halve the number.
  CHECK(values.size() > count * 97 / 100);
}

TEST(Constant fills and debug writes the key modulo 100000) {
  const Initializer constant({.kind = InitializerKind::kConstant, .value = -2.5f}, 0, "");
  const Initializer debug({.kind = InitializerKind::kDebug}, 0, "");
  CHECK(Row(constant, 9, 7) == std::vector<float>(7, -2.5f));
  CHECK(Row(debug, 1234567, 7) == std::vector<float>(7, 34567.0f));
  CHECK(Row(debug, -1, 1) == std::vector<float>(1, 51615.0f));  // 2^64 - 1 = ...551615
}

TEST(Uniform values fill their half open interval evenly) {
  const std::vector<float> values =
      Sample({.kind = InitializerKind::kUniform, .lower = -0.5f, .upper = 1.5f}, 1000, 97);
  const Moments m = MomentsOf(values);
  CHECK_NEAR(m.mean, 0.5, 0.01);
  CHECK_NEAR(m.variance, 4.0 / 12, 0.01);
  CHECK(m.smallest >= -0.5 && m.smallest < -0.499 && m.largest < 1.5 && m.largest > 1.499);
  CHECK(KolmogorovSmirnov(values, [](double x) { return (x + 0.5) / 2; }) < 2);
}

TEST(Uniform values stay below upper however narrow the interval) {
  const float next = std::nextafter(1.0f, 2.0f);
  for (const auto& [lower, upper] : {std::pair{1.0f, next},
                                     {-1.0f, 1.0f},
                                     {-3e38f, 3e38f},
                                     {0.0f, 1e-45f},
                                     {1000.0f, 1000.001f}}) {
    const Moments m = MomentsOf(
        Sample({.kind = InitializerKind::kUniform, .lower = lower, .upper = upper}, 100, 1023));
    CHECK(m.smallest >= lower && m.largest < upper);
  }
  CHECK(Sample({.kind = InitializerKind::kUniform, .lower = 2.0f, .upper = 2.0f}, 1, 7) ==
        std::vector<float>(7, 2.0f));
}

TEST(Normal values have the normal distribution) {
  const std::vector<float> values =
      Sample({.kind = InitializerKind::kNormal, .mean = 3.0f, .std_dev = 0.5f}, 1000, 97);
  const Moments m = MomentsOf(values);
  CHECK_NEAR(m.mean, 3.0, 0.01);
  CHECK_NEAR(m.variance, 0.25, 0.005);
  CHECK(m.smallest < 1.1 && m.largest > 4.9);  // tails beyond 3.8 sigma among 97000
  CHECK(KolmogorovSmirnov(values, [](double x) { return Phi((x - 3) / 0.5); }) < 2);
}

TEST(Normal values are the quantiles of their uniform draws to float32 accuracy) {
  // The same words make a narrow uniform and a normal: Phi(z) gives the draw back.
  const Initializer normal({.kind = InitializerKind::kNormal}, 11, "t");
  const Initializer uniform({.kind = InitializerKind::kUniform}, 11, "t");
  for (int64_t key = 0; key < 2000; ++key) {
    const std::vector<float> z = Row(normal, key, 97), u = Row(uniform, key, 97);
    for (size_t i = 0; i < z.size(); ++i) {
      const double density = std::exp(-0.5 * z[i] * z[i]) * 0.3989422804014327;
      CHECK_NEAR(Phi(z[i]), u[i], 6.1e-8 + density * std::abs(z[i]) * 6e-8);
    }
  }
}

TEST(Truncated normal values have the distribution between their bounds) {
  struct Case {
    float mean, std_dev, lower, upper;
  };
  for (const Case& c : {Case{0, 1, -2, 2},
                        {1, 0.5f, 0, 1.25f},
                        {0, 1, 3, 4},
                        {0, 1, -9, -8},
                        {0, 1, 8, 9},
                        {0, 1, 20, 30},
                        {5, 2, -100, 100}}) {
    const std::vector<float> values = Sample({.kind = InitializerKind::kTruncatedNormal,
                                              .mean = c.mean,
                                              .std_dev = c.std_dev,
                                              .lower = c.lower,
                                              .upper = c.upper},
                                             1000, 31);
    const Moments m = MomentsOf(values);
    CHECK(m.smallest >= c.lower && m.largest <= c.upper);
    // Above the mean the oracle is mirrored too, or 1 - Phi loses its digits.
    const double side = c.lower > c.mean ? -1.0 : 1.0;
    const auto phi = [&](double x) { return side * Phi(side * (x - c.mean) / c.std_dev); };
    const auto cdf = [&](double x) {
      return (phi(x) - phi(c.lower)) / (phi(c.upper) - phi(c.lower));
    };
    CHECK(KolmogorovSmirnov(values, cdf) < 2);
  }
}

TEST(Zero deviation gives the mean) {
  CHECK(Sample({.kind = InitializerKind::kNormal, .mean = 2.0f, .std_dev = 0.0f}, 1, 7) ==
        std::vector<float>(7, 2.0f));
  CHECK(Sample({.kind = InitializerKind::kTruncatedNormal, .mean = 0.5f, .std_dev = 0.0f}, 1, 7) ==
        std::vector<float>(7, 0.5f));
}

TEST(Wrong options are refused by name and value) {
  using K = InitializerKind;
  const auto validate = [](const InitializerOptions& o) { Validate(o); };
  CHECK_THROWS(InvalidArgument, "value should be finite but is: nan",
               validate({.kind = K::kConstant, .value = kNan}));
  CHECK_THROWS(InvalidArgument, "lower should be finite but is: -inf",
               validate({.kind = K::kUniform, .lower = -kInfinity}));
  CHECK_THROWS(InvalidArgument, "lower should be at most upper but is: 2",
               validate({.kind = K::kUniform, .lower = 2.0f}));
  CHECK_THROWS(InvalidArgument, "std_dev should be at least 0 but is: -1",
               validate({.kind = K::kNormal, .std_dev = -1.0f}));
  CHECK_THROWS(InvalidArgument, "mean should be finite but is: inf",
               validate({.kind = K::kTruncatedNormal, .mean = kInfinity}));
  CHECK_THROWS(InvalidArgument, "but is: [50, 60]",
               validate({.kind = K::kTruncatedNormal, .lower = 50.0f, .upper = 60.0f}));
  CHECK_THROWS(InvalidArgument, "but is: [1, 1]",
               validate({.kind = K::kTruncatedNormal, .lower = 1.0f, .upper = 1.0f}));
  CHECK_THROWS(InvalidArgument, "mean should be between lower and upper",
               validate({.kind = K::kTruncatedNormal, .mean = 2.0f, .std_dev = 0.0f}));
  CHECK_THROWS(InvalidArgument, "kind should be a known initializer but is: 77",
               validate({.kind = static_cast<K>(77)}));
  CHECK_THROWS(InvalidArgument, "lower", Initializer({.lower = 3.0f}, 0, "t"));
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
