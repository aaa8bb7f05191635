// Philox4x32-10 (Salmon et al., 2011): random words as a pure function of a key and a counter.
#pragma once

#include <cstdint>

namespace embstore {

// Eight counters at a time fill the vector registers.
inline constexpr int kPhiloxBlocks = 8;
inline constexpr int kPhiloxWords = 4 * kPhiloxBlocks;

// out[4 * b + w] = word w of Philox4x32-10 for the counter {c[0], c[1], c[2] + b, c[3]}.
void Philox4x32(const uint32_t key[2], const uint32_t c[4], uint32_t out[kPhiloxWords]);

// The same words without vector instructions: for machines without AVX2, and as the oracle of
// tests.
void Philox4x32Plain(const uint32_t key[2], const uint32_t c[4], uint32_t out[kPhiloxWords]);

}  // namespace embstore
