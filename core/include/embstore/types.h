// The vocabulary of the engine: scalar types, enumerations and the kinds of error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace embstore {

// Slot: the place of a key's entry in the index. Row: the number of a key's row. Both have 32 bits:
// half the memory traffic of 64, and enough for 2^31 rows a table.
using Slot = int32_t;
using Row = int32_t;

// The key has no row, not even a shared one. Reads as 0.0.
inline constexpr Slot kNoSlot = -1;
inline constexpr Row kMissingRow = -1;
// Numbers below kMissingRow stand for vectors that are not stored in the table: vector j of a side
// array of float32 vectors.
constexpr Row ExtraRow(int64_t j) { return static_cast<Row>(-2 - j); }
constexpr int64_t ExtraIndex(Row row) { return -2 - static_cast<int64_t>(row); }

enum class DType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

enum class Pooling : uint8_t { kNone = 0, kSum = 1, kMean = 2 };

// How the score of a key follows its use. The smallest score of a bucket is evicted first.
enum class ScoreStrategy : uint8_t {
  kTimestamp = 0,   // nanoseconds of a clock that never repeats within a table
  kStep = 1,        // the number of the training batch, from 1
  kCustomized = 2,  // what the user set last
  kLfu = 3,         // occurrences so far
  kNoEviction = 4,  // timestamps; the table grows instead of evicting
  kAgedLfu = 5,     // occurrences, half as much worth after each half-life (aged_score.h)
  kImportance = 6,  // the norms of the gradients that the row received, aged likewise
};

// The caller's mistake: the message names the argument and its value. Becomes ValueError.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A legal call at the wrong time (a closed table, a missing score). Becomes RuntimeError.
struct InvalidState : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The machine lacks memory; the object is as it was before the call. Becomes MemoryError.
struct OutOfMemory : std::bad_alloc {
  explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

}  // namespace embstore
