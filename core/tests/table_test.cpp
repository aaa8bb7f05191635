#include "embstore/table.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "embstore/hash.h"
#include "embstore/parallel.h"
#include "table_oracle.h"

namespace embstore {
namespace {

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(Rows that were assigned are read back for every dtype and odd dimensions) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (int64_t dim : {1, 3, 7, 8, 33, 97}) {
      for (OptimizerKind kind :
           {OptimizerKind::kSgd, OptimizerKind::kRowwiseAdagrad, OptimizerKind::kAdam}) {
        TableOptions options = SmallTable(dim, 4096);
        options.dtype = dtype;
        options.optimizer.kind = kind;
        const auto table = Table::Create(options);
        CHECK_EQ(table->row_bytes() % 16, 0);
        const std::vector<int64_t> keys = {0, -1, kMin, kMax, 7, 97, 1023};
        const size_t n = keys.size();
        const auto width = static_cast<size_t>(table->state_width());
        std::vector<float> values(n * static_cast<size_t>(dim)), states(n * width);
        // Whole numbers up to 256 are exact in every dtype.
        for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251);
        for (size_t i = 0; i < states.size(); ++i) states[i] = 0.1f * static_cast<float>(i);
        const std::vector<uint64_t> scores = {1, 2, 3, 4, 5, 6, UINT64_MAX};
        CHECK_EQ(table->Assign(keys, values.data(), states.data(), scores.data()), 0);
        std::vector<float> got(values.size()), got_states(states.size());
        std::vector<uint64_t> got_scores(n);
        std::vector<uint8_t> found(n);
        table->Read(keys, got.data(), got_states.data(), got_scores.data(), found.data());
        CHECK(got == values);
        CHECK(got_states == states);
        CHECK(got_scores == scores);
        CHECK_EQ(std::count(found.begin(), found.end(), 1), static_cast<int64_t>(n));
        CHECK_EQ(AllRows(*table).size(), n);
      }
    }
  }
}

TEST(New rows of half precision start as their initial values on any number of threads) {
  constexpr int64_t kDim = 2000;
  std::vector<int64_t> keys;  // whose initial values bfloat16 has
  for (int64_t i = 0; i < 4999; ++i) keys.push_back(i * 100'000 + i % 256);
  for (const int threads : {1, 4}) {
    SetNumThreads(threads);
    TableOptions options = SmallTable(kDim, 8192);
    options.dtype = DType::kBFloat16;
    const Forward forward = LookUpOne(Table::Create(options), keys);
    int64_t wrong = 0;
    for (size_t i = 0; i < forward.out.size(); ++i) {
      wrong += forward.out[i] != DebugValue(keys[i / kDim]);
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(A missing key reads zeros and score zero) {
  const auto table = Table::Create(SmallTable(3));
  LookUpOne(table, {1, 2});
  std::vector<float> values(9, 5.0f);
  std::vector<uint64_t> scores(3, 5);
  std::vector<uint8_t> found(3, 5);
  const std::vector<int64_t> keys = {2, 3, 1};
  table->Read(keys, values.data(), nullptr, scores.data(), found.data());
  CHECK(values == (std::vector<float>{2, 2, 2, 0, 0, 0, 1, 1, 1}));
  CHECK_EQ(scores[1], 0u);
  CHECK(found == (std::vector<uint8_t>{1, 0, 1}));
}

TEST(The last assignment of a duplicate key wins) {
  for (int threads : {1, 4}) {
    SetNumThreads(threads);
    const auto table = Table::Create(SmallTable(1, 65536));
    const std::vector<int64_t> keys = RandomKeys(40000, 997, 5);
    std::vector<float> values(keys.size());
    std::map<int64_t, float> model;
    for (size_t i = 0; i < keys.size(); ++i) model[keys[i]] = values[i] = static_cast<float>(i);
    table->Assign(keys, values.data(), nullptr, nullptr);
    const auto rows = AllRows(*table);
    CHECK_EQ(rows.size(), model.size());
    for (const auto& [key, value] : model) CHECK_EQ(rows.at(key).value[0], value);
  }
}

TEST(One bucket of 128 refuses exactly 72 of 200 new keys) {
  for (ScoreStrategy strategy :
       {ScoreStrategy::kTimestamp, ScoreStrategy::kStep, ScoreStrategy::kLfu}) {
    TableOptions options = SmallTable();
    options.score_strategy = strategy;
    const auto table = Table::Create(options);
    std::vector<int64_t> keys = Range(0, 200);
    keys.push_back(199);  // refused keys are counted once
    const Forward forward = LookUpOne(table, keys);
    CHECK_EQ(forward.result.refused, 72);
    CHECK_EQ(table->size(), 128);
    const TableStats stats = table->stats();
    CHECK_EQ(stats.refusals, 72);
    CHECK_EQ(stats.inserts, 128);
    CHECK_EQ(stats.evictions, 0);
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK_EQ(forward.out[4 * i], i < 128 ? DebugValue(keys[i]) : 0.0f);
    }
  }
}

TEST(Of a batch that is too large the keys whose hashes begin smallest get rows) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    TableOptions options = SmallTable(1);
    options.seed = seed;
    const auto table = Table::Create(options);
    std::vector<int64_t> keys = Range(0, 200);
    std::shuffle(keys.begin(), keys.end(), std::mt19937_64(seed));
    LookUpOne(table, Range(1000, 1128));
    LookUpOne(table, keys);
    // As many bits as tell 200 keys apart; then the order of the batch counts.
    std::stable_sort(keys.begin(), keys.end(), [&](int64_t a, int64_t b) {
      const HashSecret secret = SecretOf(seed);
      return KeyedHash(a, secret) >> 56 < KeyedHash(b, secret) >> 56;
    });
    keys.resize(128);
    CHECK_EQ(CountFound(*table, keys), 128);
  }
}

TEST(A full bucket gives up exactly its smallest scores, ties by hash) {
  TableOptions options = SmallTable(2);
  options.score_strategy = ScoreStrategy::kCustomized;
  options.eviction_log = EvictionLog::kRows;
  options.optimizer.kind = OptimizerKind::kAdagrad;
  options.optimizer.initial_accumulator = 0.5f;
  const auto table = Table::Create(options);
  std::mt19937_64 random(3);
  const std::vector<int64_t> keys = Range(1000, 1128);
  std::vector<float> values, states;
  std::vector<uint64_t> scores;
  std::vector<std::tuple<uint64_t, uint64_t, int64_t>> ranks;
  for (int64_t key : keys) {
    for (int c = 0; c < 2; ++c) values.push_back(static_cast<float>(key + c));
    for (int c = 0; c < 2; ++c) states.push_back(static_cast<float>(-key - c));
    scores.push_back(1 + random() % 6);
    ranks.emplace_back(scores.back(), HashKey(key), key);
  }
  std::sort(ranks.begin(), ranks.end());
  table->Assign(keys, values.data(), states.data(), scores.data());
  table->set_custom_score(50);
  CHECK_EQ(LookUpOne(table, Range(0, 37)).result.refused, 0);
  CHECK_EQ(table->size(), 128);
  const RowBlock log = table->DrainEvictions();
  CHECK_EQ(log.keys.size(), size_t{37});
  std::map<int64_t, size_t> at;
  for (size_t i = 0; i < log.keys.size(); ++i) at[log.keys[i]] = i;
  for (size_t r = 0; r < 37; ++r) {
    const auto& [score, hash, key] = ranks[r];
    CHECK_EQ(at.count(key), size_t{1});
    if (!at.count(key)) continue;
    CHECK_EQ(log.scores[at[key]], score);
    CHECK_EQ(log.values[2 * at[key] + 1], static_cast<float>(key + 1));
    CHECK_EQ(log.states[2 * at[key]], static_cast<float>(-key));
  }
  CHECK(table->DrainEvictions().keys.empty());
  // A new row of a reused slot starts fresh, vector and state.
  const auto rows = AllRows(*table);
  for (int64_t key = 0; key < 37; ++key) {
    CHECK_EQ(rows.at(key).value[1], DebugValue(key));
    CHECK_EQ(rows.at(key).state[0], 0.5f);
    CHECK_EQ(rows.at(key).score, 50u);
  }
}

TEST(The eviction log is the same for any number of threads and drops the oldest) {
  std::vector<RowBlock> logs;
  for (int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    TableOptions options = SmallTable(1, 2048);
    options.index.init_capacity = 2048;
    options.eviction_log = EvictionLog::kKeys;
    options.eviction_log_capacity = 500;
    const auto table = Table::Create(options);
    for (int64_t step = 0; step < 8; ++step)
      LookUpOne(table, Range(1000 * step, 1000 * step + 1000));
    logs.push_back(table->DrainEvictions());
    CHECK_EQ(logs.back().keys.size(), size_t{500});
    CHECK_EQ(table->stats().log_dropped, table->stats().evictions - 500);
    CHECK_EQ(table->stats().evictions, table->stats().inserts - table->size());
    CHECK(logs.back().keys == logs[0].keys);
    CHECK(logs.back().values.empty());
  }
}

TEST(Growing keeps every row and its state) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TableOptions options = SmallTable(7, 1 << 16);
    options.dtype = dtype;
    options.initializer.kind = InitializerKind::kUniform;
    options.optimizer.kind = OptimizerKind::kAdam;
    options.index.max_load_factor = 0.75;
    const auto table = Table::Create(options);
    std::map<int64_t, RowValues> before;
    for (int64_t step = 0; step < 10; ++step) {
      LookUpOne(table, Range(step * 1023 - 5000, (step + 1) * 1023 - 5000));
      auto after = AllRows(*table);
      for (const auto& [key, row] : before) CHECK(after.at(key) == row);
      before = std::move(after);
    }
    CHECK_EQ(table->size(), 10230);
    CHECK(table->capacity() >= 10230 * 4 / 3);
    CHECK_EQ(table->stats().refusals + table->stats().evictions, 0);
  }
}

TEST(Rows whose score is below the threshold are not exported) {
  const auto table = Table::Create(SmallTable(1, 4096));
  for (int64_t step = 0; step < 5; ++step) LookUpOne(table, Range(10 * step, 10 * step + 15));
  // Step s (from 1) renews keys 10 (s - 1) .. 10 (s - 1) + 14.
  CHECK_EQ(AllRows(*table).size(), size_t{55});
  CHECK_EQ(AllRows(*table, 3).size(), size_t{35});
  CHECK_EQ(AllRows(*table, 5).size(), size_t{15});
  CHECK_EQ(AllRows(*table, 6).size(), size_t{0});
}

TEST(An export goes on while the table grows and notices that it was cleared) {
  const auto table = Table::Create(SmallTable(1, 1 << 16));
  LookUpOne(table, Range(0, 1000));
  Table::Cursor cursor;
  std::set<int64_t> met;
  for (int64_t step = 1; cursor.next >= 0; ++step) {
    for (int64_t key : table->Export(cursor, 37, 0, true, true).keys) CHECK(met.insert(key).second);
    LookUpOne(table, Range(10000 * step, 10000 * step + 20));
  }
  CHECK(table->size() > 1500);
  for (int64_t key = 0; key < 1000; ++key) CHECK(met.count(key));
  Table::Cursor second;
  CHECK_EQ(table->Export(second, 10, 0, true, true).keys.size(), size_t{10});
  table->Clear();
  CHECK_THROWS(InvalidState, "cleared", table->Export(second, 10, 0, true, true));
  CHECK(AllRows(*table).empty());
  CHECK_EQ(table->size(), 0);
}

TEST(Scores follow their strategy) {
  const auto score_of = [](const Table& table, int64_t key) {
    uint64_t score = 0;
    table.Read({&key, 1}, nullptr, nullptr, &score, nullptr);
    return score;
  };
  TableOptions options = SmallTable();
  const auto step = Table::Create(options);
  CHECK_EQ(step->current_score(), 1u);
  LookUpOne(step, {1, 2});
  LookUpOne(step, {2, 2, 3});
  CHECK_EQ(step->current_score(), 3u);
  CHECK_EQ(score_of(*step, 1), 1u);
  CHECK_EQ(score_of(*step, 2), 2u);
  LookUpOne(step, {});  // a batch without keys counts
  CHECK_EQ(step->current_score(), 4u);
  LookUpOne(step, {1}, Access::kReadZero);
  CHECK_EQ(step->current_score(), 4u);
  CHECK_EQ(score_of(*step, 1), 1u);
  step->set_step(UINT64_MAX);
  LookUpOne(step, {1});
  LookUpOne(step, {2});
  CHECK_EQ(score_of(*step, 2), UINT64_MAX);  // never 0, which says that a slot is free
  CHECK_THROWS(InvalidArgument, "step", step->set_step(0));
  CHECK_THROWS(InvalidArgument, "customized", step->set_custom_score(1));

  options.score_strategy = ScoreStrategy::kLfu;
  const auto lfu = Table::Create(options);
  LookUpOne(lfu, {7, 7, 7, 8});
  LookUpOne(lfu, {8, 7});
  CHECK_EQ(score_of(*lfu, 7), 4u);
  CHECK_EQ(score_of(*lfu, 8), 2u);
  CHECK_EQ(lfu->current_score(), 0u);

  options.score_strategy = ScoreStrategy::kCustomized;
  const auto custom = Table::Create(options);
  CHECK_THROWS(InvalidState, "score", LookUpOne(custom, {1}));
  CHECK_EQ(custom->size(), 0);
  custom->set_custom_score(9);
  LookUpOne(custom, {1, 2});
  custom->set_custom_score(4);
  CHECK_EQ(custom->current_score(), 4u);
  CHECK_EQ(score_of(*custom, 1), 9u);  // setting it touches nothing
  LookUpOne(custom, {1});
  CHECK_EQ(score_of(*custom, 1), 4u);  // a lower one counts as well
  CHECK_THROWS(InvalidArgument, "but is: 0", custom->set_custom_score(0));
}

TEST(Timestamps rise, and the score that is shown is above all stored and not above later ones) {
  TableOptions options = SmallTable(1, 4096);
  options.score_strategy = ScoreStrategy::kTimestamp;
  const auto table = Table::Create(options);
  uint64_t largest = 0;
  for (int64_t i = 0; i < 50; ++i) {
    const uint64_t shown = table->current_score();
    CHECK(shown > largest);
    LookUpOne(table, {i});
    const auto rows = AllRows(*table);
    CHECK(rows.at(i).score >= shown);
    largest = rows.at(i).score;
  }
  // Rows of a machine whose clock is ahead.
  const std::vector<int64_t> keys = {77};
  const std::vector<uint64_t> scores = {largest + 3'600'000'000'000ULL};
  const float value = 1.0f;
  table->Assign(keys, &value, nullptr, scores.data());
  CHECK(table->current_score() > scores[0]);
  LookUpOne(table, {1});
  CHECK(AllRows(*table).at(1).score > scores[0]);
}

TEST(A table that must not evict grows beyond max_capacity and refuses nothing) {
  TableOptions options = SmallTable(1, 1024);
  options.score_strategy = ScoreStrategy::kNoEviction;
  const auto table = Table::Create(options);
  const Forward kept = LookUpOne(table, Range(0, 100));
  for (int64_t key = 100; key < 5000; key += 700) LookUpOne(table, Range(key, key + 700));
  CHECK_EQ(table->stats().evictions + table->stats().refusals, 0);
  CHECK_EQ(table->size(), 5000);
  CHECK(table->capacity() >= 5000);
  CHECK(table->stats().max_capacity >= 5000);
  for (const auto& [key, row] : AllRows(*table)) CHECK_EQ(row.value[0], DebugValue(key));
}

TEST(The first eviction comes when there are as many keys as max_capacity) {
  for (int64_t bucket : {64, 128}) {
    for (int64_t capacity : {int64_t{1024}, int64_t{1000}, 3 * bucket + 1, int64_t{50000}}) {
      for (bool at_once : {false, true}) {
        TableOptions options = SmallTable(1, capacity);
        options.index.bucket_capacity = bucket;
        options.index.init_capacity = at_once ? capacity : 1;
        options.index.max_load_factor = 0.9;
        const auto table = Table::Create(options);
        for (int64_t key = 0; key < capacity; key += 97) {
          LookUpOne(table, Range(key, std::min(key + 97, capacity)));
        }
        CHECK_EQ(table->size(), capacity);
        CHECK_EQ(table->stats().evictions + table->stats().refusals, 0);
        CHECK_EQ(table->capacity(), capacity);
        LookUpOne(table, Range(-13, 0));
        CHECK_EQ(table->size(), capacity);
        CHECK_EQ(table->stats().evictions, 13);
        CHECK_EQ(table->stats().refusals, 0);
      }
    }
  }
}

TEST(A table under eviction holds max_capacity rows and forgets no new key) {
  for (int threads : {1, 4}) {
    SetNumThreads(threads);
    const auto table = Table::Create(SmallTable(1, 4096));
    for (int64_t step = 0; step < 60; ++step) {
      const std::vector<int64_t> keys = Range(1000 * step, 1000 * step + 1000);
      CHECK_EQ(LookUpOne(table, keys).result.refused, 0);
      CHECK_EQ(CountFound(*table, keys), 1000);
      CHECK(table->size() <= 4096);
    }
    CHECK_EQ(table->size(), 4096);
    const auto rows = AllRows(*table);
    CHECK_EQ(rows.size(), size_t{4096});
    for (const auto& [key, row] : rows) CHECK_EQ(row.value[0], DebugValue(key));
    // Old keys go, up to a sampling error: a bucket gives up its own oldest.
    CHECK_EQ(CountFound(*table, Range(0, 50000)), 0);
  }
  SetNumThreads(2);
}

TEST(The count of a frequent key stays at the largest number) {
  TableOptions options = SmallTable(1);
  options.score_strategy = ScoreStrategy::kLfu;
  const auto table = Table::Create(options);
  const std::vector<int64_t> keys = {7};
  const std::vector<uint64_t> scores = {UINT64_MAX - 1};
  const float value = 1.0f;
  table->Assign(keys, &value, nullptr, scores.data());
  for (int i = 0; i < 3; ++i) LookUpOne(table, {7, 7, 8});
  CHECK_EQ(AllRows(*table).at(7).score, UINT64_MAX);
  CHECK_EQ(table->size(), 2);
}

TEST(A closed table refuses all but its statistics) {
  const auto table = Table::Create(SmallTable());
  LookUpOne(table, {1, 2, 3});
  table->Close();
  table->Close();
  const std::vector<int64_t> keys = {1};
  std::vector<float> values(4);
  uint8_t found = 0;
  Table::Cursor cursor;
  CHECK_EQ(table->stats().inserts, 3);
  CHECK_THROWS(InvalidState, "closed", table->size());
  CHECK_THROWS(InvalidState, "closed", table->capacity());
  CHECK_THROWS(InvalidState, "closed", table->Contains(keys, &found));
  CHECK_THROWS(InvalidState, "closed", table->Read(keys, values.data(), nullptr, nullptr, nullptr));
  CHECK_THROWS(InvalidState, "closed", table->Assign(keys, values.data(), nullptr, nullptr));
  CHECK_THROWS(InvalidState, "closed", table->Erase(keys));
  CHECK_THROWS(InvalidState, "closed", table->Clear());
  CHECK_THROWS(InvalidState, "closed", table->Reserve(5));
  CHECK_THROWS(InvalidState, "closed", table->Export(cursor, 5, 0, true, true));
  CHECK_THROWS(InvalidState, "closed", table->DrainEvictions());
  CHECK_THROWS(InvalidState, "closed", table->current_score());
  CHECK_THROWS(InvalidState, "closed", table->set_step(5));
  CHECK_THROWS(InvalidState, "closed", LookUpOne(table, keys));
  CHECK_THROWS(InvalidState, "closed", LookUpOne(table, keys, Access::kReadZero));
}

TEST(Bad arguments are named and change nothing) {
  TableOptions options = SmallTable();
  options.dim = 0;
  CHECK_THROWS(InvalidArgument, "dim should be between 1 and 65536 but is: 0",
               Table::Create(options));
  options = SmallTable();
  options.eviction_log_capacity = 0;
  CHECK_THROWS(InvalidArgument, "eviction_log_capacity", Table::Create(options));

  const auto table = Table::Create(SmallTable(1));
  LookUpOne(table, {1, 2});
  const auto before = AllRows(*table);
  const std::vector<int64_t> keys = {5, 6};
  const std::vector<float> values = {1, 2};
  const std::vector<uint64_t> scores = {4, 0};
  CHECK_THROWS(InvalidArgument, "scores[1] is: 0",
               table->Assign(keys, values.data(), nullptr, scores.data()));
  CHECK_THROWS(InvalidArgument, "rows should be between 0 and max_capacity (128) but is: 129",
               table->Reserve(129));
  CHECK_THROWS(InvalidArgument, "but is: -1", table->Reserve(-1));
  Table::Cursor cursor;
  CHECK_THROWS(InvalidArgument, "max_rows", table->Export(cursor, 0, 0, true, true));
  // The size is refused before any key is read.
  const std::span<const int64_t> too_many(keys.data(), size_t{1} << 31);
  CHECK_THROWS(InvalidArgument, "fewer than 2^31",
               table->Assign(too_many, values.data(), nullptr, nullptr));
  CHECK(AllRows(*table) == before);
}

TEST(A failed allocation leaves the table as it was) {
  TableOptions options = SmallTable(65536, 1'600'000'000);
  options.optimizer.kind = OptimizerKind::kAdam;
  const auto table = Table::Create(options);
  LookUpOne(table, {1, 2, 3});
  const auto before = AllRows(*table);
  CHECK_THROWS(OutOfMemory, "bytes", table->Reserve(int64_t{1} << 30));
  CHECK(AllRows(*table) == before);
  LookUpOne(table, {4});
  CHECK_EQ(table->size(), 4);

  for (int64_t bucket : {16, 128}) {
    options.index.bucket_capacity = bucket;
    options.index.init_capacity = options.index.max_capacity;
    CHECK_THROWS(OutOfMemory, "rows", Table::Create(options));
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
