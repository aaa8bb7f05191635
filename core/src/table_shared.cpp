// Shared rows, which serve keys without a row of their own.
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "embstore/snapshot.h"
#include "embstore/table.h"

namespace embstore {

Row Table::SharedRow(int64_t key) const {
  if (!has_shared_rows()) return kMissingRow;
  const auto row =
      static_cast<Row>(Owner(key, static_cast<uint32_t>(options_.shared_rows), options_.shared_by));
  return shared_used_[static_cast<size_t>(row)] ? row : kMissingRow;
}

void Table::UseShared(const int64_t* keys, Row* rows, std::span<const uint32_t> occurrences) {
  if (!has_shared_rows()) return;
  const auto n = static_cast<uint32_t>(options_.shared_rows);
  for (const uint32_t i : occurrences) {
    if (rows[i] != kMissingRow) continue;
    rows[i] = static_cast<Row>(Owner(keys[i], n, options_.shared_by));
    if (!shared_used_[static_cast<size_t>(rows[i])]) BeginShared(rows[i]);
  }
}

// Shared rows use another name, so that their initial vectors differ from those of keys.
void Table::BeginShared(Row row) {
  const Initializer initializer(options_.initializer, options_.seed, options_.name + "/shared");
  std::vector<float> vector(static_cast<size_t>(options_.dim));
  initializer.Fill(row, vector);
  ActiveKernels().store_vector(vector.data(), options_.dim, options_.dtype, rows_.at(row));
  InitState(options_.optimizer, options_.dim, state_at(row));
  shared_used_[static_cast<size_t>(row)] = 1;
}

RowBlock Table::CollectShared() const {
  std::vector<IndexEntry> entries;
  for (Row row = 0; row < options_.shared_rows; ++row) {
    if (shared_used_[static_cast<size_t>(row)]) entries.push_back({row, 0, row});
  }
  return Collect(entries, /*with_values=*/true, /*with_states=*/true);
}

RowBlock Table::SharedRows() const {
  std::shared_lock guard(lock_);
  RequireOpen();
  return CollectShared();
}

void Table::AssignShared(std::span<const int64_t> numbers, const float* values,
                         const float* states) {
  std::unique_lock guard(lock_);
  RequireOpen();
  for (const int64_t number : numbers) {
    if (number < 0 || number >= options_.shared_rows) {
      throw InvalidArgument("numbers should be below shared_rows (" +
                            std::to_string(options_.shared_rows) + ") of table '" + options_.name +
                            "' but one is: " + std::to_string(number));
    }
  }
  std::fill(shared_used_.begin(), shared_used_.end(), uint8_t{0});
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto row = static_cast<Row>(numbers[i]);
    ActiveKernels().store_vector(values + i * options_.dim, options_.dim, options_.dtype,
                                 rows_.at(row));
    if (states) {
      std::copy_n(states + i * state_width_, state_width_, state_at(row));
    } else {
      InitState(options_.optimizer, options_.dim, state_at(row));
    }
    shared_used_[static_cast<size_t>(row)] = 1;
  }
}

}  // namespace embstore
