// How an SSD store makes room: rows that are still named move out of segments that are mostly
// garbage.
#include <algorithm>
#include <array>
#include <cassert>
#include <exception>
#include <stdexcept>

#include "embstore/parallel.h"
#include "mapped_read.h"
#include "ssd_store_impl.h"

namespace embstore {

// The segments to empty, at most `limit` of those with the fewest live rows: none while less than
// half of the places are garbage.
std::vector<int64_t> SsdStoreImpl::PickVictims(int64_t limit) const {
  constexpr int64_t kSlackSegments = 8;
  int64_t places = 0, live = 0;
  std::vector<int64_t> victims;
  const auto live_rows = [&](int64_t number) {
    return int64_t{segments_[static_cast<size_t>(number)].live};
  };
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.state != State::kWritten || segment.checkpoints || segment.damaged) continue;
    places += layout_.rows_per_segment();
    live += segment.live;
    victims.push_back(static_cast<int64_t>(i));
  }
  const auto count = std::min(limit, static_cast<int64_t>(victims.size()));
  std::partial_sort(victims.begin(), victims.begin() + count, victims.end(),
                    [&](int64_t a, int64_t b) { return live_rows(a) < live_rows(b); });
  int64_t taken = 0;
  while (taken < count && places > 2 * live + kSlackSegments * layout_.rows_per_segment()) {
    places -= layout_.rows_per_segment();
    live -= live_rows(victims[static_cast<size_t>(taken++)]);
  }
  victims.resize(static_cast<size_t>(taken));
  return victims;
}

// Never throws: the caller's rows are stored, whatever happens to others. A Get reports what cannot
// be read, and the next Put what cannot be written.
void SsdStoreImpl::Compact(int64_t limit) noexcept {
  if (scanners_.load() > 0) return;
  try {
    for (int64_t victim : PickVictims(limit)) {
      try {
        ReadLive(victim, moving_, /*whole=*/false);
      } catch (const std::runtime_error&) {
        segments_[static_cast<size_t>(victim)].damaged = true;
        continue;
      }
      MoveRows(moving_);
    }
  } catch (const std::exception&) {
  }
}

// The rows of a segment that the index names, verified. Out of a mapped file only these are read,
// unless the whole segment is wanted.
void SsdStoreImpl::ReadLive(int64_t number, LiveRows& live, bool whole) {
  constexpr int64_t kRowsPerTask = 256;
  const int64_t first = layout_.FirstRow(number), chunk = layout_.ChunkOf(first);
  const std::byte* const map =
      whole || files_->direct() ? nullptr : files_->Map(SsdFiles::kValues, chunk);
  SegmentRows& rows = live.segment;
  ReadSegment(number, rows, /*with_values=*/map == nullptr);
  live.places.clear();
  for (int64_t place = 0; place < layout_.rows_per_segment(); ++place) {
    if (IsNamed(first + place)) live.places.push_back(place);
  }
  const int64_t n = std::ssize(live.places);
  const auto require = [&](bool holds) {
    if (holds) return;
    throw InvalidState(Describe() + " is damaged: segment " + std::to_string(number) +
                       " should hold " + std::to_string(n) + " live rows but does not");
  };
  assert(n > 0 && n == segments_[static_cast<size_t>(number)].live);
  require(live.places.back() < std::ssize(rows.keys));
  live.keys.resize(live.places.size());
  live.scores.resize(live.places.size());
  live.rows.resize(live.places.size());
  live.checksums.resize(live.places.size());
  live.entries.resize(live.places.size());
  for (size_t j = 0; j < live.places.size(); ++j) {
    live.keys[j] = rows.keys[static_cast<size_t>(live.places[j])];
  }
  const int fd = files_->Get(SsdFiles::kValues, chunk, false);
  const std::string name = files_->NameOf(SsdFiles::kValues, chunk);
  if (map) CatchBusErrors();
  ParallelFor((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const auto begin = static_cast<size_t>(task * kRowsPerTask);
    const auto end = static_cast<size_t>(std::min(n, (task + 1) * kRowsPerTask));
    std::array<MappedRead, kRowsPerTask> reads;
    for (size_t j = begin; j < end; ++j) {
      if (j + kKeysAhead < end) index_.Prefetch(live.keys[j + kKeysAhead]);
      SsdIndex::Entry* const entry = index_.Find(live.keys[j]);
      const int64_t place = live.places[j], row = first + place;
      require(entry && entry->row == row);
      std::byte* const data = rows.values.get() + layout_.PlaceOffset(place);
      const int64_t offset = layout_.ValueOffset(row);
      if (map) reads[j - begin] = {map + offset, data, fd, offset, &name};
      live.scores[j] = rows.scores[static_cast<size_t>(place)];
      live.rows[j] = data;
      live.checksums[j] = entry->checksum;
      live.entries[j] = entry;
    }
    if (map) ReadMapped({reads.data(), end - begin}, static_cast<size_t>(layout_.row_bytes));
    for (size_t j = begin; j < end; ++j) {
      const auto row = live.entries[j]->row;
      Verify(row, live.checksums[j], live.keys[j], live.rows[j]);
      VerifyScore(row, live.checksums[j],
                  {live.scores[j], rows.checksums[static_cast<size_t>(live.places[j])]});
    }
  });
}

// The segment that they leave is retired with the last of them.
void SsdStoreImpl::MoveRows(const LiveRows& live) {
  Append(live.keys, live.rows.data(), live.scores.data(),
         {live.checksums.data(), live.entries.data()});
  moved_rows_ += static_cast<int64_t>(live.keys.size());
}

}  // namespace embstore
