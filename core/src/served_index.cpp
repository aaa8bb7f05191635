#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstring>
#include <utility>
#include <vector>

#include "embstore/checksum.h"
#include "embstore/parallel.h"
#include "embstore/served_table.h"
#include "file_io.h"

namespace embstore {
namespace {

// The first 64 bytes of an index file; the lines follow.
struct Header {
  char magic[8];
  uint32_t version;
  uint32_t keys_crc;  // of the file of keys
  uint64_t lines;
  uint64_t entries;
  uint64_t secret;
  uint32_t lines_crc;
  uint8_t unused[16];
  uint32_t crc;  // of the bytes before it
};
static_assert(sizeof(Header) == 64);
constexpr char kMagic[8] = {'E', 'M', 'B', 'I', 'N', 'D', 'E', 'X'};
constexpr uint32_t kVersion = 1;

uint32_t HeaderCrc(const Header& header) { return Crc32(0, &header, offsetof(Header, crc)); }

// Full lines in a row that a search passes. Of random keys it is some dozens at most, and nobody
// can choose keys that collide unless the secret is known, as that of a file is.
constexpr int64_t kMostPassed = 4096;

int64_t LinesFor(int64_t entries) { return entries / (ServedIndex::Line::kEntries - 1) + 1; }

}  // namespace

ServedIndex::ServedIndex(int64_t entries, uint64_t secret, bool filtered)
    : secret_(secret),
      lines_count_(LinesFor(entries)),
      owned_(static_cast<size_t>(lines_count_) * sizeof(Line)),
      filter_(filtered ? std::bit_ceil(static_cast<size_t>(entries) / 8 + 1) : 0),
      lines_(reinterpret_cast<const Line*>(owned_.data())) {}

ServedIndex::ServedIndex(const ServedIndex& other, int64_t entries)
    : ServedIndex(std::max(entries, other.size()), other.secret_, !other.filter_.empty()) {
  if (lines_count_ <= other.lines_count_) {  // most increments: copy the lines as they are
    *this = ServedIndex(other.lines_count_ * (Line::kEntries - 1) - 1, other.secret_);
    std::memcpy(owned_.data(), other.lines_, other.bytes());
    filter_ = other.filter_;
    size_ = other.size_;
    return;
  }
  other.ForEach([this](int64_t key, uint32_t row) { Put(key, row); });
}

ServedIndex::ServedIndex(const std::string& path, int64_t entries, uint32_t keys_crc,
                         std::span<const uint32_t> rows_of_page)
    : mapped_(std::make_unique<MappedFile>(path, -1)) {
  Header header;
  const auto refuse = [&](const char* why) { throw InvalidArgument(path + ": " + why); };
  if (mapped_->size() < sizeof(header)) refuse("is not an index file");
  std::memcpy(&header, mapped_->data(), sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) refuse("is not an index file");
  if (header.version != kVersion) refuse("is an index file of an unsupported version");
  if (header.crc != HeaderCrc(header)) refuse("is damaged: the checksum of its header is wrong");
  if (header.keys_crc != keys_crc || header.entries != static_cast<uint64_t>(entries)) {
    refuse("indexes other keys");
  }
  if (header.lines != static_cast<uint64_t>(LinesFor(entries)) ||
      mapped_->size() != sizeof(header) + header.lines * sizeof(Line)) {
    refuse("is damaged: its size is wrong");
  }
  secret_ = header.secret;
  lines_count_ = static_cast<int64_t>(header.lines);
  size_ = entries;
  lines_ = reinterpret_cast<const Line*>(mapped_->data() + sizeof(header));
  if (Crc32(0, lines_, bytes()) != header.lines_crc) refuse("is damaged: its checksum is wrong");
  if (const char* mistake = Mistake(rows_of_page)) refuse(mistake);
}

const char* ServedIndex::Mistake(std::span<const uint32_t> rows_of_page) const {
  std::atomic<const char*> mistake = nullptr;
  std::atomic<int64_t> counted = 0;
  constexpr int64_t kLinesPerTask = 1 << 14;
  ParallelFor((lines_count_ + kLinesPerTask - 1) / kLinesPerTask, [&](int64_t task) {
    const Line* const begin = lines_ + task * kLinesPerTask;
    const Line* const end = std::min(begin + kLinesPerTask, lines_ + lines_count_);
    int64_t count = 0, passed = 0;
    for (const Line* line = begin; line != end; ++line) {
      // A line that is not full ends a search, and there is one, for entries leave a fifth free.
      if (line->count > Line::kEntries || line->passed > (line->count == Line::kEntries)) {
        mistake = "is damaged: its lines are wrong";
        return;
      }
      count += line->count;
      passed = line->passed ? passed + 1 : 0;
      if (passed > kMostPassed) {
        mistake = "is damaged: its searches are too long";
        return;
      }
      for (int i = 0; i < line->count; ++i) {
        const uint32_t row = line->rows[i];
        const uint32_t page = PageOf(row);
        if (page >= rows_of_page.size() || PlaceOf(row) >= rows_of_page[page]) {
          mistake = "is damaged: it names rows that are not there";
          return;
        }
      }
    }
    counted += count;
  });
  if (!mistake && counted != size_) return "is damaged: it has another number of entries";
  return mistake;
}

std::optional<uint32_t> ServedIndex::PutWithin(Line* home, const Line* end, int64_t key,
                                               uint32_t row, bool* placed) {
  *placed = true;
  for (Line* line = home; line != end; ++line) {
    for (int i = 0; i < line->count; ++i) {
      if (line->keys[i] == key) return std::exchange(line->rows[i], row);
    }
    if (line->count < Line::kEntries) {
      line->keys[line->count] = key;
      line->rows[line->count++] = row;
      return std::nullopt;
    }
    line->passed = 1;
  }
  *placed = false;
  return std::nullopt;
}

std::optional<uint32_t> ServedIndex::Put(int64_t key, uint32_t row) {
  auto* lines = reinterpret_cast<Line*>(owned_.data());
  const uint64_t hash = Hash(key);
  if (!filter_.empty()) filter_[FilterWord(hash)] |= FilterBits(hash);
  bool placed;
  auto* home = lines + (LineOf(hash) - lines_);
  std::optional<uint32_t> before = PutWithin(home, lines + lines_count_, key, row, &placed);
  if (!placed) before = PutWithin(lines, home, key, row, &placed);  // from the front again
  size_ += !before;
  return before;
}

std::optional<int64_t> ServedIndex::PutAll(std::span<const NumberedKeys> parts) {
  assert(filter_.empty());
  struct Entry {
    int64_t key;
    uint32_t row;
  };
  struct Range {
    std::vector<Entry> left_over;  // their lines up to the end of the range are full
    int64_t placed = 0;
    std::optional<int64_t> twice;
  };
  auto* lines = reinterpret_cast<Line*>(owned_.data());
  std::vector<Range> ranges(static_cast<size_t>(NumThreads()));
  ParallelFor(std::ssize(ranges), [&](int64_t number) {
    Range& range = ranges[static_cast<size_t>(number)];
    const int64_t begin = lines_count_ * number / std::ssize(ranges);
    const int64_t end = lines_count_ * (number + 1) / std::ssize(ranges);
    constexpr int64_t kBlock = 1024;
    std::array<Line*, kBlock> homes;
    std::array<int64_t, kBlock> at;
    for (const NumberedKeys& part : parts) {
      for (int64_t first = 0; first < part.n; first += kBlock) {
        // Without branches: whether a key is of this range nobody can predict.
        size_t own = 0;
        for (int64_t i = first; i < std::min(first + kBlock, part.n); ++i) {
          const int64_t line = HomeOf(part.keys[i]) - lines_;
          homes[own] = lines + line;
          at[own] = i;
          own += line >= begin && line < end;
        }
        constexpr size_t kAhead = 16;
        for (size_t i = 0; i < std::min(own, kAhead); ++i) __builtin_prefetch(homes[i], 1);
        for (size_t i = 0; i < own; ++i) {
          if (i + kAhead < own) __builtin_prefetch(homes[i + kAhead], 1);
          const Entry entry{part.keys[at[i]], part.first_row + static_cast<uint32_t>(at[i])};
          bool placed;
          if (PutWithin(homes[i], lines + end, entry.key, entry.row, &placed)) {
            range.twice = entry.key;
            return;
          }
          if (placed) {
            ++range.placed;
          } else {
            range.left_over.push_back(entry);
          }
        }
      }
    }
  });
  for (const Range& range : ranges) {
    if (range.twice) return range.twice;
    size_ += range.placed;
  }
  for (const Range& range : ranges) {
    for (const Entry& entry : range.left_over) {
      if (Put(entry.key, entry.row)) return entry.key;
    }
  }
  return std::nullopt;
}

void ServedIndex::Save(const std::string& path, uint32_t keys_crc) const {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.keys_crc = keys_crc;
  header.lines = static_cast<uint64_t>(lines_count_);
  header.entries = static_cast<uint64_t>(size_);
  header.secret = secret_;
  header.lines_crc = Crc32(0, lines_, bytes());
  header.crc = HeaderCrc(header);
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) ThrowIo("creating " + path);
  try {
    WriteWhole(fd, &header, sizeof(header), 0, path);
    WriteWhole(fd, lines_, bytes(), sizeof(header), path);
  } catch (...) {
    close(fd);
    unlink(path.c_str());
    throw;
  }
  close(fd);
}

}  // namespace embstore
