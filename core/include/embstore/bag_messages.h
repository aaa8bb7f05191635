// Messages that carry the bags of a batch to the ranks that own their keys.
//
//     keys int64 (n) | weights float32 (n), if any | lengths int32 (features x samples) | padding
//
// A message has the keys of all its bags in the order (feature, sample, position). The padding ends
// it at a multiple of 8 bytes. Messages lie one after the other: those for other ranks, by rank,
// then the one that does not travel.
//
// Thread safety: pure functions of their arguments. The result does not depend on the number of
// threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "embstore/hash.h"
#include "embstore/memory.h"

namespace embstore {

// The bags of one rank. offsets: features x samples + 1, from 0, ascending, up to keys.size().
struct BagBatch {
  std::span<const int64_t> keys;
  std::span<const int64_t> offsets;
  const float* weights = nullptr;  // one for each key, or null
  int64_t features = 0;
};

// Who gets which keys.
struct BagOwners {
  uint32_t world = 1;
  uint32_t self = 0;  // this rank
  // Empty: every rank gets all bags, with those of their keys that it owns by this rule. Else the
  // rank that gets all keys of a feature, and no other rank hears of that feature.
  std::span<const int32_t> rank_of_feature;
  Ownership ownership = Ownership::kRoundRobin;
  uint64_t rows = 0;  // as in Owner
};

int64_t BagMessageBytes(int64_t keys, int64_t features, int64_t samples, bool weighted);

struct PackedBags {
  RecycledBuffer messages;
  std::vector<int64_t> keys;   // in the message for each rank
  std::vector<int64_t> bytes;  // of the message for each rank
};

// Throws InvalidArgument for a world of 0 or without this rank, offsets that do not divide the keys
// into bags of all features, and a rank_of_feature that names no rank or another number of
// features.
PackedBags PackBags(const BagBatch& bags, const BagOwners& owners);

// What arrived: messages[i], of rank i, has keys[i] keys in bags of samples[i] samples.
struct ArrivedBags {
  std::span<const std::span<const std::byte>> messages;
  std::span<const int64_t> keys;
  std::span<const int64_t> samples;
  int64_t features = 0;
};

// Writes the bags of all senders in the order (feature, sender, sample), which is that of the
// global batch: offsets (features x all samples + 1), keys and, unless null, weights.
// Throws InvalidArgument when a message does not have the bytes or the keys that it should have.
void UnpackBags(const ArrivedBags& arrived, int64_t* offsets, int64_t* keys, float* weights);

}  // namespace embstore
