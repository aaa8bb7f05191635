#include "embstore/store.h"

#include <limits>

#include "embstore/ssd_store.h"
#include "store_oracle.h"

namespace embstore {
namespace {

TEST(A memory store holds what a map holds) {
  for (int64_t width : {1, 7, 97, 1023}) {
    const auto store = MakeMemoryStore(width, 0);
    Oracle oracle;
    Churn(*store, oracle, 1, 40, 2000, 97);
    const int64_t ends[] = {std::numeric_limits<int64_t>::min(), -1, 0,
                            std::numeric_limits<int64_t>::max()};
    PutAll(*store, ends, 99, oracle);
    CheckHolds(*store, oracle);
    store->Clear();
    CheckHolds(*store, {});
  }
}

TEST(A full memory store refuses a batch as a whole) {
  const auto store = MakeMemoryStore(8, 100);
  Oracle oracle;
  std::vector<int64_t> keys(100);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  PutAll(*store, keys, 1, oracle);
  PutAll(*store, keys, 2, oracle);  // these are there already
  std::vector<std::byte> row(16);
  const int64_t one_more[] = {5, 100};
  const uint64_t scores[] = {3, 3};
  CHECK_THROWS(InvalidState, "100 of 100", store->Put(one_more, row.data(), scores));
  CheckHolds(*store, oracle);
}

TEST(A null store forgets) {
  const auto store = MakeNullStore(8);
  Oracle forgotten;
  PutAll(*store, std::vector<int64_t>{1, 2, 3}, 1, forgotten);
  CheckHolds(*store, {});
}

TEST(Two tiers hold what a map holds and the upper stays within its limit) {
  for (int64_t upper_rows : {1, 50, 300, 5000}) {
    const auto upper = MakeMemoryStore(24, 0), lower = MakeMemoryStore(24, 0);
    const auto tiers = MakeTieredStore(upper, lower, upper_rows);
    Oracle oracle;
    Churn(*tiers, oracle, 1, 60, 1000, 40);
    CheckHolds(*tiers, oracle);
    CHECK(upper->size() <= std::max<int64_t>(upper_rows, 40));
    tiers->Flush();
    CheckHolds(*lower, oracle);
    tiers->Clear();
    CheckHolds(*tiers, {});
  }
}

TEST(The rows that came first leave the upper tier first) {
  const auto upper = MakeMemoryStore(8, 0), lower = MakeMemoryStore(8, 0);
  const auto tiers = MakeTieredStore(upper, lower, 160);
  Oracle oracle;
  for (int64_t key = 0; key < 2000; key += 10) {
    std::vector<int64_t> keys;
    for (int64_t i = key; i < key + 10; ++i) keys.push_back(i);
    PutAll(*tiers, keys, static_cast<uint64_t>(key + 1), oracle);
    std::vector<uint8_t> above(keys.size());
    for (int64_t& older : keys) older -= 100;
    upper->Contains(keys, above.data());
    if (key >= 100) CHECK(above == std::vector<uint8_t>(keys.size(), 1));
    for (int64_t& older : keys) older -= 100;
    upper->Contains(keys, above.data());
    CHECK(above == std::vector<uint8_t>(keys.size(), 0));
  }
}

TEST(Three tiers end on disk and come back with a checkpoint) {
  const TemporaryDirectory directory;
  Oracle oracle, later;
  {
    const auto ssd = SsdStore::Open({.path = directory.path, .row_bytes = 40});
    const auto below = MakeTieredStore(MakeMemoryStore(40, 0), ssd, 200);
    const auto tiers = MakeTieredStore(MakeMemoryStore(40, 0), below, 100);
    Churn(*tiers, oracle, 1, 50, 2000, 60);
    tiers->SaveCheckpoint("one");
    later = oracle;
    Churn(*tiers, later, 100, 20, 2000, 60);
    CheckHolds(*tiers, later);
    tiers->LoadCheckpoint("one");
    CheckHolds(*tiers, oracle);
  }
  const auto ssd = SsdStore::Open({.path = directory.path, .row_bytes = 40});
  ssd->LoadCheckpoint("one");
  CheckHolds(*ssd, oracle);
}

TEST(Flushing tiers writes the files of the lowest one) {
  const TemporaryDirectory directory;
  const auto ssd = SsdStore::Open({.path = directory.path, .row_bytes = 40});
  const auto tiers = MakeTieredStore(MakeMemoryStore(40, 0), ssd, 200);
  Oracle oracle;
  const std::vector<int64_t> keys = {1, 2, 3};
  PutAll(*tiers, keys, 1, oracle);
  tiers->Flush();
  const SsdStoreStats stats = ssd->stats();
  CHECK_EQ(stats.bytes_put, 3 * 40);
  CHECK(stats.bytes_written >= 3 * 40);
  CheckHolds(*tiers, oracle);
}

TEST(A tier that fails below loses nothing above) {
  const auto upper = MakeMemoryStore(8, 0), lower = MakeMemoryStore(8, 1);
  const auto tiers = MakeTieredStore(upper, lower, 20);
  Oracle oracle;
  std::vector<int64_t> keys(20);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  PutAll(*tiers, keys, 1, oracle);
  Oracle refused;
  CHECK_THROWS(InvalidState, "full", PutAll(*tiers, std::vector<int64_t>{77}, 2, refused));
  CheckHolds(*tiers, oracle);
}

TEST(Wrong tiers are refused and a store serves one) {
  const auto store = MakeMemoryStore(8, 0), other = MakeMemoryStore(12, 0);
  CHECK_THROWS(InvalidArgument, "lower should keep rows of 8", MakeTieredStore(store, other, 1));
  CHECK_THROWS(InvalidArgument, "upper_rows", MakeTieredStore(store, MakeMemoryStore(8, 0), 0));
  {
    const auto tiers = MakeTieredStore(store, MakeMemoryStore(8, 0), 1);
    CHECK_THROWS(InvalidState, "attached", MakeTieredStore(MakeMemoryStore(8, 0), store, 1));
  }
  MakeTieredStore(MakeMemoryStore(8, 0), store, 1);  // it is detached again
  CHECK_THROWS(InvalidArgument, "row_bytes", MakeMemoryStore(0, 0));
  CHECK_THROWS(InvalidArgument, "capacity_rows", MakeMemoryStore(8, -1));
  CHECK_THROWS(InvalidState, "keeps no snapshots", store->SaveCheckpoint("s"));
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
