// What the tests of snapshots share: all rows that a snapshot has left, as a map.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "check.h"
#include "embstore/snapshot.h"
#include "table_oracle.h"

namespace embstore {

// In blocks of an ugly size. Several threads may share `rows`.
inline void ReadAll(Snapshot& snapshot, std::map<int64_t, RowValues>& rows, std::mutex& mutex) {
  constexpr size_t kRows = 97;
  const auto dim = static_cast<size_t>(snapshot.table().dim());
  const auto width = static_cast<size_t>(snapshot.table().state_width());
  std::vector<int64_t> keys(kRows);
  std::vector<float> values(kRows * dim), states(kRows * width);
  std::vector<uint64_t> scores(kRows);
  while (const int64_t n =
             snapshot.Read(kRows, 0, keys.data(), values.data(), states.data(), scores.data())) {
    std::lock_guard guard(mutex);
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) {
      RowValues row;
      row.value.assign(values.data() + i * dim, values.data() + (i + 1) * dim);
      row.state.assign(states.data() + i * width, states.data() + (i + 1) * width);
      row.score = scores[i];
      CHECK(rows.emplace(keys[i], row).second);  // no row is given twice
    }
  }
}

inline std::map<int64_t, RowValues> Rest(Snapshot& snapshot) {
  std::map<int64_t, RowValues> rows;
  std::mutex mutex;
  ReadAll(snapshot, rows, mutex);
  return rows;
}

}  // namespace embstore
