#include "embstore/columns.h"

#include <algorithm>
#include <cstring>

#include "embstore/parallel.h"

namespace embstore {

void CopyColumns(std::span<const ColumnRun> runs, int64_t rows) {
  constexpr int64_t kRowsPerTask = 128;
  ParallelFor((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kRowsPerTask, rows);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) {
      for (const ColumnRun& run : runs) {
        std::memcpy(run.to + row * run.to_stride, run.from + row * run.from_stride,
                    static_cast<size_t>(run.bytes));
      }
    }
  });
}

}  // namespace embstore
