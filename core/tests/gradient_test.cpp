#include "embstore/gradient.h"

#include <algorithm>
#include <cmath>
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

StepOptions Sgd(double lr) {
  StepOptions step;
  step.learning_rate = lr;
  return step;
}

std::vector<float> RandomGradients(int64_t n, int64_t dim, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> gradients(static_cast<size_t>(n * dim));
  for (float& g : gradients) g = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
  return gradients;
}

GradientRequest RequestOf(const SlotList& slots, std::vector<float>& gradients, StepOptions step) {
  GradientRequest request;
  request.slots = &slots;
  request.gradients.base = gradients.data();
  request.gradients.stride = slots.table().dim();
  request.step = step;
  return request;
}

// Sums by key, one occurrence after the other in float32.
std::map<int64_t, std::vector<float>> SumsByKey(const std::vector<int64_t>& keys,
                                                const std::vector<float>& gradients, int64_t dim) {
  std::map<int64_t, std::vector<float>> sums;
  for (size_t i = 0; i < keys.size(); ++i) {
    auto& sum = sums[keys[i]];
    sum.resize(static_cast<size_t>(dim), 0.0f);
    for (size_t c = 0; c < sum.size(); ++c) sum[c] += gradients[i * sum.size() + c];
  }
  return sums;
}

TEST(Gradients of duplicates are summed in order, then every row moves once) {
  for (int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    for (int64_t n : {0, 1, 7, 97, 1023, 40000}) {
      const int64_t dim = 7;
      const auto table = Table::Create(SmallTable(dim, 1 << 15));
      const std::vector<int64_t> keys = RandomKeys(n, std::max<int64_t>(n / 5, 3), 11);
      const Forward forward = LookUpOne(table, keys);
      auto gradients = RandomGradients(n, dim, 12);
      const GradientRequest request = RequestOf(*forward.result.slots, gradients, Sgd(0.5));
      const ReducedGradients reduced = ReduceGradients(request);
      const auto sums = SumsByKey(keys, gradients, dim);
      CHECK_EQ(reduced.keys.size(), sums.size());
      for (size_t i = 0; i < reduced.keys.size(); ++i) {
        const auto& sum = sums.at(reduced.keys[i]);
        CHECK(std::equal(sum.begin(), sum.end(), reduced.sums.begin() + 7 * i));
      }
      ApplyGradients({&request, 1});
      const auto rows = AllRows(*table);
      bool same = true;
      for (const auto& [key, sum] : sums) {
        for (size_t c = 0; c < sum.size(); ++c) {
          same &= rows.at(key).value[c] == DebugValue(key) - 0.5f * sum[c];
        }
      }
      CHECK(same);
    }
  }
}

TEST(Pooled gradients reach every key of the bag with its weight) {
  const int64_t dim = 5;
  for (const auto& [threads, bags] : {std::pair<int, int64_t>{1, 1023}, {4, 1023}, {2, 5001}}) {
    SetNumThreads(threads);
    for (Pooling pooling : {Pooling::kSum, Pooling::kMean}) {
      for (bool weighted : {false, true}) {
        const auto table = Table::Create(SmallTable(dim, 1 << 14));
        std::mt19937_64 random(5);
        std::vector<int64_t> keys, offsets = {0};
        std::vector<float> weights;
        for (int64_t bag = 0; bag < bags; ++bag) {
          for (uint64_t i = random() % 7; i > 0; --i) {
            keys.push_back(static_cast<int64_t>(random() % 700));
            weights.push_back(static_cast<float>(random() % 9) / 4.0f - 1.0f);
          }
          offsets.push_back(static_cast<int64_t>(keys.size()));
        }
        const Forward forward = LookUpOne(table, keys);
        const auto before = AllRows(*table);
        auto gradients = RandomGradients(bags, dim, 9);
        GradientRequest request = RequestOf(*forward.result.slots, gradients, Sgd(1.0));
        request.pooling = pooling;
        request.offsets = offsets;
        request.weights = weighted ? weights.data() : nullptr;
        std::vector<float> expanded(keys.size() * 5), by_weight(keys.size());
        for (size_t bag = 0; bag + 1 < offsets.size(); ++bag) {
          for (auto i = static_cast<size_t>(offsets[bag]);
               i < static_cast<size_t>(offsets[bag + 1]); ++i) {
            const auto length = static_cast<float>(offsets[bag + 1] - offsets[bag]);
            float scale = weighted ? weights[i] : 1.0f;
            if (pooling == Pooling::kMean) scale /= length;
            double dot = 0;
            for (size_t c = 0; c < 5; ++c) {
              expanded[5 * i + c] = scale * gradients[5 * bag + c];
              dot += double{gradients[5 * bag + c]} * before.at(keys[i]).value[c];
            }
            by_weight[i] = static_cast<float>(pooling == Pooling::kMean ? dot / length : dot);
          }
        }
        std::vector<float> of_weights(keys.size(), -1.0f);
        WeightGradients(request, of_weights.data());
        for (size_t i = 0; i < keys.size(); ++i) {
          CHECK_NEAR(of_weights[i], by_weight[i], 1e-3 + 1e-5 * std::abs(by_weight[i]));
        }
        ApplyGradients({&request, 1});
        const auto rows = AllRows(*table);
        bool same = true;
        for (const auto& [key, sum] : SumsByKey(keys, expanded, dim)) {
          for (size_t c = 0; c < 5; ++c) same &= rows.at(key).value[c] == DebugValue(key) - sum[c];
        }
        CHECK(same);
      }
    }
  }
}

TEST(Half precision gradients are summed in float32) {
  const auto table = Table::Create(SmallTable(1));
  const std::vector<int64_t> keys(1023, 4);
  const Forward forward = LookUpOne(table, keys);
  std::vector<uint16_t> gradients(1023, 0x3c80);  // 1/64 as bfloat16
  GradientRequest request;
  request.slots = forward.result.slots.get();
  request.gradients = {gradients.data(), DType::kBFloat16, 1};
  request.step = Sgd(1.0);
  ApplyGradients({&request, 1});
  CHECK_EQ(AllRows(*table).at(4).value[0], 4.0f - 1023.0f / 64.0f);
}

TEST(Pinned rows survive eviction while other rows can go) {
  const auto table = Table::Create(SmallTable(1));
  Forward pinned = LookUpOne(table, Range(0, 100));
  for (int64_t step = 1; step < 6; ++step) {
    CHECK_EQ(LookUpOne(table, Range(1000 * step, 1000 * step + 28)).result.refused, 0);
  }
  CHECK_EQ(CountFound(*table, Range(0, 100)), 100);
  CHECK_EQ(table->size(), 128);
  CHECK_EQ(table->stats().dropped_gradients, 0);
  std::vector<float> gradients(100, 1.0f);
  const GradientRequest request = RequestOf(*pinned.result.slots, gradients, Sgd(0.25));
  ApplyGradients({&request, 1});
  const auto rows = AllRows(*table);
  for (int64_t key = 0; key < 100; ++key) CHECK_EQ(rows.at(key).value[0], DebugValue(key) - 0.25f);
  pinned.result.slots.reset();
  CHECK_EQ(LookUpOne(table, Range(9000, 9128)).result.refused, 0);
  CHECK_EQ(CountFound(*table, Range(0, 100)), 0);
}

TEST(Rows of another live batch go before a key is refused and their gradients are counted) {
  for (int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    const auto table = Table::Create(SmallTable(1));
    const Forward first = LookUpOne(table, Range(0, 50));
    const Forward second = LookUpOne(table, Range(40, 100));
    const Forward third = LookUpOne(table, Range(1000, 1110));  // 28 rows are free, 82 have to go
    CHECK_EQ(third.result.refused, 0);
    CHECK_EQ(table->stats().refusals, 0);
    CHECK_EQ(table->stats().dropped_gradients, 82);
    CHECK_EQ(CountFound(*table, Range(1000, 1110)), 110);
    CHECK_EQ(CountFound(*table, Range(0, 40)), 0);  // the oldest go first
    CHECK_EQ(CountFound(*table, Range(40, 100)), 18);
    // What is left of the old batches is updated, what has gone is not: its row has another key.
    std::vector<float> gradients(60, 1.0f);
    const GradientRequest of_first = RequestOf(*first.result.slots, gradients, Sgd(0.5));
    const GradientRequest of_second = RequestOf(*second.result.slots, gradients, Sgd(0.5));
    const size_t kept = ReduceGradients(of_second).keys.size();
    CHECK_EQ(kept, size_t{18});
    ApplyGradients({&of_first, 1});
    ApplyGradients({&of_second, 1});
    std::set<int64_t> twice;  // keys of both batches
    for (const int64_t key : ReduceGradients(of_first).keys) twice.insert(key);
    for (const auto& [key, row] : AllRows(*table)) {
      const float moved = key >= 1000 ? 0.0f : twice.count(key) ? 1.0f : 0.5f;
      CHECK_EQ(row.value[0], DebugValue(key) - moved);
    }
    // Only keys of the batch itself cause a refusal.
    CHECK_EQ(LookUpOne(table, Range(5000, 5130)).result.refused, 2);
    CHECK_EQ(LookUpOne(table, Range(6000, 6128)).result.refused, 0);
  }
  SetNumThreads(2);
}

TEST(Rows that two live batches share stay with both when others go) {
  const auto table = Table::Create(SmallTable(1));
  const Forward first = LookUpOne(table, Range(0, 50));
  const Forward second = LookUpOne(table, Range(50, 128));
  std::vector<int64_t> keys = Range(100, 128);  // of the second batch
  for (int64_t key = 1000; key < 1010; ++key) keys.push_back(key);
  const Forward third = LookUpOne(table, keys);
  CHECK_EQ(table->stats().dropped_gradients, 10);
  std::vector<float> gradients(78, 1.0f);
  const auto kept = [&](const Forward& batch) {
    return ReduceGradients(RequestOf(*batch.result.slots, gradients, Sgd(0.5))).keys.size();
  };
  CHECK_EQ(kept(first), size_t{40});
  CHECK_EQ(kept(second), size_t{78});
  CHECK_EQ(kept(third), size_t{38});
}

TEST(Pinned rows are followed when the table grows) {
  TableOptions options = SmallTable(3, 1 << 15);
  options.optimizer.kind = OptimizerKind::kAdagrad;
  const auto table = Table::Create(options);
  const std::vector<int64_t> keys = RandomKeys(100, 60, 1);
  const Forward forward = LookUpOne(table, keys);
  const int64_t capacity = table->capacity();
  LookUpOne(table, Range(1000, 9000));
  CHECK(table->capacity() > 16 * capacity);
  auto gradients = RandomGradients(100, 3, 2);
  StepOptions step = Sgd(0.1);
  step.eps = 1e-10;
  const GradientRequest request = RequestOf(*forward.result.slots, gradients, step);
  ApplyGradients({&request, 1});
  const auto rows = AllRows(*table);
  for (const auto& [key, sum] : SumsByKey(keys, gradients, 3)) {
    for (size_t c = 0; c < 3; ++c) {
      CHECK_EQ(rows.at(key).state[c], sum[c] * sum[c]);
      const float moved =
          sum[c] == 0.0f ? 0.0f : 0.1f * sum[c] / (std::sqrt(sum[c] * sum[c]) + 1e-10f);
      CHECK_NEAR(rows.at(key).value[c], DebugValue(key) - moved, 1e-5);
    }
  }
  CHECK_EQ(rows.at(5000).state[0], 0.0f);
}

TEST(Gradients of rows that were erased are dropped) {
  for (bool clear : {false, true}) {
    const auto table = Table::Create(SmallTable(1));
    const Forward forward = LookUpOne(table, Range(0, 100));
    if (clear) {
      table->Clear();
    } else {
      CHECK_EQ(table->Erase(Range(50, 300)), 50);
    }
    LookUpOne(table, Range(500, 560));  // takes the freed slots
    LookUpOne(table, {70});             // the key is back as a new row
    std::vector<float> gradients(100, 1.0f);
    const GradientRequest request = RequestOf(*forward.result.slots, gradients, Sgd(0.5));
    ApplyGradients({&request, 1});
    CHECK_EQ(ReduceGradients(request).keys.size(), size_t{clear ? 0u : 50u});
    for (const auto& [key, row] : AllRows(*table)) {
      CHECK_EQ(row.value[0], DebugValue(key) - (key < 50 ? 0.5f : 0.0f));
    }
  }
}

TEST(Refused keys have no gradient) {
  const auto table = Table::Create(SmallTable(2));
  const Forward forward = LookUpOne(table, Range(0, 200));
  std::vector<float> gradients(400, 1.0f);
  const GradientRequest request = RequestOf(*forward.result.slots, gradients, Sgd(0.5));
  ApplyGradients({&request, 1});
  const auto rows = AllRows(*table);
  CHECK_EQ(rows.size(), size_t{128});
  for (const auto& [key, row] : rows) CHECK_EQ(row.value[1], DebugValue(key) - 0.5f);
}

TEST(Gradients by key skip missing keys and say how many) {
  const auto table = Table::Create(SmallTable(2));
  LookUpOne(table, {1, 2, 3});
  const std::vector<int64_t> keys = {3, 9, 3, 1, 9, -5};
  std::vector<float> gradients(12, 1.0f);
  VectorsView view;
  view.base = gradients.data();
  view.stride = 2;
  CHECK_EQ(ApplyGradientsByKey(*table, keys, view, Sgd(0.5)), 3);
  const auto rows = AllRows(*table);
  CHECK_EQ(rows.size(), size_t{3});
  CHECK_EQ(rows.at(3).value[0], 2.0f);
  CHECK_EQ(rows.at(1).value[1], 0.5f);
  CHECK_EQ(rows.at(2).value[1], 2.0f);
  CHECK_EQ(rows.at(1).score, 1u);  // gradients renew no score
  CHECK_THROWS(InvalidArgument, "fewer than 2^31",
               ApplyGradientsByKey(*table, {keys.data(), size_t{1} << 31}, view, Sgd(0.5)));
}

TEST(Gradients of bags by key move every key of the bag, in several tables at once) {
  const auto bags = Table::Create(SmallTable(2)), single = Table::Create(SmallTable(2));
  LookUpOne(bags, {1, 2, 3});
  LookUpOne(single, {1, 2, 3});
  const std::vector<int64_t> keys = {3, 1, 3, 9}, offsets = {0, 1, 1, 4};
  std::vector<float> gradients = {1, 1, 5, 5, 2, 2, 4, 4};  // the second bag has no key
  VectorsView view;
  view.base = gradients.data();
  view.stride = 2;
  std::vector<KeyGradients> requests = {{bags, keys, offsets, view, Sgd(0.5)},
                                        {single, keys, {}, view, Sgd(0.5)}};
  CHECK_EQ(ApplyGradientsByKey(requests, true), 2);
  CHECK_EQ(AllRows(*bags).at(3).value[0], DebugValue(3) - 0.5f * 3);
  CHECK_EQ(AllRows(*bags).at(1).value[1], DebugValue(1) - 0.5f * 2);
  CHECK_EQ(AllRows(*single).at(3).value[0], DebugValue(3) - 0.5f * 3);
  CHECK_EQ(AllRows(*single).at(1).value[1], DebugValue(1) - 0.5f * 5);

  const uint64_t score = AllRows(*bags).at(3).score;
  const std::vector<int64_t> short_of_keys = {0, 1, 3};
  requests[1].offsets = short_of_keys;
  CHECK_THROWS(InvalidArgument, "offsets should end", ApplyGradientsByKey(requests, true));
  requests[1] = requests[0];
  CHECK_THROWS(InvalidArgument, "each table once", ApplyGradientsByKey(requests, true));
  CHECK_EQ(AllRows(*bags).at(3).score, score);  // nothing has changed
  CHECK_EQ(AllRows(*bags).at(3).value[0], DebugValue(3) - 0.5f * 3);
}

TEST(Several tables are updated in one call, the same for any number of threads) {
  std::vector<std::map<int64_t, RowValues>> first;
  for (int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    std::vector<std::shared_ptr<Table>> tables;
    for (int64_t t = 0; t < 4; ++t) {
      TableOptions options = SmallTable(1 + 5 * t, 1024);
      options.initializer.kind = InitializerKind::kUniform;
      options.dtype = static_cast<DType>(t % 3);
      options.optimizer.kind = t % 2 ? OptimizerKind::kAdam : OptimizerKind::kRowwiseAdagrad;
      tables.push_back(Table::Create(options));
    }
    for (int64_t step = 1; step <= 10; ++step) {
      std::vector<Forward> forwards;
      std::vector<std::vector<float>> gradients;
      for (size_t t = 0; t < 4; ++t) {
        forwards.push_back(
            LookUpOne(tables[t], RandomKeys(2000, 3000, static_cast<uint64_t>(step))));
        gradients.push_back(
            RandomGradients(2000, tables[t]->dim(), static_cast<uint64_t>(step) + t));
      }
      std::vector<GradientRequest> requests;
      for (size_t t = 0; t < 4; ++t) {
        StepOptions options = Sgd(0.01);
        options.step = step;
        requests.push_back(RequestOf(*forwards[t].result.slots, gradients[t], options));
      }
      ApplyGradients(requests);
    }
    for (size_t t = 0; t < 4; ++t) {
      if (threads == 1) first.push_back(AllRows(*tables[t]));
      CHECK(AllRows(*tables[t]) == first[t]);
      CHECK(tables[t]->stats().evictions > 0);
    }
  }
}

TEST(A bad request is refused before any row of any table moves) {
  const auto a = Table::Create(SmallTable(1)), b = Table::Create(SmallTable(1));
  const Forward of_a = LookUpOne(a, {1, 2}), of_b = LookUpOne(b, {1, 2});
  std::vector<float> gradients(2, 1.0f);
  std::vector<GradientRequest> requests = {RequestOf(*of_a.result.slots, gradients, Sgd(1.0)),
                                           RequestOf(*of_b.result.slots, gradients, Sgd(-1.0))};
  CHECK_THROWS(InvalidArgument, "learning_rate should be at least 0 but is: -1",
               ApplyGradients(requests));
  requests[1].step = Sgd(std::nan(""));
  CHECK_THROWS(InvalidArgument, "learning_rate", ApplyGradients(requests));
  requests[1].step = Sgd(1.0);
  requests[1].pooling = Pooling::kSum;
  const std::vector<int64_t> offsets = {0, 3};
  requests[1].offsets = offsets;
  CHECK_THROWS(InvalidArgument, "offsets", ApplyGradients(requests));
  std::vector<GradientRequest> three = requests;
  three[1] = RequestOf(*of_b.result.slots, gradients, Sgd(1.0));
  three.push_back(requests[0]);
  CHECK_THROWS(InvalidArgument, "each table once", ApplyGradients(three));
  requests[1] = requests[0];
  CHECK_THROWS(InvalidArgument, "each table once", ApplyGradients(requests));
  CHECK_EQ(AllRows(*a).at(1).value[0], 1.0f);
  b->Close();
  requests[1] = RequestOf(*of_b.result.slots, gradients, Sgd(1.0));
  CHECK_THROWS(InvalidState, "closed", ApplyGradients(requests));
  CHECK_THROWS(InvalidState, "closed", ReduceGradients(requests[1]));
  for (bool renew_scores : {false, true}) {
    CHECK_THROWS(
        InvalidState, "closed",
        ApplyGradientsByKey(*b, Range(1, 3), requests[1].gradients, Sgd(1.0), renew_scores));
  }
  CHECK_EQ(AllRows(*a).at(1).value[0], 1.0f);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
