// A store beside a map that tells what it has to hold.
#pragma once

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "embstore/ssd_store.h"
#include "embstore/store.h"

namespace embstore {

// A directory of its own, removed at the end of the test.
struct TemporaryDirectory {
  TemporaryDirectory() {
    std::string name = std::filesystem::temp_directory_path() / "embstore-test-XXXXXX";
    if (!mkdtemp(name.data())) throw std::system_error(errno, std::generic_category(), name);
    path = name;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path); }
  std::string path;
};

// Passes all calls on to another store; a test overrides what it is about.
class PassesOn : public Store {
 public:
  explicit PassesOn(std::shared_ptr<Store> store)
      : Store(store->row_bytes()), store_(std::move(store)) {}
  std::string Describe() const override { return "a store of the test"; }
  int64_t size() const override { return store_->size(); }
  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override {
    store_->Get(keys, rows, scores, found);
  }
  void Contains(std::span<const int64_t> keys, uint8_t* found) const override {
    store_->Contains(keys, found);
  }
  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override {
    store_->Put(keys, rows, scores);
  }
  void Erase(std::span<const int64_t> keys) override { store_->Erase(keys); }
  void Clear() override { store_->Clear(); }
  std::unique_ptr<StoreScanner> Scan() const override { return store_->Scan(); }

 private:
  std::shared_ptr<Store> store_;
};

// Keys with the version that was put last, which is their score too.
using Oracle = std::map<int64_t, uint64_t>;

inline void FillRow(int64_t key, uint64_t version, std::span<std::byte> row) {
  for (size_t i = 0; i < row.size(); ++i) {
    row[i] = static_cast<std::byte>(static_cast<uint64_t>(key) * 31 + version * 7 + i);
  }
}

inline void PutAll(Store& store, std::span<const int64_t> keys, uint64_t version, Oracle& oracle) {
  const auto width = static_cast<size_t>(store.row_bytes());
  std::vector<std::byte> rows(keys.size() * width);
  const std::vector<uint64_t> scores(keys.size(), version);
  for (size_t i = 0; i < keys.size(); ++i) FillRow(keys[i], version, {&rows[i * width], width});
  store.Put(keys, rows.data(), scores.data());
  for (int64_t key : keys) oracle[key] = version;
}

inline void EraseAll(Store& store, std::span<const int64_t> keys, Oracle& oracle) {
  store.Erase(keys);
  for (int64_t key : keys) oracle.erase(key);
}

// Whether a row, its score and its key belong together.
inline void CheckRow(int64_t key, std::span<const std::byte> row, uint64_t score,
                     const Oracle& oracle) {
  const auto expected = oracle.find(key);
  CHECK(expected != oracle.end());
  if (expected == oracle.end()) return;
  CHECK_EQ(score, expected->second);
  std::vector<std::byte> wanted(row.size());
  FillRow(key, score, wanted);
  CHECK(std::memcmp(row.data(), wanted.data(), row.size()) == 0);
}

inline void CheckScan(const Store& store, const Oracle& oracle) {
  const auto width = static_cast<size_t>(store.row_bytes());
  const auto scanner = store.Scan();
  Oracle seen;
  StoredRows block;
  for (scanner->Next(97, block); !block.keys.empty(); scanner->Next(97, block)) {
    for (size_t i = 0; i < block.keys.size(); ++i) {
      CHECK(seen.emplace(block.keys[i], block.scores[i]).second);
      CheckRow(block.keys[i], {&block.rows[i * width], width}, block.scores[i], oracle);
    }
  }
  CHECK_EQ(seen.size(), oracle.size());
}

inline void CheckHolds(const Store& store, const Oracle& oracle) {
  const auto width = static_cast<size_t>(store.row_bytes());
  std::vector<int64_t> keys{-999'983, 999'983};  // never put
  for (const auto& [key, version] : oracle) keys.push_back(key);
  std::vector<std::byte> rows(keys.size() * width);
  std::vector<uint64_t> scores(keys.size());
  std::vector<uint8_t> found(keys.size()), contained(keys.size());
  store.Get(keys, rows.data(), scores.data(), found.data());
  store.Contains(keys, contained.data());
  CHECK_EQ(store.size(), static_cast<int64_t>(oracle.size()));
  for (size_t i = 0; i < keys.size(); ++i) {
    CHECK_EQ(found[i], contained[i]);
    CHECK_EQ(found[i] != 0, i >= 2);
    if (found[i]) CheckRow(keys[i], {&rows[i * width], width}, scores[i], oracle);
  }
  CheckScan(store, oracle);
  if (const auto* ssd = dynamic_cast<const SsdStore*>(&store)) ssd->CheckInvariants();
}

// Batches of random keys, with duplicates, put and erased.
inline void Churn(Store& store, Oracle& oracle, uint64_t first_version, int versions,
                  int64_t universe, size_t batch) {
  std::mt19937_64 random(first_version);
  for (int i = 0; i < versions; ++i) {
    std::vector<int64_t> keys(batch);
    for (int64_t& key : keys) {
      key = static_cast<int64_t>(random() % static_cast<uint64_t>(universe)) - universe / 2;
    }
    PutAll(store, keys, first_version + static_cast<uint64_t>(i), oracle);
    keys.resize(batch / 8);
    EraseAll(store, keys, oracle);
  }
}

}  // namespace embstore
