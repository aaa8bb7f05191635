// The forward pass: vectors of a batch, for several tables in one call.
//
//     keys ──find──► slots ──missing──► insert, initialise ──► gather or pool ──► out
//
// Thread safety: LookUp may be called from any thread and locks its tables. All tables of a call
// share the worker threads; the result does not depend on their number.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "embstore/table.h"

namespace embstore {

enum class Access : uint8_t {
  kTrain = 0,        // inserts what is missing and renews scores
  kReadZero = 1,     // changes nothing; a missing key reads 0.0
  kReadInitial = 2,  // changes nothing; a missing key reads its initial value
};

struct LookupRequest {
  std::shared_ptr<Table> table;  // each table at most once in a call
  std::span<const int64_t> keys;
  Pooling pooling = Pooling::kNone;
  // Pooled: bags + 1, from 0, ascending, the last is keys.size(). Not pooled: only with positions.
  std::span<const int64_t> offsets;
  const float* weights = nullptr;  // pooled: one for each key, or null
  // The initial vectors of missing keys: (n, dim), or null for the table's initializer. Read only
  // for keys that are missing.
  const float* initial = nullptr;
  // Training: (n), 0 where a key that is not stored should not be, or null. It then reads its
  // initial vector and its gradient is dropped.
  const uint8_t* admitted = nullptr;
  // base, dtype, stride and positions (in elements; null: contiguous). Pooled: one position for
  // each bag. Not pooled: one for each run of keys [offsets[g], offsets[g + 1]), a multiple of the
  // stride; the vectors of a run are contiguous.
  VectorsView out;
};

struct LookupResult {
  std::unique_ptr<SlotList> slots;  // kTrain only
  int64_t refused = 0;              // distinct keys
};

// Throws InvalidArgument (offsets, duplicate table), InvalidState (closed table, no score set)
// before anything changes; OutOfMemory when a table cannot grow: the batch has then no effect but
// on scores and on keys that were already inserted.
std::vector<LookupResult> LookUp(std::span<const LookupRequest> requests, Access access);

// Throws InvalidArgument unless offsets is a legal division of n keys.
void ValidateOffsets(std::span<const int64_t> offsets, int64_t n);

// Throws InvalidArgument unless offsets and positions fit each other (see LookupRequest::out).
void ValidateLayout(Pooling pooling, std::span<const int64_t> offsets, int64_t n,
                    const VectorsView& vectors);

}  // namespace embstore
