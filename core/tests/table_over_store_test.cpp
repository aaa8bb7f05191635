// A table over a store: what comes up, what goes down, and what changes meanwhile.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "embstore/gradient.h"
#include "embstore/store.h"
#include "snapshot_oracle.h"
#include "store_oracle.h"
#include "table_oracle.h"

namespace embstore {
namespace {

constexpr int64_t kDim = 5;

// A memory store that counts scans, and reads and writes of keys, and does something before a read
// returns.
class Watched final : public PassesOn {
 public:
  Watched() : PassesOn(MakeMemoryStore(kDim * 4, 0)) {}
  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override {
    PassesOn::Get(keys, rows, scores, found);
    for (const int64_t key : keys) ++reads[key];
    const auto now =
        std::exchange(before_return, nullptr);  // not in the reads that it makes itself
    if (now) now();
  }
  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override {
    PassesOn::Put(keys, rows, scores);
    for (const int64_t key : keys) ++writes[key];
  }
  std::unique_ptr<StoreScanner> Scan() const override {
    ++scans;
    return PassesOn::Scan();
  }
  void Flush() override { ++flushes; }

  mutable int scans = 0;
  int flushes = 0;
  mutable std::map<int64_t, int> reads;
  std::map<int64_t, int> writes;
  mutable std::function<void()> before_return;
};

struct Cache {
  std::shared_ptr<Watched> store = std::make_shared<Watched>();
  std::shared_ptr<Table> table;
  int64_t next = 1000;  // keys from here on are new

  explicit Cache(ScoreStrategy strategy = ScoreStrategy::kStep, uint64_t ttl = 0) {
    TableOptions options = SmallTable(kDim, 128);
    options.optimizer.kind = OptimizerKind::kSgd;
    options.store = store;
    options.score_strategy = strategy;
    options.ttl = ttl;
    table = Table::Create(options);
  }

  bool IsResident(int64_t key) const {
    uint8_t resident = 0;
    table->Resident({&key, 1}, &resident);
    return resident;
  }

  void Set(int64_t key, float value) {
    const std::vector<float> values(kDim, value);
    table->Assign({&key, 1}, values.data(), nullptr, nullptr);
  }

  // Fills the table with keys that nobody has seen, so that all others are below.
  void PushDown() {
    LookUpOne(table, Range(next, next + 128));
    LookUpOne(table, Range(next + 128, next + 256));
    next += 256;
  }

  uint64_t ScoreBelow(int64_t key) const {
    std::vector<std::byte> row(kDim * 4);
    uint64_t score = 0;
    uint8_t found = 0;
    store->Get({&key, 1}, row.data(), &score, &found);
    return found ? score : 0;
  }

  uint64_t ScoreOf(int64_t key) const {
    uint64_t score = 0;
    uint8_t found = 0;
    std::vector<float> value(kDim);
    table->Read({&key, 1}, value.data(), nullptr, &score, &found);
    return found ? score : 0;
  }

  float ValueOf(int64_t key) const { return LookUpOne(table, {key}, Access::kReadZero).out[0]; }
};

TEST(A row that changes below while it is read ahead is read again and comes up) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.PushDown();
  CHECK(!cache.IsResident(7));
  cache.store->before_return = [&] {
    cache.Set(7, 2.0f);
    cache.PushDown();
    CHECK(!cache.IsResident(7));
  };
  cache.table->Prefetch(std::vector<int64_t>{7});
  CHECK(cache.IsResident(7));
  CHECK_EQ(cache.ValueOf(7), 2.0f);
}

TEST(The end of one read ahead does not hide from another what has changed) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.Set(8, 1.0f);
  cache.PushDown();
  cache.store->before_return = [&] {
    cache.Set(7, 2.0f);
    cache.PushDown();
    cache.table->Prefetch(std::vector<int64_t>{8});
    CHECK(cache.IsResident(8) && !cache.IsResident(7));
  };
  cache.table->Prefetch(std::vector<int64_t>{7});
  CHECK_EQ(cache.ValueOf(7), 2.0f);
}

TEST(What changed during an earlier read ahead is read once by the next) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.PushDown();
  cache.store->before_return = [&] {
    cache.Set(7, 2.0f);
    cache.PushDown();
  };
  cache.table->Prefetch(std::vector<int64_t>{7});
  cache.PushDown();
  CHECK(!cache.IsResident(7));
  cache.store->reads.clear();
  cache.table->Prefetch(std::vector<int64_t>{7});
  CHECK_EQ(cache.store->reads[7], 1);
  CHECK_EQ(cache.ValueOf(7), 2.0f);
}

TEST(The keys below are listed once for a snapshot) {
  Cache cache;
  cache.PushDown();
  cache.PushDown();
  Snapshot snapshot(cache.table);
  cache.store->scans = 0;
  CHECK_EQ(snapshot.rows(), 512);
  CHECK_EQ(Rest(snapshot).size(), size_t{512});
  CHECK_EQ(snapshot.rows(), 512);
  CHECK_EQ(cache.store->scans, 1);
}

TEST(All keys of a batch have rows of their own where it has more than the table) {
  Cache cache;
  const std::vector<int64_t> keys = Range(1, 301);
  {
    const Forward forward = LookUpOne(cache.table, keys);
    std::vector<float> gradients(keys.size() * kDim, 0.5f);
    GradientRequest request;
    request.slots = forward.result.slots.get();
    request.gradients.base = gradients.data();
    request.gradients.stride = kDim;
    request.step.learning_rate = 1.0f;
    ApplyGradients({&request, 1});
    for (size_t i = 0; i < keys.size(); ++i) {
      CHECK_EQ(forward.out[i * kDim], DebugValue(keys[i]));
    }
  }
  cache.PushDown();
  for (const int64_t key : keys) CHECK_EQ(cache.ValueOf(key), DebugValue(key) - 0.5f);
}

TEST(A key below that is erased twice in one call counts once) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.Set(8, 1.0f);
  cache.PushDown();
  cache.Set(8, 2.0f);
  CHECK_EQ(cache.table->Erase(std::vector<int64_t>{7, 8, 7, 9, 8, 7}), 2);
  CHECK_EQ(CountFound(*cache.table, {7, 8, 9}), 0);
}

TEST(A row that comes up for training tells the store when it was last used, where rows expire) {
  for (const uint64_t ttl : {1, 1000}) {
    Cache cache(ScoreStrategy::kStep, ttl);
    LookUpOne(cache.table, {7});
    // With scores that are given no step passes.
    const std::vector<float> values(300 * kDim);
    const std::vector<uint64_t> scores(300, 2);
    cache.table->Assign(Range(1000, 1300), values.data(), nullptr, scores.data());
    CHECK(!cache.IsResident(7));
    const uint64_t before = cache.ScoreBelow(7);
    CHECK(before > 0);
    LookUpOne(cache.table, {7});  // and no gradient
    const uint64_t used = cache.ScoreOf(7);
    CHECK(used > before);
    CHECK_EQ(cache.table->stats().expired, 0);
    cache.table->Flush();
    CHECK_EQ(cache.ScoreBelow(7), used);
  }
}

TEST(A row that comes up and does not change is not written again, where rows do not expire) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.PushDown();
  CHECK_EQ(cache.store->writes[7], 1);
  LookUpOne(cache.table, {7});
  CHECK(cache.IsResident(7));
  cache.PushDown();
  CHECK(!cache.IsResident(7));
  CHECK_EQ(cache.store->writes[7], 1);
  cache.Set(7, 2.0f);
  cache.PushDown();
  CHECK_EQ(cache.store->writes[7], 2);
}

TEST(Rows that were read ahead and dropped unused go once their class is searched again) {
  Cache cache;
  const std::vector<int64_t> ahead = Range(1, 101);
  for (const int64_t key : ahead) cache.Set(key, 1.0f);
  cache.PushDown();
  const auto resident = [&] {
    std::vector<uint8_t> found(ahead.size());
    cache.table->Resident(ahead, found.data());
    return std::count(found.begin(), found.end(), 1);
  };
  {
    const auto list = cache.table->Prefetch(ahead);
    LookUpOne(cache.table, Range(300, 328));  // in place of all others
    LookUpOne(cache.table, Range(330, 335));  // for which the class is searched
    CHECK_EQ(resident(), 100);
  }
  LookUpOne(cache.table, {400});  // takes the row of another: these were left out
  CHECK_EQ(resident(), 100);
  CHECK_EQ(cache.table->size(), 128);
  LookUpOne(cache.table, Range(500, 560));  // more than there are others
  CHECK(resident() < 100);
  CHECK_EQ(cache.table->size(), 128);
}

TEST(A snapshot that begins while a row is read ahead has the row with its score) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.PushDown();
  const uint64_t score = cache.ScoreBelow(7);
  std::unique_ptr<Snapshot> snapshot;
  cache.store->before_return = [&] { snapshot = std::make_unique<Snapshot>(cache.table); };
  cache.table->Prefetch(std::vector<int64_t>{7});
  CHECK(snapshot != nullptr);
  cache.Set(7, 2.0f);
  const auto rows = Rest(*snapshot);
  CHECK_EQ(rows.at(7).value[0], 1.0f);
  CHECK_EQ(rows.at(7).score, score);
}

TEST(Coming up is no use where uses are counted) {
  Cache cache(ScoreStrategy::kLfu);
  for (int i = 0; i < 3; ++i) LookUpOne(cache.table, {7});
  const std::vector<int64_t> others = Range(10, 138);
  for (int i = 0; i < 5; ++i)
    LookUpOne(cache.table, others);  // worth more, and as many as there is room for
  CHECK(!cache.IsResident(7));
  CHECK_EQ(cache.ScoreBelow(7), uint64_t{3});
  cache.table->Prefetch(std::vector<int64_t>{7});
  CHECK(cache.IsResident(7));
  CHECK_EQ(cache.ScoreOf(7), uint64_t{3});
}

TEST(Gradients of all occurrences of a key reach a row that is below) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.Set(8, 1.0f);
  cache.PushDown();
  const std::vector<int64_t> keys = {7, 8, 7, 7};
  std::vector<float> gradients(keys.size() * kDim, 1.0f);
  VectorsView view;
  view.base = gradients.data();
  view.stride = kDim;
  StepOptions step;
  step.learning_rate = 0.125;
  CHECK_EQ(ApplyGradientsByKey(*cache.table, keys, view, step), 0);
  CHECK_EQ(cache.ValueOf(7), 1.0f - 3 * 0.125f);
  CHECK_EQ(cache.ValueOf(8), 1.0f - 0.125f);
}

TEST(A row that comes up into a new table keeps its score, where rows expire) {
  Cache cache(ScoreStrategy::kStep, /*ttl=*/100);
  const int64_t key = 7;
  const uint64_t score = 50;
  cache.store->Put({&key, 1}, std::vector<std::byte>(kDim * 4).data(), &score);
  cache.table->Prefetch({&key, 1});
  CHECK(cache.IsResident(key));
  CHECK_EQ(cache.ScoreOf(key), score);
  cache.table->CheckInvariants();
}

TEST(A flush writes down what is dirty and flushes the store) {
  Cache cache;
  cache.Set(7, 1.0f);
  CHECK_EQ(cache.ScoreBelow(7), uint64_t{0});
  cache.table->Flush();
  CHECK(cache.ScoreBelow(7) > 0);
  CHECK_EQ(cache.store->flushes, 1);
}

TEST(What needs a store or an open table says so) {
  const auto alone = Table::Create(SmallTable(kDim, 128));
  CHECK_THROWS(InvalidState, "no store below", alone->Prefetch(std::vector<int64_t>{7}));
  CHECK_THROWS(InvalidState, "no store below", alone->Flush());
  Cache cache;
  cache.table->Close();
  CHECK_THROWS(InvalidState, "closed", cache.table->Prefetch(std::vector<int64_t>{7}));
  CHECK_THROWS(InvalidState, "closed", cache.table->Flush());
  CHECK_THROWS(InvalidState, "closed", cache.table->SaveCheckpoint("a"));
  CHECK_THROWS(InvalidState, "closed", cache.table->LoadCheckpoint("a"));
}

TEST(A table that is closed while it reads ahead says so) {
  Cache cache;
  cache.Set(7, 1.0f);
  cache.PushDown();
  cache.store->before_return = [&] {
    LookUpOne(cache.table, {8});  // rows have changed, too
    cache.table->Close();
  };
  CHECK_THROWS(InvalidState, "closed", cache.table->Prefetch(std::vector<int64_t>{7}));
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
