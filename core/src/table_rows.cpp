// Reading and writing rows by key, outside of training.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <string>
#include <utility>

#include "embstore/parallel.h"
#include "embstore/snapshot.h"
#include "embstore/table.h"
#include "grouping.h"
#include "key_blocks.h"

namespace embstore {
namespace {

constexpr int64_t kKeysPerTask = 4096;

// Where found[i] == value.
std::vector<uint32_t> Positions(const uint8_t* found, size_t n, uint8_t value) {
  std::vector<uint32_t> positions;
  for (size_t i = 0; i < n; ++i) {
    if (found[i] == value) positions.push_back(static_cast<uint32_t>(i));
  }
  return positions;
}

}  // namespace

void Table::Resident(std::span<const int64_t> keys, uint8_t* found) const {
  std::shared_lock guard(lock_);
  RequireOpen();
  LockedResident(keys, found);
}

void Table::LockedResident(std::span<const int64_t> keys, uint8_t* found) const {
  ForKeyBlocks(index(), keys, [&](int64_t i, const Slot* slots, const Row*, int64_t m) {
    for (int64_t j = 0; j < m; ++j) found[i + j] = slots[j] != kNoSlot;
  });
}

void Table::Contains(std::span<const int64_t> keys, uint8_t* found) const {
  std::shared_lock guard(lock_);
  RequireOpen();
  LockedResident(keys, found);
  if (!below_.exists()) return;
  const std::vector<uint32_t> missing = Positions(found, keys.size(), 0);
  std::vector<int64_t> wanted;
  for (uint32_t i : missing) wanted.push_back(keys[i]);
  std::vector<uint8_t> below(wanted.size());
  below_.store().Contains(wanted, below.data());
  for (size_t j = 0; j < missing.size(); ++j) found[missing[j]] = below[j];
}

void Table::Read(std::span<const int64_t> keys, float* values, float* states, uint64_t* scores,
                 uint8_t* found) const {
  std::shared_lock guard(lock_);
  RequireOpen();
  const RowsView view = rows();
  const int64_t width = state_width_;
  std::vector<uint8_t> found_here;
  if (below_.exists() && !found) {
    found_here.resize(keys.size());
    found = found_here.data();
  }
  ForKeyBlocks(index(), keys, [&](int64_t i, const Slot* slots, const Row* rows, int64_t m) {
    if (values) {
      ActiveKernels().gather(view, rows, m, nullptr, values + i * options_.dim, DType::kFloat32,
                             options_.dim, /*around_caches=*/false);
    }
    for (int64_t j = 0; j < m; ++j) {
      const Slot slot = slots[j];
      if (found) found[i + j] = slot != kNoSlot;
      if (scores) scores[i + j] = slot == kNoSlot ? 0 : index_->score(slot);
      if (!states) continue;
      float* out = states + (i + j) * width;
      if (slot == kNoSlot) {
        std::fill_n(out, width, 0.0f);
      } else {
        std::copy_n(state_at(rows[j]), width, out);
      }
    }
  });
  if (!below_.exists()) return;
  const std::vector<uint32_t> missing = Positions(found, keys.size(), 0);
  const FetchedRows below = below_.Fetch(keys.data(), missing, scores != nullptr);
  for (uint32_t i : missing) {
    const FetchedRow fetched = below.Find(keys[i]);
    if (!fetched.data) continue;
    found[i] = 1;
    if (values) {
      ActiveKernels().load_vector(fetched.data, options_.dim, options_.dtype,
                                  values + i * options_.dim);
    }
    if (states) std::memcpy(states + i * width, fetched.data + state_offset_, 4 * width);
    if (scores) scores[i] = fetched.score;
  }
}

void Table::FindAll(std::span<const int64_t> keys, Row* rows, BatchScore score) {
  const auto n = static_cast<int64_t>(keys.size());
  const int64_t tasks = (n + kKeysPerTask - 1) / kKeysPerTask;
  if (tasks > 1 && FindsDivided(score)) {
    FindDivided(keys, rows, score);
    return;
  }
  ParallelFor(tasks, [&](int64_t task) {
    const int64_t begin = task * kKeysPerTask, m = std::min(kKeysPerTask, n - begin);
    FindHere(keys.subspan(static_cast<size_t>(begin), static_cast<size_t>(m)), rows + begin, score,
             tasks == 1);
  });
}

bool Table::FindsDivided(BatchScore score) const {
  return AddsUp(score.update) && NumThreads() > 1;
}

// Each thread finds the keys of one range of hashes, so no two read or write the same part of the
// index. All threads hash all keys, which takes less time than handing keys over to each other.
void Table::FindDivided(std::span<const int64_t> keys, Row* rows, BatchScore score) {
  constexpr size_t kPiece = 2048, kPadding = 8;
  const size_t n = keys.size(), pieces = (n + kPiece - 1) / kPiece;
  const auto parts = static_cast<uint32_t>(NumThreads());
  ParallelFor(parts, [&](int64_t part) {
    int64_t own[kPiece + kPadding];
    uint32_t positions[kPiece + kPadding];
    Row found[kPiece];
    for (size_t i = 0; i < pieces; ++i) {
      // Threads begin at different pieces, so that they do not write to the same lines of `rows`.
      const size_t piece = (i + static_cast<size_t>(part) * pieces / parts) % pieces;
      const size_t begin = piece * kPiece, m = std::min(kPiece, n - begin);
      const auto count = static_cast<size_t>(
          ActiveKernels().select(index_->secret(), &keys[begin], static_cast<int64_t>(m),
                                 {static_cast<uint32_t>(part), parts}, own, positions));
      FindHere({own, count}, found, score, /*alone=*/true);
      for (size_t j = 0; j < count; ++j) rows[begin + positions[j]] = found[j];
    }
  });
}

void Table::CountUses(const Row* rows, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] == kMissingRow) continue;
    std::atomic_ref<uint32_t> uses(uses_[static_cast<size_t>(rows[i])]);
    if (uses.load(std::memory_order_relaxed) < UINT32_MAX / 2) {
      uses.fetch_add(1, std::memory_order_relaxed);
    }
  }
}

int64_t Table::FindHere(std::span<const int64_t> keys, Row* rows, BatchScore score, bool alone) {
  const auto n = static_cast<int64_t>(keys.size());
  IndexView view = index();
  if (score.update == ScoreUpdate::kKeep) {
    return ActiveKernels().find(view, keys.data(), n, nullptr, rows, score.update, 0, alone);
  }
  constexpr int64_t kKeysForEach = 512;  // to bring more of them home costs more than it gains
  AwayHits away;
  away.most = static_cast<int>(std::min<int64_t>(n / kKeysForEach + 1, AwayHits::kMost));
  view.away_hits = &away;
  int64_t missing;
  if (!watched()) {
    missing = ActiveKernels().find(view, keys.data(), n, nullptr, rows, score.update, score.score,
                                   alone || RunsAlone());
  } else if (score.update == ScoreUpdate::kSet) {
    missing = FindAnnounced(view, keys, rows, score);
  } else {
    missing = FindAndAnnounce(view, keys, rows, score, alone);
  }
  away_keys_.Add(away);
  AfterUse(rows, n);
  return missing;
}

void Table::AfterUse(const Row* rows, int64_t n) {
  if (counts_apart()) CountUses(rows, n);
  if (!tracks_dirty() || options_.ttl == 0) return;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] == kMissingRow) continue;
    MarkDirty(rows[i]);  // the store has to learn the new score, even where no gradient follows
  }
}

void Table::AssignStates(const Row* rows, int64_t n, const float* states) {
  ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kKeysPerTask, n);
    for (int64_t i = task * kKeysPerTask; i < end; ++i) {
      if (rows[i] == kMissingRow) continue;
      std::copy_n(states + i * state_width_, state_width_, state_at(rows[i]));
    }
  });
}

int64_t Table::Assign(std::span<const int64_t> keys, const float* values, const float* states,
                      const uint64_t* scores) {
  RequireBatchSize(keys.size());
  const auto n = static_cast<int64_t>(keys.size());
  if (scores) {
    const auto* zero = std::find(scores, scores + n, uint64_t{0});
    if (zero != scores + n) {
      throw InvalidArgument("scores should be at least 1 but scores[" +
                            std::to_string(zero - scores) + "] is: 0");
    }
  }
  const auto list = std::make_unique<SlotList>(shared_from_this(), keys);
  std::unique_lock guard(lock_);
  RequireOpen();
  const BatchScore batch = scores ? BatchScore{ScoreUpdate::kKeep, 1} : NextBatchScore(n);
  // The scores of a dump may come from a clock that is ahead; later training must rank above them.
  if (scores && n > 0) {
    const uint64_t highest = *std::max_element(scores, scores + n);
    clock_.RaiseAbove(highest);
    highest_score_ = std::max(highest_score_, highest);
  }
  Row* const rows = list->rows();
  FindAll(keys, rows, batch);
  if (watched()) BeforeChange(keys, rows);  // rows change even if scores do not
  std::vector<uint32_t> missing;
  std::vector<uint8_t> is_new(scores ? keys.size() : 0);  // inserted with its score
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] != kMissingRow) continue;
    missing.push_back(static_cast<uint32_t>(i));
    if (scores) is_new[static_cast<size_t>(i)] = 1;
  }
  // A row that is replaced as a whole is fetched only for a snapshot.
  const bool whole = (states || state_width_ == 0) && (scores || !counts_occurrences());
  if (whole && snapshot_) {
    std::vector<int64_t> absent;
    for (const uint32_t i : missing) absent.push_back(keys[i]);
    PreserveBelow(absent);
  }
  const int64_t before = stats_.inserts;
  const int64_t refused = InsertMissing(keys.data(), rows, missing, batch, scores,
                                        whole ? FetchedRows() : Fetch(keys.data(), missing),
                                        values);  // cheaper than initial vectors
  if (!below_.exists() && stats_.inserts - before + refused == n) {
    // All are new and none comes twice: they have their vectors and scores.
    if (states) AssignStates(rows, n, states);
    return refused;
  }
  if (scores) ForgetVictims();  // scores may fall
  Grouping grouping(rows, n, rows_.used(), NumThreads());
  Grouping* const one = &grouping;
  Grouping::SortAll({&one, 1});
  ParallelFor(grouping.partitions(), [&](int64_t partition) {
    const std::span<const Occurrence> sorted = grouping.Partition(partition);
    for (size_t j = 0; j < sorted.size(); ++j) {
      if (j + 1 < sorted.size() && sorted[j + 1].row == sorted[j].row) continue;
      const auto row = static_cast<Row>(sorted[j].row);
      const int64_t i = sorted[j].index;
      ActiveKernels().store_vector(values + i * options_.dim, options_.dim, options_.dtype,
                                   rows_.at(row));
      if (states) std::copy_n(states + i * state_width_, state_width_, state_at(row));
      if (scores && !is_new[static_cast<size_t>(i)]) {
        index_->set_score(index_->Find(keys[static_cast<size_t>(i)]), scores[i]);
      }
      if (tracks_dirty()) MarkDirty(row);
    }
  });
  return refused;
}

void Table::SetUses(std::span<const int64_t> keys, const uint32_t* uses) {
  std::unique_lock guard(lock_);
  RequireOpen();
  if (!counts_apart()) return;
  ForgetVictims();
  for (size_t i = 0; i < keys.size(); ++i) {
    const Slot slot = index_->Find(keys[i]);
    if (slot == kNoSlot) continue;
    const IndexEntry entry = index_->entry(slot);
    if (watched()) BeforeChange(entry);
    uses_[static_cast<size_t>(entry.row)] = std::min(uses[i], UINT32_MAX / 2);
  }
}

int64_t Table::Erase(std::span<const int64_t> keys) {
  std::unique_lock guard(lock_);
  RequireOpen();
  return EraseLocked(keys);
}

int64_t Table::EraseLocked(std::span<const int64_t> keys) {
  int64_t only_below = 0;
  if (below_.exists()) {
    const std::vector<int64_t> below = OnlyBelow(keys);
    only_below = std::ssize(below);
    PreserveBelow(below);
    below_.Erase(keys);  // first: if it fails, nothing has changed
    if (changes_) {
      for (const int64_t key : below) changes_->Remove(key);
    }
  }
  pins_.Begin(row_capacity_);
  int64_t erased = 0;
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) index_->Prefetch(index_->Hash(keys[i + kAhead]));
    const int64_t key = keys[i];
    const Slot slot = index_->Find(key);
    if (slot == kNoSlot) continue;
    const IndexEntry entry = index_->entry(slot);
    if (watched()) BeforeChange(entry);
    if (changes_) changes_->Remove(key);
    if (snapshot_) snapshot_->Leave(key);
    FreeSlot(slot);
    pins_.Hold(entry.row);
    ++erased;
  }
  index_->AddSize(-erased);
  if (erased > 0) pins_.TakeFromLists(nullptr);
  return erased + only_below;
}

std::vector<int64_t> Table::OnlyBelow(std::span<const int64_t> keys) const {
  std::vector<int64_t> absent;
  for (int64_t key : keys) {
    if (index_->Find(key) == kNoSlot) absent.push_back(key);
  }
  return below_.Present(std::move(absent));
}

void Table::Clear() {
  std::unique_lock guard(lock_);
  RequireOpen();
  std::vector<int64_t> replaced = BeforeReplacement();
  if (below_.exists()) below_.store().Clear();
  AfterReplacement(std::move(replaced));
}

void Table::SetOptimizer(const OptimizerOptions& optimizer) {
  Validate(optimizer);
  std::unique_lock guard(lock_);
  RequireOpen();
  const int64_t width = StateWidth(optimizer, options_.dim);
  if (width != state_width_) {
    throw InvalidArgument("optimizer of table '" + options_.name + "' should have " +
                          std::to_string(state_width_) + " floats of state but " +
                          std::string(Name(optimizer.kind)) + " has: " + std::to_string(width));
  }
  std::vector<float> before(static_cast<size_t>(width)), after(static_cast<size_t>(width));
  InitState(options_.optimizer, options_.dim, before.data());
  InitState(optimizer, options_.dim, after.data());
  options_.optimizer = optimizer;
  if (before == after) return;
  index_->VisitAll([&](Slot, const IndexEntry& entry) {
    float* state = state_at(entry.row);
    if (!std::equal(before.begin(), before.end(), state)) return;
    if (watched()) BeforeChange(entry);
    if (tracks_dirty()) MarkDirty(entry.row);
    std::copy(after.begin(), after.end(), state);
  });
  for (Row row = 0; row < options_.shared_rows; ++row) {
    if (!shared_used_[static_cast<size_t>(row)]) continue;
    if (!std::equal(before.begin(), before.end(), state_at(row))) continue;
    std::copy(after.begin(), after.end(), state_at(row));
  }
}

void Table::ForgetRows() {
  index_->Clear();
  rows_.Clear();
  rows_.Take(options_.shared_rows);
  std::fill(shared_used_.begin(), shared_used_.end(), uint8_t{0});
  sketch_.reset();
  queues_.reset();
  ++layout_;
  below_.NoteReplaced();
  pins_.TakeAllFromLists();
}

void Table::CopyRows(const Row* numbers, int64_t n, float* values, float* states) const {
  if (values) {
    ActiveKernels().gather(rows(), numbers, n, nullptr, values, DType::kFloat32, options_.dim,
                           /*around_caches=*/false);
  }
  if (!states) return;
  constexpr int64_t kAhead = 8;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(state_at(numbers[i + kAhead]));
    std::copy_n(state_at(numbers[i]), state_width_, states + i * state_width_);
  }
}

RowBlock Table::Collect(std::span<const IndexEntry> entries, bool with_values,
                        bool with_states) const {
  const auto n = std::ssize(entries);
  RowBlock block;
  block.keys.resize(entries.size());
  block.scores.resize(entries.size());
  if (with_values) block.values.resize(entries.size() * static_cast<size_t>(options_.dim));
  if (with_states) block.states.resize(entries.size() * static_cast<size_t>(state_width_));
  ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
    const int64_t begin = task * kKeysPerTask, end = std::min(begin + kKeysPerTask, n);
    Row numbers[kKeysPerTask];
    for (int64_t i = begin; i < end; ++i) {
      const IndexEntry& entry = entries[static_cast<size_t>(i)];
      block.keys[static_cast<size_t>(i)] = entry.key;
      block.scores[static_cast<size_t>(i)] = entry.score;
      numbers[i - begin] = entry.row;
    }
    float* values = with_values ? block.values.data() + begin * options_.dim : nullptr;
    float* states = with_states ? block.states.data() + begin * state_width_ : nullptr;
    CopyRows(numbers, end - begin, values, states);
  });
  return block;
}

RowBlock Table::Export(Cursor& cursor, int64_t max_rows, uint64_t min_score, bool with_values,
                       bool with_states) const {
  if (max_rows < 1) {
    throw InvalidArgument("max_rows should be at least 1 but is: " + std::to_string(max_rows));
  }
  std::shared_lock guard(lock_);
  RequireOpen();
  if (!cursor.started) cursor = {0, {}, layout_, true};
  if (cursor.layout != layout_) {
    throw InvalidState("table '" + options_.name + "' was cleared during an export");
  }
  std::vector<IndexEntry> entries;
  while (!cursor.walk.ended && std::ssize(entries) < max_rows) {
    index_->Advance(
        cursor.walk, max_rows - std::ssize(entries),
        [&](const IndexEntry& entry) { return entry.score >= min_score; },
        [&](const IndexEntry& entry) { entries.push_back(entry); });
  }
  cursor.next = cursor.walk.ended ? -1 : 0;
  return Collect(entries, with_values, with_states);
}

RowBlock Table::DrainEvictions() {
  std::unique_lock guard(lock_);
  RequireOpen();
  return std::exchange(log_, {});
}

void Table::set_eviction_log(EvictionLog log) {
  std::unique_lock guard(lock_);
  options_.eviction_log = log;
  log_ = {};
}

}  // namespace embstore
