#include "../src/grouping.h"

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"

namespace embstore {
namespace {

// Low rows are the most frequent ones, and some occurrences have no row.
std::vector<Row> SomeRows(int64_t n, int64_t limit) {
  std::mt19937_64 random(static_cast<uint64_t>(n + limit));
  std::vector<Row> rows(static_cast<size_t>(n));
  for (Row& row : rows) {
    const auto below = random() % static_cast<uint64_t>(limit) + 1;
    row = static_cast<Row>(random() % below);
    if (random() % 11 == 0) row = kMissingRow;
  }
  return rows;
}

TEST(Occurrences come in the order of their rows, and of the batch where the row is the same) {
  for (int64_t n : {0, 1, 7, 97, 511, 1023, 2047, 3000, 4097, 9000, 20000, 70000, 300000}) {
    for (int64_t limit : {1, 2, 4, 7, 97, 1023, 40000, 1 << 20}) {
      const std::vector<Row> rows = SomeRows(n, limit);
      std::vector<std::pair<Row, uint32_t>> expected, sorted;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] >= 0) expected.emplace_back(rows[i], static_cast<uint32_t>(i));
      }
      std::sort(expected.begin(), expected.end());
      Grouping grouping(rows.data(), n, limit);
      for (int64_t chunk = 0; chunk < grouping.chunks(); ++chunk) grouping.Count(chunk);
      grouping.Place();
      for (int64_t chunk = 0; chunk < grouping.chunks(); ++chunk) grouping.Scatter(chunk);
      for (int64_t partition = 0; partition < grouping.partitions(); ++partition) {
        for (const Occurrence& one : grouping.Sort(partition)) {
          sorted.emplace_back(static_cast<Row>(one.row), static_cast<uint32_t>(one.index));
        }
      }
      CHECK(sorted == expected);
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
