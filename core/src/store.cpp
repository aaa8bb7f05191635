#include "embstore/store.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "embstore/distinct_keys.h"
#include "embstore/fork_guard.h"
#include "embstore/kernels.h"
#include "embstore/key_index.h"
#include "embstore/parallel.h"
#include "embstore/row_heap.h"
#include "embstore/score_clock.h"
#include "key_blocks.h"

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

void Store::RequireCapacity(int64_t capacity_rows, int64_t size, std::vector<int64_t> fresh) const {
  SortDistinct(fresh);
  if (size + std::ssize(fresh) <= capacity_rows) return;
  throw InvalidState(Describe() + " is full: it holds " + std::to_string(size) + " of " +
                     std::to_string(capacity_rows) + " rows and was given " +
                     std::to_string(fresh.size()) + " new ones; a larger capacity is needed");
}

void Store::PutScattered(std::span<const int64_t> keys, const std::byte* const* rows,
                         const uint64_t* scores) {
  const auto bytes = static_cast<size_t>(row_bytes_);
  const RecycledBuffer together(keys.size() * bytes);
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(together.as<std::byte>() + i * bytes, rows[i], bytes);
  }
  Put(keys, together.as<std::byte>(), scores);
}

std::unique_ptr<KeyScanner> Store::ScanKeys() const {
  struct Scanner final : KeyScanner {
    explicit Scanner(const Store& store) : rows(store.Scan()) {}
    void Next(int64_t max_keys, std::vector<int64_t>& keys) override {
      rows->Next(max_keys, block);
      keys.swap(block.keys);
    }
    std::unique_ptr<StoreScanner> rows;
    StoredRows block;
  };
  return std::make_unique<Scanner>(*this);
}

void Store::SaveCheckpoint(const std::string& name) {
  throw InvalidState(Describe() + " keeps no snapshots, so '" + name + "' cannot be saved");
}

void Store::LoadCheckpoint(const std::string& name) {
  throw InvalidState(Describe() + " keeps no snapshots, so '" + name + "' cannot be loaded");
}

namespace {

constexpr int64_t kRowsAhead = 6;

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
    rows_ = RowHeap(row_bytes, 1);
  }

  std::string Describe() const override { return "memory store"; }

  int64_t size() const override {
    std::shared_lock guard(lock_);
    return index_.size();
  }

  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override {
    std::shared_lock guard(lock_);
    ForKeyBlocks(index_.view(), keys,
                 [&](int64_t first, const Slot* slots, const Row* numbers, int64_t n) {
                   for (int64_t i = 0; i < n; ++i) {
                     if (i + kRowsAhead < n) PrefetchRow(numbers[i + kRowsAhead]);
                     found[first + i] = slots[i] != kNoSlot;
                     if (slots[i] == kNoSlot) continue;
                     std::memcpy(rows + (first + i) * row_bytes(), rows_.at(numbers[i]),
                                 static_cast<size_t>(row_bytes()));
                     if (scores) scores[first + i] = index_.score(slots[i]);
                   }
                 });
  }

  void Contains(std::span<const int64_t> keys, uint8_t* found) const override {
    std::shared_lock guard(lock_);
    ForKeyBlocks(index_.view(), keys, [&](int64_t first, const Slot* slots, const Row*, int64_t n) {
      for (int64_t i = 0; i < n; ++i) found[first + i] = slots[i] != kNoSlot;
    });
  }

  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override {
    std::unique_lock guard(lock_);
    RequireRoom(keys);
    numbers_.assign(keys.size(), kMissingRow);
    try {
      Place(keys, scores);
    } catch (...) {
      CopyRows(rows, 0, 1);  // the keys placed so far must not keep what their rows held before
      throw;
    }
    const int threads = NumThreads();
    ParallelFor(threads, [&](int64_t task) { CopyRows(rows, task, threads); });
  }

  void Erase(std::span<const int64_t> keys) override {
    std::unique_lock guard(lock_);
    for (int64_t key : keys) {
      const Slot slot = index_.Find(key);
      if (slot == kNoSlot) continue;
      rows_.Free(index_.row(slot));
      index_.Erase(slot);
      index_.AddSize(-1);
    }
  }

  void Clear() override {
    std::unique_lock guard(lock_);
    index_.Clear();
    rows_.Clear();
  }

  // In the order of row numbers, which do not change when the index grows, starting after the
  // newest row and wrapping around: if rows leave in the order of a walk, the oldest come first.
  // Numbers that are taken later are skipped, or a walk beside many puts would never end.
  std::unique_ptr<StoreScanner> Scan() const override {
    struct Scanner final : StoreScanner {
      explicit Scanner(const MemoryStore& from) : store(from), walk(from.Begin()) {}
      void Next(int64_t max_rows, StoredRows& block) override {
        block = {};
        store.Walk(walk, max_rows, [&](int64_t key, Slot slot, Row row) {
          block.keys.push_back(key);
          block.scores.push_back(store.index_.score(slot));
          const std::byte* data = store.rows_.at(row);
          block.rows.insert(block.rows.end(), data, data + store.row_bytes());
        });
      }
      const MemoryStore& store;
      Range walk;
    };
    return std::make_unique<Scanner>(*this);
  }

  std::unique_ptr<KeyScanner> ScanKeys() const override {
    struct Scanner final : KeyScanner {
      explicit Scanner(const MemoryStore& from) : store(from), walk(from.Begin()) {}
      void Next(int64_t max_keys, std::vector<int64_t>& keys) override {
        keys.clear();
        store.Walk(walk, max_keys, [&](int64_t key, Slot, Row) { keys.push_back(key); });
      }
      const MemoryStore& store;
      Range walk;
    };
    return std::make_unique<Scanner>(*this);
  }

 private:
  struct Range {
    int64_t next, left, end;
  };

  void PrefetchRow(Row row) const {
    if (row == kMissingRow) return;
    for (int64_t byte = 0; byte < row_bytes(); byte += 64) __builtin_prefetch(rows_.at(row) + byte);
  }

  // Gives every key its score and a row, in numbers_.
  void Place(std::span<const int64_t> keys, const uint64_t* scores) {
    const auto n = static_cast<int64_t>(keys.size());
    rows_.Require(std::min(index_.size() + n, index_.max_capacity()),
                  "growing a memory store to " + std::to_string(index_.size() + n) + " rows");
    keys_.resize(static_cast<size_t>(rows_.used() + n));
    places_.resize(keys.size());
    ActiveKernels().find(index_.view(), keys.data(), n, places_.data(), numbers_.data(),
                         ScoreUpdate::kKeep, 0, true);
    bool moved = false;  // growing moves slots
    for (size_t i = 0; i < keys.size(); ++i) {
      // 0 means free in the index. No table gives it, but a user may.
      const uint64_t score = std::max<uint64_t>(scores[i], 1);
      Slot slot = places_[i];
      if (slot == kNoSlot || moved) slot = index_.Find(keys[i]);
      if (slot == kNoSlot) {
        moved |= MakeRoom(index_.size() + 1);
        const Row row = numbers_[i] = rows_.Next(0);
        index_.InsertNew({keys[i], score, row});
        rows_.Take(1);
        keys_[static_cast<size_t>(row)] = keys[i];
        newest_ = row;
        continue;
      }
      index_.set_score(slot, score);
      numbers_[i] = index_.row(slot);
    }
  }

  // Copies the rows whose number belongs to this part. Rows of one key are in one part and in
  // order, so the last one wins.
  void CopyRows(const std::byte* rows, int64_t part, int64_t parts) {
    const auto n = static_cast<int64_t>(numbers_.size());
    for (int64_t i = 0; i < n; ++i) {
      const Row row = numbers_[static_cast<size_t>(i)];
      if (i + kRowsAhead < n) {
        const Row next = numbers_[static_cast<size_t>(i + kRowsAhead)];
        if (next % parts == part) PrefetchRow(next);
      }
      if (row == kMissingRow || row % parts != part) continue;
      std::memcpy(rows_.at(row), rows + i * row_bytes(), static_cast<size_t>(row_bytes()));
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
    RequireCapacity(capacity_rows_, index_.size(), std::move(fresh));
  }

  // Whether slots may have moved.
  bool MakeRoom(int64_t rows) {
    if (rows <= room_) return false;
    room_ = rows + std::max<int64_t>(rows / 64, 1024);  // some extra, to reserve less often
    rows_.Grow(room_);
    index_.Reserve(room_);
    return true;
  }

  Range Begin() const {
    std::shared_lock guard(lock_);
    const int64_t end = rows_.used();
    return {newest_ + 1 < end ? newest_ + 1 : 0, end, end};
  }

  // visit(key, slot, row) for the next rows in use, at most `most`.
  template <typename Visit>
  void Walk(Range& walk, int64_t most, const Visit& visit) const {
    std::shared_lock guard(lock_);
    auto& [next, left, end] = walk;
    if (rows_.used() < end) left = 0;  // cleared
    for (int64_t given = 0; left > 0 && given < most; --left) {
      const auto row = static_cast<Row>(std::exchange(next, next + 1 == end ? 0 : next + 1));
      const int64_t key = keys_[static_cast<size_t>(row)];
      const Slot slot = index_.Find(key);
      if (slot == kNoSlot || index_.row(slot) != row) continue;  // a free row
      visit(key, slot, row);
      ++given;
    }
  }

  const int64_t capacity_rows_;
  mutable StoreLock lock_;
  KeyIndex index_;
  RowHeap rows_;
  std::vector<int64_t> keys_;  // of each row in use
  Row newest_ = -1;
  int64_t room_ = 0;  // keys that index and rows have room for
  // Of the running Put: the slots it found, and the rows.
  std::vector<Slot> places_;
  std::vector<Row> numbers_;
};

}  // namespace

std::shared_ptr<Store> MakeMemoryStore(int64_t row_bytes, int64_t capacity_rows) {
  return std::make_shared<MemoryStore>(row_bytes, capacity_rows);
}

std::shared_ptr<Store> MakeNullStore(int64_t row_bytes) {
  return std::make_shared<NullStore>(row_bytes);
}

}  // namespace embstore
