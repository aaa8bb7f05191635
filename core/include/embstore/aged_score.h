// Aged scores: sums that lose half of their weight with every half-life, as plain integers.
//
// Stored scores are never halved. Instead, later amounts count more: an amount added in half-life h
// counts 2^h times. So scores of any age compare as integers, in a table, in a store below it and
// in a dump.
//
//     bits    63 ...... 40   39 ...... 0
//             exponent       fraction
//     value = (1 + fraction / 2^40) * 2^(exponent - kAgedBias)
//
// Thread safety: pure functions of their arguments.
//
// Invariants
//  1. Adding the same amount several times gives the same bits in any order.
//  2. 0 means nothing.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>

namespace embstore {

inline constexpr int kAgedFractionBits = 40;
inline constexpr uint64_t kAgedOne = uint64_t{1} << kAgedFractionBits;
inline constexpr int64_t kAgedBias = 1 << 20;
inline constexpr int64_t kAgedMostExponent = (1 << 24) - 1;
inline constexpr uint64_t kDoubleOne = uint64_t{1} << 52;  // adds 1 to the exponent of a double

inline uint64_t AddAged(uint64_t a, uint64_t b) {
  if (a < b) std::swap(a, b);
  const uint64_t apart = (a >> kAgedFractionBits) - (b >> kAgedFractionBits);
  if (b == 0 || apart > kAgedFractionBits) return a;
  uint64_t exponent = a >> kAgedFractionBits;
  uint64_t sum = (a % kAgedOne | kAgedOne) + ((b % kAgedOne | kAgedOne) >> apart);
  if (sum >= 2 * kAgedOne) {
    if (exponent == kAgedMostExponent) return UINT64_MAX;
    sum >>= 1;
    ++exponent;
  }
  return exponent << kAgedFractionBits | sum % kAgedOne;
}

// The score of an amount that is added in this half-life. REQUIRES: amount > 0, and finite.
inline uint64_t AgedScore(double amount, int64_t half_life) {
  // As frexp and ldexp do it, but without a call for each newcomer.
  auto bits = std::bit_cast<uint64_t>(amount);
  int64_t exponent = 0;
  if (bits < kDoubleOne) [[unlikely]] {  // it has no exponent
    bits = std::bit_cast<uint64_t>(amount * 0x1p54);
    exponent = -54;
  }
  exponent += static_cast<int64_t>(bits / kDoubleOne) - 1023;
  const double fraction = std::bit_cast<double>(bits % kDoubleOne | 1023 * kDoubleOne) - 1.0;
  const int64_t biased =
      std::clamp<int64_t>(kAgedBias + half_life + exponent, 1, kAgedMostExponent);
  return static_cast<uint64_t>(biased) << kAgedFractionBits |
         static_cast<uint64_t>(fraction * static_cast<double>(kAgedOne));
}

// What a score is worth in this half-life; the inverse of AgedScore.
inline double AgedAmount(uint64_t score, int64_t half_life) {
  if (score == 0) return 0.0;
  const auto exponent =
      static_cast<int64_t>(score >> kAgedFractionBits) - kAgedBias - half_life - kAgedFractionBits;
  const auto value = static_cast<double>(score % kAgedOne | kAgedOne);
  const auto bits = std::bit_cast<uint64_t>(value);
  const int64_t of_result = static_cast<int64_t>(bits / kDoubleOne) + exponent;
  if (of_result < 1 || of_result > 2046) [[unlikely]] {
    return std::ldexp(value, static_cast<int>(std::clamp<int64_t>(exponent, -4000, 4000)));
  }
  return std::bit_cast<double>(bits + static_cast<uint64_t>(exponent) * kDoubleOne);
}

}  // namespace embstore
