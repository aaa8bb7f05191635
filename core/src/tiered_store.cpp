// Two stores as one: rows go to the upper, and move down to the lower when the upper has too many.
//
// Invariants
//  1. Every row of the upper was put there and may be newer than the lower's: reads do not move
//  rows
//     up.
//  2. A row that is in both is current in the upper.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "embstore/fork_guard.h"
#include "embstore/store.h"
#include "key_list.h"

namespace embstore {
namespace {

constexpr int64_t kRowsAtOnce = 16384;

class TieredStore final : public Store {
 public:
  TieredStore(std::shared_ptr<Store> upper, std::shared_ptr<Store> lower, int64_t upper_rows)
      : Store(upper->row_bytes()),
        upper_(std::move(upper)),
        lower_(std::move(lower)),
        upper_rows_(upper_rows) {
    if (lower_->row_bytes() != row_bytes()) {
      throw InvalidArgument(
          "lower should keep rows of " + std::to_string(row_bytes()) +
          " bytes as the upper tier does but keeps: " + std::to_string(lower_->row_bytes()));
    }
    if (upper_rows < 1) {
      throw InvalidArgument("upper_rows should be at least 1 but is: " +
                            std::to_string(upper_rows));
    }
    upper_->Attach();
    try {
      lower_->Attach();
    } catch (...) {
      upper_->Detach();
      throw;
    }
  }

  ~TieredStore() override {
    upper_->Detach();
    lower_->Detach();
  }

  std::string Describe() const override {
    return upper_->Describe() + " over " + lower_->Describe();
  }

  int64_t size() const override {
    std::shared_lock guard(lock_);
    int64_t both = 0;
    ForBlocks(*upper_, [&](const StoredRows& block) {
      std::vector<uint8_t> found(block.keys.size());
      lower_->Contains(block.keys, found.data());
      both += std::count(found.begin(), found.end(), uint8_t{1});
    });
    return upper_->size() + lower_->size() - both;
  }

  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override {
    std::shared_lock guard(lock_);
    upper_->Get(keys, rows, scores, found);
    std::vector<int64_t> wanted;
    std::vector<size_t> at;
    Absent(keys, found, wanted, at);
    if (wanted.empty()) return;
    const auto bytes = static_cast<size_t>(row_bytes());
    std::vector<std::byte> below(wanted.size() * bytes);
    std::vector<uint64_t> scores_below(scores ? wanted.size() : 0);
    std::vector<uint8_t> found_below(wanted.size());
    lower_->Get(wanted, below.data(), scores ? scores_below.data() : nullptr, found_below.data());
    for (size_t j = 0; j < wanted.size(); ++j) {
      if (!found_below[j]) continue;
      found[at[j]] = 1;
      std::copy_n(below.data() + j * bytes, bytes, rows + at[j] * bytes);
      if (scores) scores[at[j]] = scores_below[j];
    }
  }

  void Contains(std::span<const int64_t> keys, uint8_t* found) const override {
    std::shared_lock guard(lock_);
    upper_->Contains(keys, found);
    std::vector<int64_t> wanted;
    std::vector<size_t> at;
    Absent(keys, found, wanted, at);
    std::vector<uint8_t> found_below(wanted.size());
    if (!wanted.empty()) lower_->Contains(wanted, found_below.data());
    for (size_t j = 0; j < wanted.size(); ++j) found[at[j]] = found_below[j];
  }

  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override {
    std::unique_lock guard(lock_);
    MakeRoom(static_cast<int64_t>(keys.size()));  // first: if the lower fails, nothing has changed
    upper_->Put(keys, rows, scores);
  }

  void Erase(std::span<const int64_t> keys) override {
    std::unique_lock guard(lock_);
    lower_->Erase(keys);  // first: without the upper row, the old one below would reappear
    upper_->Erase(keys);
  }

  void Clear() override {
    std::unique_lock guard(lock_);
    lower_->Clear();
    upper_->Clear();
  }

  void Flush() override {
    std::unique_lock guard(lock_);
    CopyDown();
    lower_->Flush();
  }

  void SaveCheckpoint(const std::string& name) override {
    std::unique_lock guard(lock_);
    CopyDown();
    lower_->SaveCheckpoint(name);
  }

  void LoadCheckpoint(const std::string& name) override {
    std::unique_lock guard(lock_);
    lower_->LoadCheckpoint(name);
    upper_->Clear();
  }

  // Rows move down, never up. So the walk over the lower tier starts once the upper is done: a key
  // that moved down before the walk reached it is found below.
  std::unique_ptr<KeyScanner> ScanKeys() const override {
    struct Scanner final : KeyScanner {
      explicit Scanner(const TieredStore& from) : tiers(from), upper(from.upper_->ScanKeys()) {}
      void Next(int64_t max_keys, std::vector<int64_t>& keys) override {
        if (upper) {
          upper->Next(max_keys, keys);
          if (!keys.empty()) return;
          upper.reset();
        }
        if (!lower) lower = tiers.lower_->ScanKeys();
        lower->Next(max_keys, keys);
      }
      const TieredStore& tiers;
      std::unique_ptr<KeyScanner> upper, lower;
    };
    return std::make_unique<Scanner>(*this);
  }

  // ScanKeys gives keys that are in both tiers twice, so the walk remembers what it has given.
  std::unique_ptr<StoreScanner> Scan() const override {
    struct Scanner final : StoreScanner {
      explicit Scanner(const TieredStore& from) : tiers(from), keys(from.ScanKeys()) {}
      void Next(int64_t max_rows, StoredRows& block) override {
        do {
          block = {};
          keys->Next(max_rows, coming);
          for (const int64_t key : coming) {
            if (given.Find(key) >= 0) continue;
            given.Add(key, /*marked=*/false);
            block.keys.push_back(key);
          }
          tiers.GetFound(block);
        } while (block.keys.empty() && !coming.empty());
      }
      const TieredStore& tiers;
      std::unique_ptr<KeyScanner> keys;
      std::vector<int64_t> coming;
      KeyList given;
    };
    return std::make_unique<Scanner>(*this);
  }

 private:
  static void Absent(std::span<const int64_t> keys, const uint8_t* found,
                     std::vector<int64_t>& wanted, std::vector<size_t>& at) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (found[i]) continue;
      wanted.push_back(keys[i]);
      at.push_back(i);
    }
  }

  template <typename Visit>
  static void ForBlocks(const Store& store, const Visit& visit) {
    const auto scanner = store.Scan();
    StoredRows block;
    for (scanner->Next(kRowsAtOnce, block); !block.keys.empty();
         scanner->Next(kRowsAtOnce, block)) {
      visit(block);
    }
  }

  // Fills in rows and scores of the block's keys, and drops keys that are gone.
  void GetFound(StoredRows& block) const {
    const auto bytes = static_cast<size_t>(row_bytes());
    std::vector<uint8_t> found(block.keys.size());
    block.rows.resize(found.size() * bytes);
    block.scores.resize(found.size());
    Get(block.keys, block.rows.data(), block.scores.data(), found.data());
    size_t kept = 0;
    for (size_t i = 0; i < found.size(); ++i) {
      if (!found[i]) continue;
      block.keys[kept] = block.keys[i];
      block.scores[kept] = block.scores[i];
      if (kept != i) std::memcpy(&block.rows[kept * bytes], &block.rows[i * bytes], bytes);
      ++kept;
    }
    block.keys.resize(kept);
    block.scores.resize(kept);
    block.rows.resize(kept * bytes);
  }

  void CopyDown() {
    ForBlocks(*upper_, [&](const StoredRows& block) {
      lower_->Put(block.keys, block.rows.data(), block.scores.data());
    });
  }

  // Moves rows down in the order of the upper tier's walk, which is oldest first.
  void MakeRoom(int64_t coming) {
    int64_t excess = upper_->size() + coming - upper_rows_;
    if (excess <= 0) return;
    excess += upper_rows_ / 16;  // so that the next Put need not move rows again
    std::vector<int64_t> moved;
    const auto scanner = upper_->Scan();
    StoredRows block;
    while (std::ssize(moved) < excess) {
      scanner->Next(std::min(kRowsAtOnce, excess - std::ssize(moved)), block);
      if (block.keys.empty()) break;
      lower_->Put(block.keys, block.rows.data(), block.scores.data());
      moved.insert(moved.end(), block.keys.begin(), block.keys.end());
    }
    std::reverse(moved.begin(), moved.end());  // so that their places are reused in the same order
    upper_->Erase(moved);
  }

  std::shared_ptr<Store> upper_, lower_;
  const int64_t upper_rows_;
  mutable StoreLock lock_;
};

}  // namespace

std::shared_ptr<Store> MakeTieredStore(std::shared_ptr<Store> upper, std::shared_ptr<Store> lower,
                                       int64_t upper_rows) {
  return std::make_shared<TieredStore>(std::move(upper), std::move(lower), upper_rows);
}

}  // namespace embstore
