// Routing: which keys of a batch go to which rank, and sums of the vectors that come back.
//
// A batch is divided into cells (the bags of a feature, whole features, or whole tables). The keys
// for one rank keep the order of the cells, and within a cell the order of the batch. So a receiver
// that concatenates the cells of all senders has the keys in the order of the global batch.
//
//     keys      7  4 | 4  9  4          2 cells, world = 2, uint64(key) % world
//     to rank 0    4 | 4     4          counts 1, 2        (unique: 4 | 4, counts 1, 1)
//     to rank 1 7    |    9             counts 1, 1
//     sent      4  4  4  7  9           index  3  0 | 1  4  2
//
// Thread safety: pure functions of their arguments. The result does not depend on the number of
// threads.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "embstore/hash.h"

namespace embstore {

struct Route {
  std::vector<int64_t> keys;    // in the order (rank, cell, position)
  std::vector<int32_t> counts;  // world x cells
  std::vector<int64_t> index;   // (n): where the key of occurrence i is in `keys`
};

// unique[cell] != 0: each key of the cell is sent once, at its first occurrence. Empty: no cell is
// unique. rows: as in Owner. rank_of_cell: the owner of all keys of each cell, whatever the rule;
// empty: the rule decides.
// Throws InvalidArgument unless offsets divides the keys, unless world is between 1 and kMostRanks,
// and unless rank_of_cell names a rank for each cell.
Route RouteKeys(std::span<const int64_t> keys, std::span<const int64_t> offsets, uint32_t world,
                Ownership ownership, std::span<const uint8_t> unique, uint64_t rows = 0,
                std::span<const int32_t> rank_of_cell = {});

// The owner of each key, with as few divisions as the rule allows.
// REQUIRES: world <= kMostRanks.
using OwnerRank = uint16_t;
inline constexpr uint32_t kMostRanks = 1u << 16;
void FindOwners(std::span<const int64_t> keys, uint32_t world, Ownership ownership, uint64_t rows,
                OwnerRank* ranks);

// Throws InvalidArgument unless world is between 1 and kMostRanks.
void RequireWorld(uint32_t world);

// Throws InvalidArgument unless ranks are empty or `count` numbers below world.
void RequireRanks(std::span<const int32_t> ranks, int64_t count, uint32_t world,
                  const std::string& name);

// out (rows, dim) = for each row r the sum, in order, of the vectors i with index[i] == r.
// Throws InvalidArgument when an index is out of range.
void SumRows(const float* vectors, std::span<const int64_t> index, int64_t dim, int64_t rows,
             float* out);

}  // namespace embstore
