// TableOptions: what a table is made with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "embstore/initializer.h"
#include "embstore/key_index.h"
#include "embstore/optimizer.h"
#include "embstore/store.h"
#include "embstore/types.h"

namespace embstore {

enum class EvictionLog : uint8_t { kOff = 0, kKeys = 1, kRows = 2 };

struct TableOptions {
  std::string name;
  int64_t dim = 0;
  DType dtype = DType::kFloat32;
  KeyIndexOptions index;
  OptimizerOptions optimizer;
  InitializerOptions initializer;
  ScoreStrategy score_strategy = ScoreStrategy::kTimestamp;
  // Evicts the key with the fewest occurrences, whatever its score is. Takes 4 bytes a row.
  bool evict_least_used = false;
  uint64_t seed = 0;
  EvictionLog eviction_log = EvictionLog::kOff;
  int64_t eviction_log_capacity = 1 << 20;  // the oldest entries are dropped and counted
  // > 0: a training batch stores a key once it was seen this often.
  int64_t admission_threshold = 0;
  // In a full table, a key gets a row only if its aged score is larger than that of the row it
  // replaces. Aged strategies only, without a store and without admission_threshold.
  bool admit_by_frequency = false;
  // Of aged strategies, in batches. 0: by the number of keys, see DefaultHalfLife.
  int64_t half_life = 0;
  int64_t shared_rows = 0;
  // How keys choose their shared row. If the number of ranks divides shared_rows, ranks share none.
  Ownership shared_by = Ownership::kRoundRobin;
  bool start_from_shared = true;  // a new row starts with the vector of its shared row
  std::shared_ptr<Store> store;   // the tier below, or null
  // > 0: a row expires when it was not used for so long, in units of the score (nanoseconds, or
  // batches). kTimestamp, kNoEviction and kStep only.
  uint64_t ttl = 0;
};

// A half-life in keys: long enough to tell frequencies apart, short enough to follow a changing
// stream.
int64_t DefaultHalfLife(int64_t max_capacity);

// Bytes of a row in a store.
int64_t StoredRowBytes(int64_t dim, DType dtype, const OptimizerOptions& optimizer);

}  // namespace embstore
