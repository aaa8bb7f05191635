#include "embstore/columns.h"

#include <cstdint>
#include <vector>

#include "check.h"
#include "embstore/parallel.h"

namespace {

using embstore::ColumnRun;

TEST(Columns go from blocks into a wide matrix and back on any number of threads) {
  const int before = embstore::NumThreads();
  for (const int threads : {1, 4}) {
    embstore::SetNumThreads(threads);
    for (const int64_t rows : {0, 1, 127, 1023}) {
      const std::vector<int64_t> widths = {3, 8, 1};  // of the blocks: columns 0 3 6 .. of 12
      std::vector<std::vector<int32_t>> blocks;
      std::vector<int32_t> wide(static_cast<size_t>(rows * 12), -1);
      for (const int64_t width : widths) blocks.emplace_back(rows * width);
      for (size_t b = 0; b < blocks.size(); ++b) {
        for (size_t i = 0; i < blocks[b].size(); ++i) blocks[b][i] = int32_t(b * 100000 + i);
      }
      // (block, its column, column of the wide matrix, columns)
      const std::vector<std::vector<int64_t>> moves = {
          {0, 0, 4, 2}, {1, 2, 6, 6}, {0, 2, 0, 1}, {2, 0, 1, 1}, {1, 0, 2, 2}};
      std::vector<ColumnRun> in, out;
      std::vector<std::vector<int32_t>> returned;
      for (const auto& block : blocks) returned.emplace_back(block.size(), -1);
      for (const auto& m : moves) {
        const auto b = static_cast<size_t>(m[0]);
        auto* const at = reinterpret_cast<std::byte*>(wide.data()) + 4 * m[2];
        in.push_back({reinterpret_cast<std::byte*>(blocks[b].data()) + 4 * m[1], 4 * widths[b], at,
                      4 * 12, 4 * m[3]});
        out.push_back({at, 4 * 12, reinterpret_cast<std::byte*>(returned[b].data()) + 4 * m[1],
                       4 * widths[b], 4 * m[3]});
      }
      embstore::CopyColumns(in, rows);
      for (const auto& m : moves) {
        const auto b = static_cast<size_t>(m[0]);
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t c = 0; c < m[3]; ++c) {
            CHECK_EQ(wide[static_cast<size_t>(row * 12 + m[2] + c)],
                     blocks[b][static_cast<size_t>(row * widths[b] + m[1] + c)]);
          }
        }
      }
      embstore::CopyColumns(out, rows);
      CHECK_EQ(returned == blocks, true);
    }
  }
  embstore::SetNumThreads(before);
}

}  // namespace

TEST_MAIN()
