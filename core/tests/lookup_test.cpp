#include "embstore/lookup.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "embstore/parallel.h"
#include "table_oracle.h"

namespace embstore {
namespace {

struct Batch {
  std::vector<int64_t> keys, offsets;
  std::vector<float> weights;
};

// Bags of 0 to 9 keys, and one long one.
Batch RandomBatch(int64_t bags, int64_t range, uint64_t seed) {
  std::mt19937_64 random(seed);
  Batch batch;
  batch.offsets.push_back(0);
  for (int64_t bag = 0; bag < bags; ++bag) {
    const uint64_t length = bag == bags / 2 ? 211 : random() % 10;
    for (uint64_t i = 0; i < length; ++i) {
      batch.keys.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(range)));
      batch.weights.push_back(static_cast<float>(random() % 16) / 4.0f - 1.0f);
    }
    batch.offsets.push_back(static_cast<int64_t>(batch.keys.size()));
  }
  return batch;
}

// One key at a time, in float32 and in order, as the kernels promise.
std::vector<float> PoolOracle(const Batch& batch, bool mean, bool weighted, int64_t dim,
                              const std::map<int64_t, RowValues>& rows) {
  std::vector<float> out;
  for (size_t bag = 0; bag + 1 < batch.offsets.size(); ++bag) {
    const auto begin = static_cast<size_t>(batch.offsets[bag]);
    const auto end = static_cast<size_t>(batch.offsets[bag + 1]);
    for (int64_t c = 0; c < dim; ++c) {
      float sum = 0.0f;
      for (size_t i = begin; i < end; ++i) {
        float scale = weighted ? batch.weights[i] : 1.0f;
        if (mean) scale /= static_cast<float>(end - begin);
        const auto row = rows.find(batch.keys[i]);
        if (row != rows.end()) sum += scale * row->second.value[static_cast<size_t>(c)];
      }
      out.push_back(sum);
    }
  }
  return out;
}

LookupRequest PooledRequest(const std::shared_ptr<Table>& table, const Batch& batch, bool mean,
                            bool weighted, float* out) {
  LookupRequest request;
  request.table = table;
  request.keys = batch.keys;
  request.pooling = mean ? Pooling::kMean : Pooling::kSum;
  request.offsets = batch.offsets;
  request.weights = weighted ? batch.weights.data() : nullptr;
  request.out.base = out;
  request.out.stride = table->dim();
  return request;
}

TEST(Training inserts what is missing and returns every row) {
  for (int64_t n : {0, 1, 7, 97, 1023, 20000}) {
    TableOptions options = SmallTable(5, 1 << 16);
    options.initializer.kind = InitializerKind::kNormal;
    const auto table = Table::Create(options);
    const std::vector<int64_t> keys = RandomKeys(n, 5000, static_cast<uint64_t>(n));
    const Forward forward = LookUpOne(table, keys);
    const auto rows = AllRows(*table);
    CHECK_EQ(rows.size(), std::set<int64_t>(keys.begin(), keys.end()).size());
    std::vector<float> initial(5);
    bool same = true;
    for (size_t i = 0; i < keys.size(); ++i) {
      table->InitialVector(keys[i], initial.data());
      same &= rows.at(keys[i]).value == initial;
      same &= std::equal(initial.begin(), initial.end(), forward.out.begin() + 5 * i);
    }
    CHECK(same);
    CHECK_EQ(forward.result.slots->size(), n);
  }
}

TEST(An output that is larger than the caches holds every row) {
  constexpr int64_t kDim = 128, kKeys = 70'001;
  TableOptions options = SmallTable(kDim, 1 << 10);
  options.initializer.kind = InitializerKind::kNormal;
  const auto table = Table::Create(options);
  const std::vector<int64_t> keys = RandomKeys(kKeys, 97, 7);
  const RecycledBuffer out(kKeys * kDim * sizeof(float));  // starts on a line
  LookupRequest request;
  request.table = table;
  request.keys = keys;
  request.out.base = out.data();
  request.out.stride = kDim;
  for (const int threads : {1, 4}) {
    SetNumThreads(threads);
    for (const Access access : {Access::kTrain, Access::kReadZero}) {
      std::fill_n(out.as<float>(), kKeys * kDim, -7.0f);
      LookUp({&request, 1}, access);
      const auto rows = AllRows(*table);
      bool same = true;
      for (size_t i = 0; i < keys.size(); ++i) {
        const std::vector<float>& row = rows.at(keys[i]).value;
        same &= std::equal(row.begin(), row.end(), out.as<float>() + kDim * i);
      }
      CHECK(same);
    }
  }
}

TEST(Keys that the caller does not admit read their initial vector and are not stored) {
  const auto table = Table::Create(SmallTable(3, 1024));
  LookUpOne(table, {5});
  const std::vector<int64_t> keys = {5, 6, 7, 6};
  const std::vector<uint8_t> admitted = {0, 0, 1, 0};
  const std::vector<float> initial = {9, 9, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3};
  std::vector<float> out(keys.size() * 3);
  LookupRequest request;
  request.table = table;
  request.keys = keys;
  request.initial = initial.data();
  request.admitted = admitted.data();
  request.out.base = out.data();
  request.out.stride = 3;
  const auto results = LookUp(std::vector<LookupRequest>{request}, Access::kTrain);
  const auto rows = AllRows(*table);
  CHECK_EQ(rows.size(), size_t{2});
  CHECK(rows.contains(5) && rows.contains(7));
  CHECK(std::equal(initial.begin() + 3, initial.end(), out.begin() + 3));
  CHECK(std::equal(out.begin(), out.begin() + 3, rows.at(5).value.begin()));
  CHECK_EQ(results[0].slots->rows()[1], kMissingRow);
  CHECK_EQ(table->stats().unadmitted, int64_t{2});
}

TEST(Reading changes nothing and gives zeros or initial values for missing keys) {
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    TableOptions options = SmallTable(3, 4096);
    options.initializer.kind = InitializerKind::kUniform;
    options.dtype = dtype;
    const auto table = Table::Create(options);
    LookUpOne(table, Range(0, 100));
    const auto before = AllRows(*table);
    const TableStats stats = table->stats();
    const std::vector<int64_t> keys = Range(50, 200);
    const Forward zeros = LookUpOne(table, keys, Access::kReadZero);
    const Forward initial = LookUpOne(table, keys, Access::kReadInitial);
    CHECK(zeros.result.slots == nullptr);
    CHECK(AllRows(*table) == before);
    CHECK_EQ(table->stats().hits, stats.hits);
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK_EQ(zeros.out[3 * i] == 0.0f, keys[i] >= 100);
    }
    // What a missing key would read once it is inserted, to the bit.
    CHECK(LookUpOne(table, keys).out == initial.out);
  }
}

TEST(Pooled lookups equal a sum in order for any number of threads) {
  for (int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    for (int64_t dim : {1, 7, 32, 97}) {
      for (bool mean : {false, true}) {
        for (bool weighted : {false, true}) {
          TableOptions options = SmallTable(dim, 1 << 14);
          options.initializer.kind = InitializerKind::kNormal;
          const auto table = Table::Create(options);
          const Batch batch = RandomBatch(1023, 3000, 7);
          std::vector<float> out(1023 * static_cast<size_t>(dim), -1.0f);
          const LookupRequest request = PooledRequest(table, batch, mean, weighted, out.data());
          const auto results = LookUp({&request, 1}, Access::kTrain);
          const auto rows = AllRows(*table);
          CHECK(out == PoolOracle(batch, mean, weighted, dim, rows));
          std::fill(out.begin(), out.end(), -1.0f);
          LookUp({&request, 1}, Access::kReadZero);
          CHECK(out == PoolOracle(batch, mean, weighted, dim, rows));
        }
      }
    }
  }
}

TEST(Refused keys add nothing to their bags) {
  const auto table = Table::Create(SmallTable(2));
  Batch batch;
  batch.keys = Range(1, 201);
  for (int64_t i = 0; i <= 200; i += 4) batch.offsets.push_back(i);
  std::vector<float> out(100);
  const LookupRequest request = PooledRequest(table, batch, false, false, out.data());
  CHECK_EQ(LookUp({&request, 1}, Access::kTrain)[0].refused, 72);
  CHECK(out == PoolOracle(batch, false, false, 2, AllRows(*table)));
}

TEST(Bags are written to the positions they were given) {
  const auto table = Table::Create(SmallTable(2));
  const Batch batch{{5, 6, 7}, {0, 1, 3}, {}};
  const std::vector<int64_t> positions = {7, 1};
  std::vector<float> out(9, -1.0f);
  LookupRequest request = PooledRequest(table, batch, false, false, out.data());
  request.out.positions = positions.data();
  LookUp({&request, 1}, Access::kTrain);
  CHECK(out == (std::vector<float>{-1, 13, 13, -1, -1, -1, -1, 5, 5}));
}

TEST(Outputs of another dtype are converted) {
  const auto table = Table::Create(SmallTable(3));
  const std::vector<int64_t> keys = {3, 200};
  std::vector<uint16_t> out(6);
  LookupRequest request;
  request.table = table;
  request.keys = keys;
  request.out = {out.data(), DType::kBFloat16, 3};
  LookUp({&request, 1}, Access::kTrain);
  CHECK_EQ(out[0], 0x4040);  // 3.0
  CHECK_EQ(out[5], 0x4348);  // 200.0
}

TEST(Several tables of different dimensions in one call equal calls of their own) {
  for (int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    std::vector<std::shared_ptr<Table>> together, alone;
    for (int64_t t = 0; t < 5; ++t) {
      TableOptions options = SmallTable(1 + 7 * t, 512 << t);
      options.name = "t" + std::to_string(t);
      options.initializer.kind = InitializerKind::kUniform;
      together.push_back(Table::Create(options));
      alone.push_back(Table::Create(options));
    }
    for (uint64_t step = 0; step < 6; ++step) {
      std::vector<Batch> batches;
      std::vector<std::vector<float>> outs;
      for (size_t t = 0; t < 5; ++t) {
        batches.push_back(RandomBatch(t == 3 ? 0 : 97, 900, step * 5 + t));
        outs.emplace_back((batches[t].offsets.size() - 1) *
                          static_cast<size_t>(together[t]->dim()));
      }
      std::vector<LookupRequest> requests;
      for (size_t t = 0; t < 5; ++t) {
        requests.push_back(
            PooledRequest(together[t], batches[t], t % 2, t % 3 == 0, outs[t].data()));
      }
      LookUp(requests, Access::kTrain);
      for (size_t t = 0; t < 5; ++t) {
        std::vector<float> out(outs[t].size());
        const LookupRequest request =
            PooledRequest(alone[t], batches[t], t % 2, t % 3 == 0, out.data());
        LookUp({&request, 1}, Access::kTrain);
        CHECK(out == outs[t]);
        CHECK(AllRows(*alone[t]) == AllRows(*together[t]));
      }
    }
  }
}

TEST(Eviction and growth are the same for any number of threads) {
  for (ScoreStrategy strategy : {ScoreStrategy::kStep, ScoreStrategy::kLfu}) {
    std::vector<std::map<int64_t, RowValues>> results;
    for (int threads : {1, 2, 4}) {
      SetNumThreads(threads);
      TableOptions options = SmallTable(2, 2048);
      options.score_strategy = strategy;
      options.index.max_load_factor = 0.75;
      const auto table = Table::Create(options);
      for (uint64_t step = 0; step < 20; ++step) LookUpOne(table, RandomKeys(1500, 20000, step));
      CHECK(table->stats().evictions > 1000);
      results.push_back(AllRows(*table));
      CHECK(results.back() == results[0]);
    }
  }
}

TEST(Every occurrence counts for the score with any number of threads) {
  const std::vector<int64_t> keys = RandomKeys(9'973, 1'023, 5);  // several shares
  std::map<int64_t, uint64_t> counts;
  for (const int64_t key : keys) ++counts[key];
  for (const ScoreStrategy strategy : {ScoreStrategy::kLfu, ScoreStrategy::kAgedLfu}) {
    std::vector<uint64_t> alone;
    for (const int threads : {1, 2, 3, 4}) {
      SetNumThreads(threads);
      TableOptions options = SmallTable(1, 4'096);
      options.score_strategy = strategy;
      const auto table = Table::Create(options);
      LookUpOne(table, Range(-3, 1'020));
      for (int batch = 0; batch < 3; ++batch) LookUpOne(table, keys);
      const std::vector<int64_t> all = Range(-3, 1'020);
      std::vector<uint64_t> scores(all.size());
      table->Read(all, nullptr, nullptr, scores.data(), nullptr);
      if (alone.empty()) alone = scores;
      CHECK_EQ(scores == alone, true);
      for (size_t i = 0; strategy == ScoreStrategy::kLfu && i < all.size(); ++i) {
        CHECK_EQ(scores[i], 1 + 3 * counts[all[i]]);
      }
    }
  }
  SetNumThreads(1);
}

TEST(A batch never evicts its own keys) {
  const auto table = Table::Create(SmallTable(1));
  LookUpOne(table, Range(0, 128));
  // All old keys but the last 28 are hit, in front of and behind the new ones.
  std::vector<int64_t> keys = Range(0, 50);
  for (int64_t key : Range(1000, 1040)) keys.push_back(key);
  for (int64_t key : Range(50, 100)) keys.push_back(key);
  const Forward forward = LookUpOne(table, keys);
  CHECK_EQ(forward.result.refused, 12);
  CHECK_EQ(CountFound(*table, Range(0, 100)), 100);
  CHECK_EQ(CountFound(*table, Range(100, 128)), 0);
  CHECK_EQ(table->stats().evictions, 28);
}

TEST(Illegal offsets are named and nothing is inserted) {
  const auto table = Table::Create(SmallTable(1));
  Batch batch{{1, 2, 3}, {}, {}};
  std::vector<float> out(9);
  const auto look_up = [&](std::vector<int64_t> offsets) {
    batch.offsets = std::move(offsets);
    const LookupRequest request = PooledRequest(table, batch, false, false, out.data());
    LookUp({&request, 1}, Access::kTrain);
  };
  CHECK_THROWS(InvalidArgument, "offsets should have at least one element", look_up({}));
  CHECK_THROWS(InvalidArgument, "offsets[0] is: 1", look_up({1, 3}));
  CHECK_THROWS(InvalidArgument, "offsets[0] is: -1", look_up({-1, 3}));
  CHECK_THROWS(InvalidArgument, "offsets[2] is: 1 after 2", look_up({0, 2, 1, 3}));
  CHECK_THROWS(InvalidArgument, "number of keys (3) but ends with: 4", look_up({0, 4}));
  CHECK_THROWS(InvalidArgument, "number of keys (3) but ends with: 2", look_up({0, 2}));
  CHECK_EQ(table->size(), 0);
  CHECK_EQ(table->current_score(), 1u);

  std::vector<LookupRequest> twice(2);
  for (LookupRequest& request : twice) request.table = table;
  CHECK_THROWS(InvalidArgument, "'small' is there twice", LookUp(twice, Access::kTrain));
  LookupRequest huge;
  huge.table = table;
  huge.keys = {batch.keys.data(), size_t{1} << 31};
  CHECK_THROWS(InvalidArgument, "fewer than 2^31", LookUp({&huge, 1}, Access::kTrain));
}

TEST(A table of the call that is closed leaves the others alone) {
  const auto open = Table::Create(SmallTable(1));
  const auto closed = Table::Create(SmallTable(1));
  closed->Close();
  const std::vector<int64_t> keys = {1, 2};
  std::vector<float> out(2);
  std::vector<LookupRequest> requests(2);
  for (LookupRequest& request : requests) {
    request.keys = keys;
    request.out.base = out.data();
    request.out.stride = 1;
  }
  requests[0].table = open;
  requests[1].table = closed;
  CHECK_THROWS(InvalidState, "closed", LookUp(requests, Access::kTrain));
  CHECK_EQ(open->size(), 0);
  CHECK_EQ(open->current_score(), 1u);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
