#include "embstore/routing.h"

#include <algorithm>
#include <string>

#include "embstore/distinct_keys.h"
#include "embstore/lookup.h"
#include "embstore/memory.h"
#include "embstore/parallel.h"
#include "embstore/types.h"

namespace embstore {
namespace {

// Cells [first, last) of about this many keys make a task.
constexpr int64_t kKeysPerTask = 16384;

struct Share {
  int64_t first, last;
};

std::vector<Share> SplitCells(std::span<const int64_t> offsets) {
  const auto cells = static_cast<int64_t>(offsets.size()) - 1;
  std::vector<Share> shares;
  for (int64_t first = 0, last; first < cells; first = last) {
    const int64_t begin = offsets[static_cast<size_t>(first)];
    last = first + 1;
    while (last < cells && last - first < kKeysPerTask &&
           offsets[static_cast<size_t>(last + 1)] - begin <= kKeysPerTask) {
      ++last;
    }
    shares.push_back({first, last});
  }
  return shares;
}

}  // namespace

void RequireWorld(uint32_t world) {
  if (world >= 1 && world <= kMostRanks) return;
  throw InvalidArgument("world should be between 1 and " + std::to_string(kMostRanks) +
                        " but is: " + std::to_string(world));
}

void FindOwners(std::span<const int64_t> keys, uint32_t world, Ownership ownership, uint64_t rows,
                OwnerRank* ranks) {
  if (ownership == Ownership::kRoundRobin && (world & (world - 1)) == 0) {
    const auto mask = static_cast<OwnerRank>(world - 1);
    for (size_t i = 0; i < keys.size(); ++i) ranks[i] = static_cast<OwnerRank>(keys[i]) & mask;
    return;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    ranks[i] = static_cast<OwnerRank>(Owner(keys[i], world, ownership, rows));
  }
}

void RequireRanks(std::span<const int32_t> ranks, int64_t count, uint32_t world,
                  const std::string& name) {
  if (ranks.empty()) return;
  if (std::ssize(ranks) != count) {
    throw InvalidArgument(name + " should have " + std::to_string(count) +
                          " elements but has: " + std::to_string(ranks.size()));
  }
  for (const int32_t rank : ranks) {
    if (rank < 0 || static_cast<uint32_t>(rank) >= world) {
      throw InvalidArgument(name + " should be below world (" + std::to_string(world) +
                            ") but one is: " + std::to_string(rank));
    }
  }
}

Route RouteKeys(std::span<const int64_t> keys, std::span<const int64_t> offsets, uint32_t world,
                Ownership ownership, std::span<const uint8_t> unique, uint64_t rows,
                std::span<const int32_t> rank_of_cell) {
  RequireWorld(world);
  const auto n = static_cast<int64_t>(keys.size());
  if (n > INT32_MAX) {
    throw InvalidArgument("keys should be fewer than 2^31 in a call but are: " + std::to_string(n));
  }
  ValidateOffsets(offsets, n);
  const size_t cells = offsets.size() - 1;
  RequireRanks(rank_of_cell, static_cast<int64_t>(cells), world, "rank_of_cell");
  const std::vector<Share> shares = SplitCells(offsets);
  const auto tasks = static_cast<int64_t>(shares.size());
  Route route;
  route.counts.assign(world * cells, 0);
  route.index.resize(static_cast<size_t>(n));
  // For unique cells: their distinct keys, and which of them each occurrence is.
  std::vector<std::vector<int64_t>> distinct(unique.empty() ? 0 : cells);
  std::vector<uint32_t> ids(unique.empty() ? 0 : static_cast<size_t>(n));
  const auto is_unique = [&](size_t cell) { return !unique.empty() && unique[cell] != 0; };

  // Of the keys that are sent; those of a unique cell begin where the cell does.
  const RecycledBuffer owners(static_cast<size_t>(n) * sizeof(OwnerRank));
  const auto cell_owners = [&](size_t cell) { return owners.as<OwnerRank>() + offsets[cell]; };
  const auto cell_keys = [&](size_t cell) -> std::span<const int64_t> {
    if (is_unique(cell)) return distinct[cell];
    return keys.subspan(static_cast<size_t>(offsets[cell]),
                        static_cast<size_t>(offsets[cell + 1] - offsets[cell]));
  };
  ParallelFor(tasks, [&](int64_t task) {
    thread_local DistinctKeys collector;
    const Share share = shares[static_cast<size_t>(task)];
    for (auto cell = static_cast<size_t>(share.first); cell < static_cast<size_t>(share.last);
         ++cell) {
      if (is_unique(cell)) {
        const auto begin = static_cast<size_t>(offsets[cell]);
        const auto end = static_cast<size_t>(offsets[cell + 1]);
        collector.Reset(end - begin);
        for (size_t i = begin; i < end; ++i) ids[i] = collector.Add(keys[i]).number;
        distinct[cell] = collector.keys();
      }
      const std::span<const int64_t> sent = cell_keys(cell);
      OwnerRank* const rank = cell_owners(cell);
      if (rank_of_cell.empty()) {
        FindOwners(sent, world, ownership, rows, rank);
      } else {
        std::fill_n(rank, sent.size(), static_cast<OwnerRank>(rank_of_cell[cell]));
      }
      for (size_t i = 0; i < sent.size(); ++i) ++route.counts[rank[i] * cells + cell];
    }
  });

  std::vector<int64_t> begins(world * cells);
  int64_t total = 0;
  for (size_t i = 0; i < begins.size(); ++i) {
    begins[i] = total;
    total += route.counts[i];
  }
  route.keys.resize(static_cast<size_t>(total));
  ParallelFor(tasks, [&](int64_t task) {
    std::vector<int64_t> next(world), places;
    const Share share = shares[static_cast<size_t>(task)];
    for (auto cell = static_cast<size_t>(share.first); cell < static_cast<size_t>(share.last);
         ++cell) {
      for (uint32_t rank = 0; rank < world; ++rank) next[rank] = begins[rank * cells + cell];
      const std::span<const int64_t> sent = cell_keys(cell);
      const auto begin = static_cast<size_t>(offsets[cell]);
      if (is_unique(cell)) places.resize(sent.size());
      const OwnerRank* const rank = cell_owners(cell);
      int64_t* const place = is_unique(cell) ? places.data() : route.index.data() + begin;
      for (size_t i = 0; i < sent.size(); ++i) {
        const int64_t at = next[rank[i]]++;
        route.keys[static_cast<size_t>(at)] = sent[i];
        place[i] = at;
      }
      if (!is_unique(cell)) continue;
      for (auto i = begin; i < static_cast<size_t>(offsets[cell + 1]); ++i) {
        route.index[i] = places[ids[i]];
      }
    }
  });
  return route;
}

void SumRows(const float* vectors, std::span<const int64_t> index, int64_t dim, int64_t rows,
             float* out) {
  for (size_t i = 0; i < index.size(); ++i) {
    if (index[i] < 0 || index[i] >= rows) {
      throw InvalidArgument("index should be between 0 and the number of rows (" +
                            std::to_string(rows) + ") but index[" + std::to_string(i) +
                            "] is: " + std::to_string(index[i]));
    }
  }
  // Each thread owns a range of rows and scans the whole index, so a row is summed in order.
  const int64_t parts = NumThreads();
  ParallelFor(parts, [&](int64_t part) {
    const int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
    std::fill(out + first * dim, out + last * dim, 0.0f);
    for (size_t i = 0; i < index.size(); ++i) {
      if (index[i] < first || index[i] >= last) continue;
      float* const to = out + index[i] * dim;
      const float* const from = vectors + static_cast<int64_t>(i) * dim;
      for (int64_t c = 0; c < dim; ++c) to[c] += from[c];
    }
  });
}

}  // namespace embstore
