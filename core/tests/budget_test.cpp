// Limits that move while a table is in use, and rows that expire.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "embstore/store.h"
#include "table_oracle.h"

namespace embstore {
namespace {

TableOptions Kind(int kind) {
  TableOptions options = SmallTable(5, 2000);
  options.index.bucket_capacity = 16;
  options.optimizer.kind = OptimizerKind::kAdagrad;
  if (kind == 1) {
    options.score_strategy = ScoreStrategy::kAgedLfu;
    options.admit_by_frequency = true;
    options.shared_rows = 3;
  }
  if (kind == 2) options.evict_least_used = true;
  if (kind == 3) options.ttl = 9;
  if (kind == 4) {
    options.ttl = 7;
    options.store =
        MakeMemoryStore(StoredRowBytes(options.dim, options.dtype, options.optimizer), 0);
  }
  return options;
}

TEST(Limits move at random beside live batches and every invariant holds) {
  for (int kind = 0; kind < 5; ++kind) {
    const auto table = Table::Create(Kind(kind));
    std::mt19937_64 random(static_cast<uint64_t>(kind));
    std::vector<Forward> live;
    for (int step = 0; step < 80; ++step) {
      live.push_back(LookUpOne(table, RandomKeys(97, 6000, random())));
      if (random() % 3 == 0) live.clear();
      if (random() % 4 == 0) {
        const auto rows = static_cast<int64_t>(1 + random() % 3000);
        table->SetMaxCapacity(rows);
        CHECK_EQ(table->stats().max_capacity >= rows, true);
        if (live.empty()) CHECK_EQ(table->size() <= rows, true);
      }
      if (random() % 8 == 0) table->Expire(random() % 40);
      table->CheckInvariants();
    }
  }
}

TEST(A full table takes no more bytes than FullBytes says) {
  for (int kind = 0; kind < 4; ++kind) {
    for (const int64_t rows : {16, 97, 1000, 40000}) {
      TableOptions options = Kind(kind);
      options.ttl = 0;
      options.index.max_capacity = rows;
      options.index.init_capacity = std::min<int64_t>(128, rows);
      const auto table = Table::Create(options);
      for (int64_t begin = 0; begin < 2 * rows; begin += 1000) {
        LookUpOne(table, Range(begin, begin + std::min<int64_t>(rows, 1000)));
      }
      CHECK_EQ(table->size(), rows);
      CHECK_EQ(table->stats().bytes <= Table::FullBytes(options), true);
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
