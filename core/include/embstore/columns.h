// Copies of columns between matrices that have the same rows.
//
// Thread safety: a pure function of its arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace embstore {

// Neighbouring columns of a matrix, and where they go in another. Strides are the bytes of a row.
struct ColumnRun {
  const std::byte* from;
  int64_t from_stride;
  std::byte* to;
  int64_t to_stride;
  int64_t bytes;
};

// Copies all runs, row by row, so that a matrix that many runs share is walked once.
// REQUIRES: no two runs write the same bytes.
void CopyColumns(std::span<const ColumnRun> runs, int64_t rows);

}  // namespace embstore
