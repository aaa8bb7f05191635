// CounterChanges: which parts of a table's counters changed since they were last taken, so that an
// increment need not hold all of them.
//
// Counters are an array of bytes, divided into parts of 64. What is taken is an array of words:
//
//     0x5ce8 | 1: parts that are not listed are 0 | bytes of the counters (4) | words of the header
//     | header | for each listed part its number (2) and its contents (32)
//
// The header says what the counters mean; only the same kind of counters understands it.
//
// Thread safety: none; the table guards it. Mark may run on several threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace embstore {

class CounterChanges {
 public:
  static constexpr size_t kPartBytes = 64;

  // Tracks changes of so many bytes from now on. `from_zero`: the counters start from 0, whatever
  // was taken before.
  void Track(size_t bytes, bool from_zero);
  void Stop() { marks_ = {}; }
  bool is_on() const { return !marks_.empty(); }

  void Mark(size_t byte) {
    if (marks_.empty()) return;
    std::atomic_ref<uint8_t>(marks_[byte / kPartBytes]).store(1, std::memory_order_relaxed);
  }

  // REQUIRES: is_on(), and as many counters as are tracked.
  std::vector<uint16_t> Take(std::span<const uint16_t> header, std::span<const std::byte> counters);
  // What is there to take when there are no counters.
  static std::vector<uint16_t> Nothing(std::span<const uint16_t> header);
  // Makes what was taken part of the next Take.
  void PutBack(std::span<const uint16_t> taken);

 private:
  std::vector<uint8_t> marks_;  // by part; empty: off
  bool from_zero_ = false;
};

// What CounterChanges::Take returned, in its pieces.
struct TakenCounters {
  bool from_zero = false;
  size_t bytes = 0;
  std::span<const uint16_t> header, parts;

  // Throws InvalidArgument for anything that Take does not return.
  explicit TakenCounters(std::span<const uint16_t> words);
  size_t size() const;
  uint32_t number(size_t i) const;
  // REQUIRES: counters.size() == bytes.
  void Apply(std::span<std::byte> counters) const;
};

}  // namespace embstore
