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

void Store::PutScattered(std::span<const int64_t> keys, const std::byte* const* rows,
                         const uint64_t* scores) {
  const auto bytes = static_cast<size_t>(row_bytes_);
  const PooledBuffer together(keys.size() * bytes);
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(together.as<std::byte>() + i * bytes, rows[i], bytes);
  }
  Put(keys, together.as<std::byte>(), scores);
}

void Store::Snapshot(const std::string& name) {
  throw InvalidState(Describe() + " keeps no snapshots, so '" + name + "' cannot be saved");
}

void Store::LoadSnapshot(const std::string& name) {
  throw InvalidState(Describe() + " keeps no snapshots, so '" + name + "' cannot be loaded");
}

namespace {

constexpr int64_t kKeysPerTask = 2048, kRowsAhead = 6;

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
    ForBlocks(keys, [&](int64_t first, std::span<const Slot> slots) {
      const auto n = static_cast<int64_t>(slots.size());
      for (int64_t i = 0; i < n; ++i) {
        if (i + kRowsAhead < n) PrefetchRow(slots[static_cast<size_t>(i + kRowsAhead)]);
        const Slot slot = slots[static_cast<size_t>(i)];
        found[first + i] = slot != kNoSlot;
        if (slot == kNoSlot) continue;
        std::memcpy(rows + (first + i) * row_bytes(), row(slot), static_cast<size_t>(row_bytes()));
        if (scores) scores[first + i] = index_.entry(slot).score;
      }
    });
  }

  void Contains(std::span<const int64_t> keys, uint8_t* found) const override {
    std::shared_lock guard(lock_);
    ForBlocks(keys, [&](int64_t first, std::span<const Slot> slots) {
      for (const Slot slot : slots) found[first++] = slot != kNoSlot;
    });
  }

  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override {
    std::unique_lock guard(lock_);
    RequireRoom(keys);
    places_.resize(keys.size());
    try {
      Place(keys, scores);
    } catch (...) {
      // Keys that were placed must not be left with the bytes that their slots held before.
      for (size_t i = 0; i < keys.size(); ++i) places_[i] = index_.Find(keys[i]);
      CopyToPlaces(rows, 0, 1);
      throw;
    }
    const int threads = NumThreads();
    ParallelFor(threads, [&](int64_t task) { CopyToPlaces(rows, task, threads); });
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

  void PrefetchRow(Slot slot) const {
    if (slot == kNoSlot) return;
    for (int64_t byte = 0; byte < row_bytes(); byte += 64) __builtin_prefetch(row(slot) + byte);
  }

  // visit(number of the first key, slots of this and the next keys) for all keys, on all threads.
  template <typename Visit>
  void ForBlocks(std::span<const int64_t> keys, const Visit& visit) const {
    const auto n = static_cast<int64_t>(keys.size());
    ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
      Slot slots[kKeysPerTask];
      const int64_t first = task * kKeysPerTask, count = std::min(kKeysPerTask, n - first);
      ActiveKernels().find(index_.view(), keys.data() + first, count, slots, ScoreUpdate::kKeep, 0);
      visit(first, std::span<const Slot>(slots, static_cast<size_t>(count)));
    });
  }

  // Gives every key a slot, in places_, and its score.
  void Place(std::span<const int64_t> keys, const uint64_t* scores) {
    uint64_t before = 0;
    do {  // growing moves slots
      before = layout_;
      ActiveKernels().find(index_.view(), keys.data(), static_cast<int64_t>(keys.size()),
                           places_.data(), ScoreUpdate::kKeep, 0);
      for (size_t i = 0; i < keys.size(); ++i) {
        // 0 means empty in the index. No table gives it, but a user may.
        const uint64_t score = std::max<uint64_t>(scores[i], 1);
        if (places_[i] == kNoSlot || layout_ != before) places_[i] = Insert(keys[i], score);
        index_.set_score(places_[i], score);
      }
    } while (layout_ != before);
  }

  Slot Insert(int64_t key, uint64_t score) {
    KeyIndex::Insertion place = index_.FindOrInsert(key, score);
    for (; place.slot == kNoSlot; place = index_.FindOrInsert(key, score)) Grow();
    if (place.inserted) index_.AddSize(1);
    return place.slot;
  }

  // Copies the rows of one part of the slots, so that the last of equal keys is the last to be
  // written.
  void CopyToPlaces(const std::byte* rows, int64_t part, int64_t parts) {
    const auto n = static_cast<int64_t>(places_.size());
    for (int64_t i = 0; i < n; ++i) {
      const Slot slot = places_[static_cast<size_t>(i)];
      if (i + kRowsAhead < n) {
        const Slot next = places_[static_cast<size_t>(i + kRowsAhead)];
        if (next % parts == part) PrefetchRow(next);
      }
      if (slot == kNoSlot || slot % parts != part) continue;
      std::memcpy(row(slot), rows + i * row_bytes(), static_cast<size_t>(row_bytes()));
    }
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
  uint64_t layout_ = 0;       // changes when slots do
  std::vector<Slot> places_;  // of the running Put
};

}  // namespace

std::shared_ptr<Store> MakeMemoryStore(int64_t row_bytes, int64_t capacity_rows) {
  return std::make_shared<MemoryStore>(row_bytes, capacity_rows);
}

std::shared_ptr<Store> MakeNullStore(int64_t row_bytes) {
  return std::make_shared<NullStore>(row_bytes);
}

}  // namespace embstore
