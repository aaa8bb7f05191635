// Snapshots of a table over a store: the rows that are only below.
#include <algorithm>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <string>
#include <vector>

#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "key_list.h"
#include "saved_rows.h"

namespace embstore {

void Snapshot::ThrowLost(int64_t key) const {
  throw InvalidState(table_->below_.store().Describe() + " has lost key " + std::to_string(key) +
                     " while a snapshot was read");
}

void Snapshot::SaveBelow(int64_t key, const FetchedRow& row) {
  const SavedRows::Original original{key, row.score, 0, row.data};
  saved_->Add({&original, 1}, table_->stored_row_bytes());
}

void Snapshot::PreserveBelow(const int64_t* keys, std::span<const uint32_t> absent,
                             const FetchedRows& below) {
  for (Snapshot* at = this; at; at = at->older_) {
    const bool changes = at->of_ == Of::kChanges;
    if (at->failed_.load(std::memory_order_relaxed)) continue;
    if (!changes && (at->all_preserved_ || !table_->below_.exists())) continue;
    try {
      for (const uint32_t i : absent) {
        const int64_t place = at->below_->Find(keys[i]);
        if (place >= 0 && at->below_->marked(place)) continue;
        if (changes) {
          if (place >= 0) at->PreserveChangeBelow(keys[i], place, below);
          continue;
        }
        const FetchedRow row = below.Find(keys[i]);
        if (row.data) {
          at->SaveBelow(keys[i], row);
        } else if (place >= 0) {
          ThrowLost(keys[i]);
        }
        if (place >= 0) {
          at->below_->Mark(place);
        } else {
          at->below_->Add(keys[i], /*marked=*/true);
          at->below_rows_ += row.data != nullptr;
        }
      }
    } catch (...) {
      at->Fail();
    }
  }
}

void Snapshot::PreserveBelow(std::span<const int64_t> keys, const FetchedRows& below) {
  std::vector<uint32_t> all(keys.size());
  std::iota(all.begin(), all.end(), 0u);
  PreserveBelow(keys.data(), all, below);
}

// A key that had left the table, and was not back at that moment, is about to come back.
void Snapshot::PreserveChangeBelow(int64_t key, int64_t place, const FetchedRows& below) {
  const FetchedRow row = all_preserved_ ? FetchedRow{} : below.Find(key);
  if (row.data) {
    SaveBelow(key, row);
    below_rows_ += place >= listed_keys_;
  } else if (place < listed_keys_) {
    ThrowLost(key);
  } else {
    gone_.push_back(key);
  }
  below_->Mark(place);
}

void Snapshot::Leave(int64_t key) {
  for (Snapshot* at = this; at; at = at->older_) {
    const bool changes = at->of_ == Of::kChanges;
    if (!changes && !table_->below_.exists()) continue;
    try {
      const int64_t place = at->below_->Find(key);
      if (place >= 0) {
        at->below_->Mark(place);
      } else if (!changes) {
        at->below_->Add(key, /*marked=*/true);
      }
    } catch (...) {
      at->Fail();
    }
  }
}

void Snapshot::PreserveStore() {
  try {
    const auto scanner = table_->below_.store().ScanKeys();
    std::vector<int64_t> keys;
    std::vector<uint32_t> absent;
    std::vector<uint8_t> resident;
    for (scanner->Next(kKeysPerHold, keys); !keys.empty(); scanner->Next(kKeysPerHold, keys)) {
      resident.resize(keys.size());
      table_->LockedResident(keys, resident.data());
      absent.clear();
      for (size_t i = 0; i < keys.size(); ++i) {
        if (!resident[i]) absent.push_back(static_cast<uint32_t>(i));
      }
      PreserveBelow(keys.data(), absent,
                    table_->below_.Fetch(keys.data(), absent, /*with_scores=*/true));
    }
  } catch (...) {
    FailAll();
  }
  for (Snapshot* at = this; at; at = at->older_) at->all_preserved_ = true;
}

// Reads a chunk of the listed keys. False when there are none.
bool Snapshot::ReadBelow(Output& out, int64_t room) {
  List();
  std::vector<int64_t> keys;
  {
    std::shared_lock guard(table_->lock_);
    RequireReadable();
    std::lock_guard below_guard(below_mutex_);
    const int64_t most = std::min(room, kKeysPerHold);
    for (; next_below_ < below_->size() && std::ssize(keys) < most; ++next_below_) {
      if (!below_->marked(next_below_)) keys.push_back(below_->key(next_below_));
    }
  }
  if (keys.empty()) return false;
  const FetchedRows rows = table_->below_.Fetch(keys, /*with_scores=*/true);
  std::vector<int64_t> ours;
  {
    std::shared_lock guard(table_->lock_);
    RequireReadable();
    std::lock_guard below_guard(below_mutex_);
    for (const int64_t key : keys) {
      const int64_t place = below_->Find(key);
      if (below_->marked(place)) continue;  // saved in the meantime
      below_->Mark(place);
      ours.push_back(key);
    }
  }
  for (const int64_t key : ours) {
    const FetchedRow row = rows.Find(key);
    if (!row.data) ThrowLost(key);
    Emit(key, row.score, 0, row.data, out);
  }
  return true;
}

}  // namespace embstore
