// What the tests of tables share: options with small defaults, random keys, and plain ways to ask.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "embstore/lookup.h"
#include "embstore/table.h"

namespace embstore {

// One bucket of 128 rows that cannot grow, unless a test says otherwise.
inline TableOptions SmallTable(int64_t dim = 4, int64_t max_capacity = 128) {
  TableOptions options;
  options.name = "small";
  options.dim = dim;
  options.index.init_capacity = std::min<int64_t>(128, max_capacity);
  options.index.max_capacity = max_capacity;
  options.index.max_load_factor = 1.0;
  options.initializer.kind = InitializerKind::kDebug;
  options.score_strategy = ScoreStrategy::kStep;
  return options;
}

inline std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys;
  for (int64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

inline std::vector<int64_t> RandomKeys(int64_t n, int64_t range, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> keys(static_cast<size_t>(n));
  for (int64_t& key : keys) key = static_cast<int64_t>(random() % static_cast<uint64_t>(range)) - 3;
  return keys;
}

// The initial value that kDebug gives to every component.
inline float DebugValue(int64_t key) {
  return static_cast<float>(static_cast<uint64_t>(key) % 100000);
}

struct Forward {
  std::vector<float> out;
  LookupResult result;
};

// A lookup of one table without pooling.
inline Forward LookUpOne(const std::shared_ptr<Table>& table, const std::vector<int64_t>& keys,
                         Access access = Access::kTrain) {
  Forward forward;
  forward.out.assign(keys.size() * static_cast<size_t>(table->dim()), -1.0f);
  LookupRequest request;
  request.table = table;
  request.keys = keys;
  request.out.base = forward.out.data();
  request.out.stride = table->dim();
  forward.result = std::move(LookUp({&request, 1}, access)[0]);
  return forward;
}

struct RowValues {
  std::vector<float> value, state;
  uint64_t score = 0;
  bool operator==(const RowValues&) const = default;
};

// All rows by key, read in blocks of an ugly size.
inline std::map<int64_t, RowValues> AllRows(const Table& table, uint64_t min_score = 0) {
  std::map<int64_t, RowValues> rows;
  const auto dim = static_cast<size_t>(table.dim());
  const auto width = static_cast<size_t>(table.state_width());
  for (Table::Cursor cursor; cursor.next >= 0;) {
    const RowBlock block = table.Export(cursor, 97, min_score, true, true);
    for (size_t i = 0; i < block.keys.size(); ++i) {
      RowValues& row = rows[block.keys[i]];
      const auto value = block.values.begin() + static_cast<std::ptrdiff_t>(i * dim);
      row.value.assign(value, value + static_cast<std::ptrdiff_t>(dim));
      const auto state = block.states.begin() + static_cast<std::ptrdiff_t>(i * width);
      row.state.assign(state, state + static_cast<std::ptrdiff_t>(width));
      row.score = block.scores[i];
    }
  }
  return rows;
}

inline int64_t CountFound(const Table& table, const std::vector<int64_t>& keys) {
  std::vector<uint8_t> found(keys.size());
  table.Contains(keys, found.data());
  return std::count(found.begin(), found.end(), 1);
}

}  // namespace embstore
