#include "embstore/store.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>

#include "embstore/key_index.h"
#include "embstore/memory.h"
#include "embstore/parallel.h"
#include "embstore/rw_lock.h"

namespace embstore {

Store::Store(int64_t row_bytes) : row_bytes_(row_bytes) {
  if (row_bytes < 1) {
    throw InvalidArgument("row_bytes should be at least 1 but is: " + std::to_string(row_bytes));
  }
}

void Store::Attach() {
  if (attached_.exchange(true)) {
    throw InvalidState(Describe() + " is attached to another table or tier already");
  }
}

void Store::Snapshot(const std::string& name) {
  throw InvalidState(Describe() + " keeps no snapshots, so '" + name + "' cannot be saved");
}

void Store::LoadSnapshot(const std::string& name) {
  throw InvalidState(Describe() + " keeps no snapshots, so '" + name + "' cannot be loaded");
}

namespace {

constexpr int64_t kKeysPerTask = 2048;

class NullStore final : public Store {
 public:
  explicit NullStore(int64_t row_bytes) : Store(row_bytes) {}
  std::string Describe() const override { return "null store"; }
  int64_t size() const override { return 0; }
  void Get(std::span<const int64_t> keys, std::byte*, uint64_t*, uint8_t* found) const override {
    std::fill_n(found, keys.size(), uint8_t{0});
  }
  void Contains(std::span<const int64_t> keys, uint8_t* found) const override {
    std::fill_n(found, keys.size(), uint8_t{0});
  }
  void Put(std::span<const int64_t>, const std::byte*, const uint64_t*) override {}
  void Erase(std::span<const int64_t>) override {}
  void Clear() override {}
  std::unique_ptr<StoreScanner> Scan() const override {
    struct Empty final : StoreScanner {
      void Next(int64_t, StoredRows& block) override { block = {}; }
    };
    return std::make_unique<Empty>();
  }
};

class MemoryStore final : public Store {
 public:
  MemoryStore(int64_t row_bytes, int64_t capacity_rows)
      : Store(row_bytes), capacity_rows_(capacity_rows), index_(KeyIndexOptions{}) {
    if (capacity_rows < 0) {
      throw InvalidArgument("capacity_rows should be at least 0 but is: " +
                            std::to_string(capacity_rows));
    }
    rows_ = HugeBuffer(static_cast<size_t>(index_.capacity() * row_bytes));
  }

  std::string Describe() const override { return "memory store"; }

  int64_t size() const override {
    std::shared_lock guard(lock_);
    return index_.size();
  }

  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override {
    std::shared_lock guard(lock_);
    ForTasks(keys, [&](int64_t i) {
      const Slot slot = index_.Find(keys[static_cast<size_t>(i)]);
      found[i] = slot != kNoSlot;
      if (slot == kNoSlot) return;
      std::memcpy(rows + i * row_bytes(), row(slot), static_cast<size_t>(row_bytes()));
      if (scores) scores[i] = index_.entry(slot).score;
    });
  }

  void Contains(std::span<const int64_t> keys, uint8_t* found) const override {
    std::shared_lock guard(lock_);
    ForTasks(keys,
             [&](int64_t i) { found[i] = index_.Find(keys[static_cast<size_t>(i)]) != kNoSlot; });
  }

  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override {
    std::unique_lock guard(lock_);
    RequireRoom(keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      // 0 means empty in the index. No table gives it, but a user may.
      const uint64_t score = std::max<uint64_t>(scores[i], 1);
      KeyIndex::Insertion place = index_.FindOrInsert(keys[i], score);
      for (; place.slot == kNoSlot; place = index_.FindOrInsert(keys[i], score)) Grow();
      if (place.inserted) {
        index_.AddSize(1);
      } else {
        index_.set_score(place.slot, score);
      }
      std::memcpy(row(place.slot), rows + static_cast<int64_t>(i) * row_bytes(),
                  static_cast<size_t>(row_bytes()));
    }
  }

  void Erase(std::span<const int64_t> keys) override {
    std::unique_lock guard(lock_);
    for (int64_t key : keys) {
      const Slot slot = index_.Find(key);
      if (slot == kNoSlot) continue;
      index_.Erase(slot);
      index_.AddSize(-1);
    }
  }

  void Clear() override {
    std::unique_lock guard(lock_);
    index_.Clear();
    rows_.Clear();
    ++layout_;
  }

  std::unique_ptr<StoreScanner> Scan() const override {
    struct Scanner final : StoreScanner {
      explicit Scanner(const MemoryStore& from) : store(from) {
        std::shared_lock guard(store.lock_);
        layout = store.layout_;
      }
      void Next(int64_t max_rows, StoredRows& block) override {
        store.Copy(next, layout, max_rows, block);
      }
      const MemoryStore& store;
      uint64_t layout;
      int64_t next = 0;
    };
    return std::make_unique<Scanner>(*this);
  }

 private:
  std::byte* row(Slot slot) const { return rows_.data() + slot * row_bytes(); }

  template <typename Visit>
  static void ForTasks(std::span<const int64_t> keys, const Visit& visit) {
    const auto n = static_cast<int64_t>(keys.size());
    ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kKeysPerTask, n);
      for (int64_t i = task * kKeysPerTask; i < end; ++i) visit(i);
    });
  }

  void RequireRoom(std::span<const int64_t> keys) const {
    if (capacity_rows_ == 0 ||
        index_.size() + static_cast<int64_t>(keys.size()) <= capacity_rows_) {
      return;
    }
    std::vector<int64_t> fresh;
    for (int64_t key : keys) {
      if (index_.Find(key) == kNoSlot) fresh.push_back(key);
    }
    std::sort(fresh.begin(), fresh.end());
    const auto count = std::unique(fresh.begin(), fresh.end()) - fresh.begin();
    if (index_.size() + count > capacity_rows_) {
      throw InvalidState(Describe() + " is full: it holds " + std::to_string(index_.size()) +
                         " of " + std::to_string(capacity_rows_) + " rows and was given " +
                         std::to_string(count) + " new ones; a larger capacity is needed");
    }
  }

  void Grow() {
    RequireAvailableMemory(
        index_.bytes_to_grow() + rows_.size(),
        "growing a memory store to " + std::to_string(2 * index_.capacity()) + " rows");
    rows_.Grow(static_cast<size_t>(2 * index_.capacity() * row_bytes()));
    index_.Grow([this](Slot from, Slot to) {
      std::memcpy(row(to), row(from), static_cast<size_t>(row_bytes()));
    });
    ++layout_;
  }

  void Copy(int64_t& next, uint64_t layout, int64_t max_rows, StoredRows& block) const {
    std::shared_lock guard(lock_);
    if (layout != layout_) throw InvalidState(Describe() + " was grown or cleared during a scan");
    block = {};
    for (; next < index_.capacity() && static_cast<int64_t>(block.keys.size()) < max_rows; ++next) {
      const auto slot = static_cast<Slot>(next);
      if (!index_.IsUsed(slot)) continue;
      block.keys.push_back(index_.entry(slot).key);
      block.scores.push_back(index_.entry(slot).score);
      block.rows.insert(block.rows.end(), row(slot), row(slot) + row_bytes());
    }
  }

  const int64_t capacity_rows_;
  mutable RwLock lock_;
  KeyIndex index_;
  mutable HugeBuffer rows_;
  uint64_t layout_ = 0;  // changes when slots do
};

}  // namespace

std::shared_ptr<Store> MakeMemoryStore(int64_t row_bytes, int64_t capacity_rows) {
  return std::make_shared<MemoryStore>(row_bytes, capacity_rows);
}

std::shared_ptr<Store> MakeNullStore(int64_t row_bytes) {
  return std::make_shared<NullStore>(row_bytes);
}

}  // namespace embstore
