// Snapshots of changes: the marked rows and the keys that left, and how they are given back.
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "key_list.h"
#include "saved_rows.h"

namespace embstore {
namespace {

constexpr size_t kMarksPerHold = size_t{1} << 20;  // counted under one hold of the lock

}  // namespace

void Snapshot::CountMarks() {
  int64_t rows = 0;
  for (size_t begin = 0;; begin += kMarksPerHold) {
    std::shared_lock guard(table_->lock_);  // the marks move when the table grows
    RequireReadable();
    if (begin >= marks_.size()) break;
    const auto* marks = reinterpret_cast<uint8_t*>(marks_.data());
    const size_t end = std::min(begin + kMarksPerHold, marks_.size());
    for (size_t i = begin; i < end; ++i) rows += marks[i] != 0;
  }
  resident_rows_ = rows;
}

// What became of the keys that left the table before that moment. One that is in the table now and
// not marked was in it at that moment, since those that come back are marked.
void Snapshot::ListChanges() {
  std::vector<int64_t> keys, places;
  std::vector<uint8_t> found;
  const int64_t size = below_->size();
  for (int64_t end = 0; end < size;) {
    const int64_t begin = end;
    end = std::min(begin + kKeysPerHold, size);
    keys.clear();
    places.clear();
    {
      std::shared_lock guard(table_->lock_);
      RequireReadable();
      std::lock_guard below_guard(below_mutex_);
      for (int64_t at = begin; at < end; ++at) {
        if (below_->marked(at)) continue;
        keys.push_back(below_->key(at));
        places.push_back(at);
      }
      found.resize(keys.size());
      table_->LockedResident(keys, found.data());
      size_t absent = 0;
      for (size_t i = 0; i < keys.size(); ++i) {
        if (found[i]) {
          below_->Mark(places[i]);
        } else {
          keys[absent] = keys[i];
          places[absent++] = places[i];
        }
      }
      keys.resize(absent);
      found.assign(absent, 0);
    }
    if (table_->below_.exists()) table_->below_.store().Contains(keys, found.data());
    std::shared_lock guard(table_->lock_);
    RequireReadable();
    std::lock_guard below_guard(below_mutex_);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (below_->marked(places[i])) continue;  // came back meanwhile
      if (found[i] && !all_preserved_) {
        ++below_rows_;
      } else {
        gone_.push_back(keys[i]);
        below_->Mark(places[i]);
      }
    }
    listed_keys_ = end;
  }
}

std::vector<int64_t> Snapshot::removed() {
  RethrowFailure();
  List();
  std::vector<int64_t> sorted;
  {
    std::shared_lock guard(table_->lock_);
    sorted = gone_;
  }
  std::sort(sorted.begin(), sorted.end());
  return sorted;
}

void Snapshot::Restore() {
  Detach();
  const auto* marks = reinterpret_cast<const uint8_t*>(marks_.data());
  const auto is_ours = [&](const IndexEntry& entry) {
    return static_cast<size_t>(entry.row) < marks_.size() && marks[entry.row] != 0;
  };
  for (KeyIndex::Walk walk; !walk.ended;) {
    std::shared_lock guard(table_->lock_);
    if (!table_->index_ || !table_->changes_) return;
    table_->index_->Advance(walk, kRowsPerHold, is_ours,
                            [&](const IndexEntry& entry) { table_->changes_->Mark(entry.row); });
  }
  for (int64_t at = 0; at < below_->size();) {
    std::unique_lock guard(table_->lock_);
    if (!table_->changes_) return;
    for (const int64_t end = std::min(at + kKeysPerHold, below_->size()); at < end; ++at) {
      table_->changes_->Remove(below_->key(at));
    }
  }
}

}  // namespace embstore
