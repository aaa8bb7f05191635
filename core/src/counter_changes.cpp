#include "embstore/counter_changes.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "embstore/types.h"

namespace embstore {
namespace {

constexpr uint16_t kForm = 0x5ce8;
constexpr size_t kWords = CounterChanges::kPartBytes / sizeof(uint16_t);
constexpr size_t kNumber = sizeof(uint32_t) / sizeof(uint16_t), kRecord = kNumber + kWords;
constexpr size_t kPrefix = 7;  // words before the header

std::vector<uint16_t> Begin(bool from_zero, uint64_t bytes, std::span<const uint16_t> header) {
  std::vector<uint16_t> out(kPrefix);
  out[0] = kForm;
  out[1] = from_zero;
  std::memcpy(&out[2], &bytes, sizeof bytes);
  out[6] = static_cast<uint16_t>(header.size());
  out.insert(out.end(), header.begin(), header.end());
  return out;
}

}  // namespace

void CounterChanges::Track(size_t bytes, bool from_zero) {
  marks_.assign((bytes + kPartBytes - 1) / kPartBytes, 0);
  from_zero_ = from_zero;
}

std::vector<uint16_t> CounterChanges::Nothing(std::span<const uint16_t> header) {
  return Begin(/*from_zero=*/true, 0, header);
}

std::vector<uint16_t> CounterChanges::Take(std::span<const uint16_t> header,
                                           std::span<const std::byte> counters) {
  std::vector<uint16_t> out = Begin(from_zero_, counters.size(), header);
  const auto is_zero = [&](size_t part) {
    const std::byte* const begin = counters.data() + part * kPartBytes;
    return std::all_of(begin, begin + kPartBytes, [](std::byte b) { return b == std::byte{0}; });
  };
  for (size_t part = 0; part < marks_.size();) {
    uint64_t eight = 0;  // most parts have not changed
    std::memcpy(&eight, &marks_[part], std::min(sizeof eight, marks_.size() - part));
    if (!from_zero_ && eight == 0) {
      part += sizeof eight;
      continue;
    }
    if (from_zero_ ? !is_zero(part) : marks_[part] != 0) {
      const auto number = static_cast<uint32_t>(part);
      const size_t at = out.size();
      out.resize(at + kRecord);
      std::memcpy(&out[at], &number, sizeof number);
      std::memcpy(&out[at + kNumber], counters.data() + part * kPartBytes, kPartBytes);
    }
    ++part;
  }
  std::fill(marks_.begin(), marks_.end(), uint8_t{0});
  from_zero_ = false;
  return out;
}

void CounterChanges::PutBack(std::span<const uint16_t> words) {
  const TakenCounters taken(words);
  from_zero_ = from_zero_ || taken.from_zero;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (taken.number(i) < marks_.size()) marks_[taken.number(i)] = 1;
  }
}

TakenCounters::TakenCounters(std::span<const uint16_t> words) {
  const auto require = [&](bool right) {
    if (right) return;
    throw InvalidArgument("changes should be what a table gave but are " +
                          std::to_string(words.size()) + " words of another form");
  };
  require(words.size() >= kPrefix && words[0] == kForm && words[1] <= 1 &&
          words.size() >= kPrefix + words[6]);
  from_zero = words[1] != 0;
  uint64_t size_bytes = 0;
  std::memcpy(&size_bytes, &words[2], sizeof size_bytes);
  bytes = size_bytes;
  header = words.subspan(kPrefix, words[6]);
  parts = words.subspan(kPrefix + words[6]);
  require(parts.size() % kRecord == 0 && bytes % CounterChanges::kPartBytes == 0);
  for (size_t i = 0; i < size(); ++i) require(number(i) < bytes / CounterChanges::kPartBytes);
}

size_t TakenCounters::size() const { return parts.size() / kRecord; }

uint32_t TakenCounters::number(size_t i) const {
  uint32_t number = 0;
  std::memcpy(&number, &parts[i * kRecord], sizeof number);
  return number;
}

void TakenCounters::Apply(std::span<std::byte> counters) const {
  if (from_zero) std::fill(counters.begin(), counters.end(), std::byte{0});
  for (size_t i = 0; i < size(); ++i) {
    std::memcpy(counters.data() + number(i) * CounterChanges::kPartBytes,
                &parts[i * kRecord + kNumber], CounterChanges::kPartBytes);
  }
}

}  // namespace embstore
