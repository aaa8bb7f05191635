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
    for (int64_t limit : std::vector<int64_t>{1, 2, 4, 7, 97, 1023, 40000, 1 << 20, INT32_MAX}) {
      const std::vector<Row> rows = SomeRows(n, limit);
      std::vector<std::pair<Row, uint32_t>> expected;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] >= 0) expected.emplace_back(rows[i], static_cast<uint32_t>(i));
      }
      std::sort(expected.begin(), expected.end());
      for (int threads : {1, 2, 3, 8, 300}) {
        Grouping grouping(rows.data(), n, limit, threads);
        Grouping* const one = &grouping;
        Grouping::SortAll({&one, 1});
        std::vector<std::pair<Row, uint32_t>> sorted;
        for (int64_t partition = 0; partition < grouping.partitions(); ++partition) {
          const std::span<const Occurrence> part = grouping.Partition(partition);
          CHECK(part.empty() || sorted.empty() ||
                sorted.back().first < static_cast<Row>(part[0].row));
          for (const Occurrence& occurrence : part) {
            sorted.emplace_back(static_cast<Row>(occurrence.row), occurrence.index);
          }
        }
        CHECK(sorted == expected);
      }
    }
  }
}

TEST(Batches of several sizes are sorted together) {
  std::vector<std::vector<Row>> rows;
  std::vector<Grouping> groupings;
  std::vector<Grouping*> batches;
  for (int64_t n : {40000, 0, 5, 1000}) rows.push_back(SomeRows(n, 5000));
  for (const auto& of_batch : rows) {
    groupings.emplace_back(of_batch.data(), std::ssize(of_batch), 5000, 4);
  }
  for (Grouping& grouping : groupings) batches.push_back(&grouping);
  Grouping::SortAll(batches);
  for (size_t batch = 0; batch < rows.size(); ++batch) {
    int64_t size = 0, last = -1;
    for (int64_t partition = 0; partition < groupings[batch].partitions(); ++partition) {
      for (const Occurrence& occurrence : groupings[batch].Partition(partition)) {
        CHECK(occurrence.row >= last);
        CHECK_EQ(static_cast<int64_t>(occurrence.row), int64_t{rows[batch][occurrence.index]});
        last = occurrence.row;
        ++size;
      }
    }
    const auto has_row = [](Row row) { return row >= 0; };
    CHECK_EQ(size, std::count_if(rows[batch].begin(), rows[batch].end(), has_row));
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
