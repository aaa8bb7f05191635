// Shared rows, and admission of keys against those that have a row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "embstore/aged_score.h"
#include "embstore/gradient.h"
#include "embstore/hash.h"
#include "embstore/parallel.h"
#include "embstore/snapshot.h"
#include "table_oracle.h"

namespace embstore {
namespace {

constexpr int64_t kHalfLife =
    1 << 20;  // batches: in these tests nothing ages, but later keys win ties

TableOptions Contested(int64_t max_capacity, int64_t shared_rows = 1) {
  TableOptions options = SmallTable(3, max_capacity);
  options.score_strategy = ScoreStrategy::kAgedLfu;
  options.admit_by_frequency = true;
  options.half_life = kHalfLife;
  options.shared_rows = shared_rows;
  options.optimizer.kind = OptimizerKind::kSgd;
  return options;
}

// A few keys are frequent, most are rare.
std::vector<int64_t> Skewed(int64_t n, int64_t range, std::mt19937_64& random) {
  std::vector<int64_t> keys(static_cast<size_t>(n));
  for (int64_t& key : keys) {
    const double u = std::ldexp(static_cast<double>(random() >> 11), -53);
    key = static_cast<int64_t>(std::pow(static_cast<double>(range), u)) - 2;
  }
  return keys;
}

// Moves every component of the batch's rows by -amount for each occurrence.
void Push(const Forward& forward, float amount) {
  const SlotList& slots = *forward.result.slots;
  std::vector<float> gradients(static_cast<size_t>(slots.size() * slots.table().dim()), amount);
  GradientRequest request;
  request.slots = &slots;
  request.gradients.base = gradients.data();
  request.gradients.stride = slots.table().dim();
  request.step.learning_rate = 1.0f;
  ApplyGradients({&request, 1});
}

std::set<int64_t> KeysOf(const Table& table) {
  std::set<int64_t> keys;
  for (const auto& [key, row] : AllRows(table)) keys.insert(key);
  return keys;
}

// As the sketch keeps a sum: nine significant bits.
double Narrowed(double sum) {
  int exponent = 0;
  const double fraction = std::frexp(sum, &exponent);
  return std::ldexp(std::floor(std::ldexp(fraction, 9) + 0.5), exponent - 9);
}

// Frequencies of all keys; those with a row; and a row goes to the most frequent challenger.
struct Model {
  int64_t capacity;
  std::map<int64_t, double> counts;
  std::set<int64_t> rows;
  int64_t batches = 0;

  void Batch(const std::vector<int64_t>& keys) {
    std::vector<int64_t> missing;
    std::map<int64_t, int64_t> here;
    for (const int64_t key : keys) {
      if (here[key]++ == 0 && !rows.contains(key)) missing.push_back(key);
    }
    const double weight = 1.0 + static_cast<double>(batches++) / kHalfLife;
    for (const auto& [key, count] : here) counts[key] += static_cast<double>(count) * weight;
    std::set<int64_t> safe;
    for (const auto& [key, count] : here) {
      if (rows.contains(key)) safe.insert(key);
    }
    std::vector<int64_t> challengers;
    for (const int64_t key : missing) {
      if (std::ssize(rows) < capacity) {
        rows.insert(key);
        safe.insert(key);
      } else {
        challengers.push_back(key);
      }
    }
    std::stable_sort(challengers.begin(), challengers.end(),
                     [&](int64_t a, int64_t b) { return counts[a] > counts[b]; });
    for (const int64_t key : challengers) {
      const auto worth = [&](int64_t k) { return std::pair(counts[k], HashKey(k)); };
      int64_t victim = 0;
      bool found = false;
      for (const int64_t k : rows) {
        if (safe.contains(k) || (found && worth(k) > worth(victim))) continue;
        victim = k;
        found = true;
      }
      const uint64_t lead = kAgedOne / 8;
      if (!found || AgedScore(counts[key], 0) - lead <= AgedScore(counts[victim], 0)) break;
      rows.erase(victim);
      rows.insert(key);
      safe.insert(key);
      counts[victim] = Narrowed(counts[victim]);
    }
    for (const int64_t key : challengers) {
      if (!rows.contains(key)) counts[key] = Narrowed(counts[key]);
    }
  }
};

TEST(A key takes the place of a clearly less frequent one and of no other) {
  for (const int64_t capacity : {1, 7, 47, 97, 128, 300}) {
    std::mt19937_64 random(static_cast<uint64_t>(capacity));
    const auto table = Table::Create(Contested(capacity));
    Model model{capacity, {}, {}};
    for (int batch = 0; batch < 60; ++batch) {
      const auto keys = Skewed(97, 2000, random);
      LookUpOne(table, keys);
      model.Batch(keys);
      CHECK(KeysOf(*table) == model.rows);
    }
    table->CheckInvariants();
    const TableStats stats = table->stats();
    CHECK_EQ(stats.refusals, 0);
    CHECK(stats.unadmitted > 0);
    CHECK_EQ(stats.size, capacity);
    for (const auto& [key, row] : AllRows(*table)) {
      CHECK_EQ(AgedAmount(row.score, 0), model.counts[key]);
    }
  }
}

TEST(The rows are the same for any number of threads, also with several classes) {
  std::map<int64_t, RowValues> first;
  RowBlock shared;
  for (const int threads : {1, 2, 4}) {
    SetNumThreads(threads);
    TableOptions options = Contested(5000, 3);
    options.half_life = 7;
    const auto table = Table::Create(options);
    std::mt19937_64 random(1);
    for (int batch = 0; batch < 40; ++batch) {
      Push(LookUpOne(table, Skewed(3001, 40000, random)), 0.25f);
    }
    CHECK(table->stats().evictions > 100);
    if (first.empty()) {
      first = AllRows(*table);
      shared = table->SharedRows();
    }
    CHECK(AllRows(*table) == first);
    CHECK(table->SharedRows().values == shared.values);
    CHECK_EQ(table->size(), 5000);
    table->CheckInvariants();
  }
  SetNumThreads(1);
}

TEST(A table that was filled from a dump goes on with the same choices) {
  const auto filled_from = [](Table& old, int64_t init_capacity) {
    TableOptions options = old.options();
    options.index.init_capacity = init_capacity;
    const auto table = Table::Create(options);
    const auto rows = AllRows(old);  // in another order than they came
    for (const auto& [key, row] : rows) {
      const std::vector<int64_t> one = {key};
      table->Assign(one, row.value.data(), row.state.data(), &row.score);
    }
    const RowBlock shared = old.SharedRows();
    table->AssignShared(shared.keys, shared.values.data(), shared.states.data());
    CHECK(table->RestoreAdmissionCounters(old.AdmissionCounters()));
    return table;
  };
  TableOptions options = Contested(3000, 2);
  options.half_life = 0;
  auto table = Table::Create(options);
  std::mt19937_64 random(1);
  std::vector<std::shared_ptr<Table>> others;
  for (int batch = 0; batch < 60; ++batch) {
    if (batch == 20) others = {filled_from(*table, 128), filled_from(*table, 3000)};
    const auto keys = Skewed(1501, 30000, random);
    Push(LookUpOne(table, keys), 0.25f);
    for (const auto& other : others) Push(LookUpOne(other, keys), 0.25f);
  }
  for (const auto& other : others) {
    CHECK(AllRows(*other) == AllRows(*table));
    CHECK(other->SharedRows().values == table->SharedRows().values);
    CHECK(other->AdmissionCounters() == table->AdmissionCounters());
  }
}

TEST(What was frequent long ago makes room) {
  TableOptions options = Contested(97);
  options.half_life = 5;
  const auto table = Table::Create(options);
  for (int batch = 0; batch < 50; ++batch) LookUpOne(table, Range(0, 97));
  for (int batch = 0; batch < 60; ++batch) LookUpOne(table, Range(1000, 1097));
  CHECK(KeysOf(*table).contains(1000));
  CHECK_EQ(*KeysOf(*table).begin(), 1000);
}

TEST(Keys without a row read and train the shared row) {
  TableOptions options = Contested(2);
  options.initializer.kind = InitializerKind::kConstant;
  options.initializer.value = 5.0f;
  const auto table = Table::Create(options);
  // Unused so far: as if there was none.
  CHECK_EQ(LookUpOne(table, {9}, Access::kReadZero).out[0], 0.0f);
  CHECK_EQ(LookUpOne(table, {9}, Access::kReadInitial).out[0], 5.0f);
  Push(LookUpOne(table, {1, 2, 1, 2}), 0.5f);
  CHECK(table->SharedRows().keys.empty());
  auto forward = std::make_unique<Forward>(LookUpOne(table, {1, 8, 9, 2, 8}));
  CHECK_EQ(forward->result.refused, 0);
  CHECK(forward->out == std::vector<float>({4, 4, 4, 5, 5, 5, 5, 5, 5, 4, 4, 4, 5, 5, 5}));
  Push(*forward, 0.5f);  // three occurrences for the shared row
  forward.reset();       // its rows may go again
  const RowBlock shared = table->SharedRows();
  CHECK(shared.keys == std::vector<int64_t>({0}));
  CHECK(shared.values == std::vector<float>({3.5f, 3.5f, 3.5f}));
  for (const Access access : {Access::kReadZero, Access::kReadInitial}) {
    CHECK(LookUpOne(table, {77, 1}, access).out ==
          std::vector<float>({3.5, 3.5, 3.5, 3.5, 3.5, 3.5}));
  }
  CHECK_EQ(table->stats().unadmitted, 3);
  // One that earns a row begins where the shared row is; without the option, as any other.
  CHECK_EQ(LookUpOne(table, {8, 8, 8}).out[0], 3.5f);
  CHECK(KeysOf(*table).contains(8));
  options.start_from_shared = false;
  const auto fresh = Table::Create(options);
  LookUpOne(fresh, {1, 2, 1, 2});
  Push(LookUpOne(fresh, {8}), 1.0f);
  CHECK_EQ(LookUpOne(fresh, {8, 8}).out[0], 5.0f);
  CHECK_EQ(LookUpOne(fresh, {9}).out[0], 4.0f);
}

TEST(Gradients by key reach the shared row once it is in use) {
  const auto table = Table::Create(Contested(1));
  const std::vector<float> gradients(9, 1.0f);
  VectorsView view;
  view.base = const_cast<float*>(gradients.data());
  view.stride = 3;
  StepOptions step;
  step.learning_rate = 1.0f;
  LookUpOne(table, {1, 1, 1});
  const std::vector<int64_t> keys = {5, 1, 6};
  CHECK_EQ(ApplyGradientsByKey(*table, keys, view, step), 2);
  CHECK(table->SharedRows().keys.empty());
  LookUpOne(table, {5});
  const float before = table->SharedRows().values[0];
  CHECK_EQ(ApplyGradientsByKey(*table, keys, view, step), 2);
  CHECK_EQ(table->SharedRows().values[0], before - 2.0f);
}

TEST(Refused keys and keys below the threshold use shared rows too) {
  TableOptions options = SmallTable(3, 7);
  options.shared_rows = 5;
  const auto table = Table::Create(options);
  CHECK_EQ(LookUpOne(table, Range(0, 100)).result.refused, 93);
  CHECK_EQ(table->SharedRows().keys.size(), size_t{5});
  options.index.max_capacity = 128;
  options.admission_threshold = 2;
  const auto waiting = Table::Create(options);
  const Forward forward = LookUpOne(waiting, Range(0, 50));
  CHECK_EQ(waiting->size(), 0);
  for (int64_t key = 0; key < 50; ++key) {
    const auto number = static_cast<size_t>(Owner(key, 5, Ownership::kRoundRobin));
    CHECK_EQ(forward.out[static_cast<size_t>(3 * key)], waiting->SharedRows().values[3 * number]);
  }
  Push(forward, 1.0f);
  const auto expected = waiting->SharedRows().values;
  const Forward again = LookUpOne(waiting, Range(0, 50));
  CHECK_EQ(waiting->size(), 50);
  for (int64_t key = 0; key < 50; ++key) {
    const auto number = static_cast<size_t>(Owner(key, 5, Ownership::kRoundRobin));
    CHECK_EQ(again.out[static_cast<size_t>(3 * key)], expected[3 * number]);
  }
}

TEST(Snapshots and changes cover shared rows and clearing forgets them) {
  const auto table = Table::Create(Contested(2, 2));
  LookUpOne(table, {1, 2, 1, 2, 1, 2});
  Push(LookUpOne(table, Range(100, 110)), 1.0f);
  const RowBlock before = table->SharedRows();
  CHECK_EQ(before.keys.size(), size_t{2});
  Snapshot snapshot(table);
  table->TrackChanges(true);
  CHECK(Snapshot(table, 1 << 20, Snapshot::Of::kChanges).shared().values == before.values);
  Push(LookUpOne(table, {200}), 1.0f);
  CHECK(snapshot.shared().values == before.values);
  CHECK(table->SharedRows().values != before.values);
  CHECK(Snapshot(table, 1 << 20, Snapshot::Of::kChanges).shared().values ==
        table->SharedRows().values);
  const std::vector<int64_t> second = {1};
  table->AssignShared(second, before.values.data(), nullptr);
  CHECK(table->SharedRows().keys == second);
  table->Clear();
  CHECK(table->SharedRows().keys.empty());
  CHECK_EQ(LookUpOne(table, {200}, Access::kReadZero).out[0], 0.0f);
  LookUpOne(table, Range(0, 10));
  CHECK_EQ(table->size(), 2);
  const std::vector<int64_t> beyond = {2};
  CHECK_THROWS(InvalidArgument, "numbers should be below shared_rows (2)",
               table->AssignShared(beyond, before.values.data(), nullptr));
}

TEST(Gradients of shared rows reach these rows alone) {
  TableOptions options = Contested(4, 2);
  options.score_strategy = ScoreStrategy::kImportance;
  const auto table = Table::Create(options);
  LookUpOne(table, Range(10, 20));
  const auto rows = AllRows(*table);
  const auto shared = table->SharedRows().values;
  const auto known = table->AdmissionCounters();  // keys 0 and 1 are not shared rows 0 and 1
  CHECK_EQ(shared.size(), size_t{6});
  std::vector<float> gradients(9, 1.0f);
  VectorsView view;
  view.base = gradients.data();
  view.stride = 3;
  StepOptions step;
  step.learning_rate = 1.0f;
  for (const int64_t wrong : {-1, 2}) {
    CHECK_THROWS(InvalidArgument, "numbers should be below shared_rows (2)",
                 ApplyGradientsToShared(*table, std::vector<int64_t>{0, wrong}, view, step));
  }
  CHECK(table->SharedRows().values == shared);
  ApplyGradientsToShared(*table, std::vector<int64_t>{1, 0, 1}, view, step);
  const auto moved = table->SharedRows().values;
  for (size_t i = 0; i < 6; ++i) CHECK_EQ(moved[i], shared[i] - (i < 3 ? 1.0f : 2.0f));
  CHECK(AllRows(*table) == rows);
  CHECK(!known.empty() && table->AdmissionCounters() == known);
}

TEST(Rows with small gradients go first where importance is the score) {
  TableOptions options = Contested(4);
  options.score_strategy = ScoreStrategy::kImportance;
  const auto table = Table::Create(options);
  const auto step = [&](const std::vector<int64_t>& keys, const std::vector<float>& amounts) {
    const Forward forward = LookUpOne(table, keys);
    std::vector<float> gradients;
    for (const float amount : amounts) gradients.insert(gradients.end(), {amount, 0.0f, 0.0f});
    GradientRequest request;
    request.slots = forward.result.slots.get();
    request.gradients.base = gradients.data();
    request.gradients.stride = 3;
    ApplyGradients({&request, 1});
  };
  step({1, 2, 3, 4}, {3, -1, 2, 5});
  step({1, 1}, {2, -1});  // the norm of their sum
  const auto importance = [&](int64_t key) { return AgedAmount(AllRows(*table)[key].score, 0); };
  CHECK(std::abs(importance(1) - 4.0) < 1e-4);
  CHECK(std::abs(importance(2) - 1.0) < 1e-4);
  step({8, 9}, {1.5, 0.5});  // without a row: they are remembered
  CHECK(KeysOf(*table) == std::set<int64_t>({1, 2, 3, 4}));
  step({8, 9}, {0, 0});
  CHECK(KeysOf(*table) == std::set<int64_t>({1, 3, 4, 8}));
  CHECK(std::abs(importance(8) - 1.5) < 1e-4);
}

TEST(Options of ageing that cannot work are named) {
  TableOptions options = SmallTable();
  options.admit_by_frequency = true;
  CHECK_THROWS(InvalidArgument, "aged score strategy", Table::Create(options));
  options.score_strategy = ScoreStrategy::kAgedLfu;
  options.admission_threshold = 2;
  CHECK_THROWS(InvalidArgument, "without admission_threshold", Table::Create(options));
  options.admission_threshold = 0;
  options.shared_rows = 65537;
  CHECK_THROWS(InvalidArgument, "shared_rows should be between 0 and 65536 but is: 65537",
               Table::Create(options));
  options.shared_rows = 0;
  options.half_life = -1;
  CHECK_THROWS(InvalidArgument, "half_life should be at least 0 but is: -1",
               Table::Create(options));
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
