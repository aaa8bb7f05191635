// ServedTable: an immutable state of a table, for processes that only read.
//
//     index   key -> row number       cache lines of five entries
//     pages   row number -> bytes     65,536 rows each, in a mapped file
//
// A new state is made from the previous one: `With` adds the rows of an increment and removes its
// deletions. All states share the base index and the files; only the overlay, an index of what
// changed since the base, is copied. Old states stay valid while somebody holds them.
//
// Thread safety: immutable after construction, so readers need no lock.
//
// Invariants
//  1. The overlay, where it has the key, decides; else the base does.
//  2. size() counts the keys that have a row.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "embstore/hash.h"
#include "embstore/initializer.h"
#include "embstore/mapped_file.h"
#include "embstore/memory.h"
#include "embstore/types.h"

namespace embstore {

// Elements of a served row. An int8 row is [minimum | scale | uint8 codes] with float32 numbers,
// and reads minimum + scale * code.
enum class ServedDType : uint8_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };

int64_t ServedRowBytes(int64_t dim, ServedDType dtype);

// Converts rows; `out` holds n * ServedRowBytes bytes. A row with a NaN or an infinite component
// cannot be int8: throws InvalidArgument naming its position.
void EncodeServedRows(const float* values, int64_t n, int64_t dim, ServedDType dtype,
                      std::byte* out);

// Keys to row numbers: open addressing over lines of five entries, four fifths full.
//
// Invariants
//  1. A key is in its home line or, if that was full, in one of the next ones; every full line that
//     it skipped has `passed` set.
//  2. The entries of a line are packed at its front.
class ServedIndex {
 public:
  // Of a row number; the bits above them are the number of a page.
  static constexpr int kPageBits = 16;
  static constexpr uint32_t PageOf(uint32_t row) { return row >> kPageBits; }
  static constexpr uint32_t PlaceOf(uint32_t row) { return row & ((1u << kPageBits) - 1); }
  static constexpr uint32_t kRemoved = UINT32_MAX;  // in an overlay: the key is gone
  struct alignas(64) Line {
    static constexpr int kEntries = 5;
    int64_t keys[kEntries];
    uint32_t rows[kEntries];
    uint16_t count;
    uint16_t passed;  // 1: keys of this line or of an earlier one are further on
  };
  static_assert(sizeof(Line) == 64);

  // Room for `entries` keys. `secret` keys the hash, so that nobody can choose keys that collide.
  // With a filter, a byte a key, most keys that are not there are known without looking at a line.
  ServedIndex(int64_t entries, uint64_t secret, bool filtered = false);
  // Maps an index that Save wrote, of rows on pages with so many rows each. Throws InvalidArgument
  // when it is damaged, or indexes other keys: whoever wrote it, a search ends, at a row that is
  // there.
  ServedIndex(const std::string& path, int64_t entries, uint32_t keys_crc,
              std::span<const uint32_t> rows_of_page);
  ServedIndex(const ServedIndex& other, int64_t entries);  // a copy with room for `entries` keys

  int64_t size() const { return size_; }
  size_t bytes() const { return static_cast<size_t>(lines_count_) * sizeof(Line); }
  size_t filter_bytes() const { return filter_.size() * sizeof(uint64_t); }
  uint64_t secret() const { return secret_; }

  // Sets the row of the key. Returns the previous one, if the key was there.
  std::optional<uint32_t> Put(int64_t key, uint32_t row);

  // Adds keys that are numbered in order from `first_row`. Threads fill a range of lines each.
  // Returns a key that comes twice, if there is one; the index is then of no use.
  struct NumberedKeys {
    const int64_t* keys;
    int64_t n;
    uint32_t first_row;
  };
  std::optional<int64_t> PutAll(std::span<const NumberedKeys> parts);

  // Indexes with one secret share it.
  uint64_t Hash(int64_t key) const {
    return HashKey(static_cast<int64_t>(static_cast<uint64_t>(key) ^ secret_));
  }
  const Line* LineOf(uint64_t hash) const {
    return lines_ + ((hash >> 32) * static_cast<uint64_t>(lines_count_) >> 32);
  }
  const Line* HomeOf(int64_t key) const { return LineOf(Hash(key)); }
  // False: the key with this hash is not there. REQUIRES a filter.
  bool MayHave(uint64_t hash) const {
    const uint64_t bits = FilterBits(hash);
    return (filter_[FilterWord(hash)] & bits) == bits;
  }
  // What one line says of a key: its row, or else the line to go on with, if there is one.
  struct Hint {
    const uint32_t* row;
    const Line* next;
  };
  Hint FindAt(int64_t key, const Line* line) const {
    // Without branches: which of the entries it is nobody can predict.
    unsigned matches = 0;
    for (int i = 0; i < Line::kEntries; ++i) {
      matches |= static_cast<unsigned>(line->keys[i] == key) << i;
    }
    matches &= (1u << line->count) - 1;
    if (matches) return {&line->rows[std::countr_zero(matches)], nullptr};
    if (!line->passed) return {nullptr, nullptr};
    return {nullptr, ++line == lines_ + lines_count_ ? lines_ : line};
  }
  // The row, or null. `from` is HomeOf(key), which callers prefetch, or a line that it led to.
  const uint32_t* Find(int64_t key, const Line* from) const {
    Hint hint = FindAt(key, from);
    while (hint.next) hint = FindAt(key, hint.next);
    return hint.row;
  }
  const uint32_t* Find(int64_t key) const { return Find(key, HomeOf(key)); }

  // Writes the index to a new file; the caller syncs it where it has to last. `keys_crc` identifies
  // the keys.
  void Save(const std::string& path, uint32_t keys_crc) const;

  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (const Line* line = lines_; line != lines_ + lines_count_; ++line) {
      for (int i = 0; i < line->count; ++i) visit(line->keys[i], line->rows[i]);
    }
  }

 private:
  // Two bits of one word. Lines are chosen by the upper half of the hash.
  static uint64_t FilterBits(uint64_t hash) {
    return uint64_t{1} << (hash & 63) | uint64_t{1} << (hash >> 6 & 63);
  }
  size_t FilterWord(uint64_t hash) const { return (hash >> 12) & (filter_.size() - 1); }

  // Puts an entry into lines [home, end), and returns the previous row of the key. False in
  // `placed`: they are full.
  static std::optional<uint32_t> PutWithin(Line* home, const Line* end, int64_t key, uint32_t row,
                                           bool* placed);

  // Why lines of a file are none that Save wrote; null where they may be.
  const char* Mistake(std::span<const uint32_t> rows_of_page) const;

  uint64_t secret_ = 0;
  int64_t lines_count_ = 0, size_ = 0;
  HugeBuffer owned_;
  std::vector<uint64_t> filter_;  // a power of two, or empty
  std::unique_ptr<MappedFile> mapped_;
  const Line* lines_ = nullptr;
};

struct ServedTableOptions {
  std::string name;
  int64_t dim = 0;
  ServedDType dtype = ServedDType::kFloat32;
  uint64_t seed = 0;
  // What a missing key reads without a shared row: its initial vector, or 0.0.
  std::optional<InitializerOptions> initial;
  DType table_dtype = DType::kFloat32;  // initial vectors are rounded to it, as in training
};

// Rows in a file: row i starts at rows + i * stride_bytes and belongs to keys[i].
struct ServedRows {
  std::shared_ptr<const void> owner;  // keeps both arrays alive
  const int64_t* keys = nullptr;
  const std::byte* rows = nullptr;
  int64_t n = 0;
  int64_t stride_bytes = 0;
};

class ServedTable {
 public:
  // A base. `index_path` is a file that ServedIndex::Save wrote for exactly these keys ("": builds
  // the index). Throws InvalidArgument for a duplicate key.
  ServedTable(const ServedTableOptions& options, std::vector<ServedRows> parts,
              const std::string& index_path, uint32_t keys_crc);

  // The state after an increment: removes `removed`, then sets the rows of `parts`.
  std::shared_ptr<const ServedTable> With(std::span<const int64_t> removed,
                                          std::vector<ServedRows> parts) const;

  // The same state with these shared rows: a missing key reads the one that Owner(key, rows, by)
  // names, if it is among `numbers`. values (numbers, dim) are float32. Throws InvalidArgument when
  // a number is not below `rows`.
  std::shared_ptr<const ServedTable> WithShared(int64_t rows, Ownership by,
                                                std::span<const int64_t> numbers,
                                                const float* values) const;

  const ServedTableOptions& options() const { return options_; }
  int64_t size() const { return size_; }
  const ServedIndex& base() const { return *base_; }
  // Bytes of this process only; mapped files are shared.
  size_t private_bytes() const;

  // out row i (float32) = vector of keys[i]; found[i] (may be null) = whether it has a row.
  void Read(std::span<const int64_t> keys, float* out, int64_t out_stride, uint8_t* found) const;

  // out row b = the sum (or mean) of the vectors of keys [offsets[b], offsets[b + 1]), each times
  // its weight (null: 1), added in order as in training. Throws InvalidArgument unless offsets rise
  // from 0 to the number of keys.
  void ReadBags(std::span<const int64_t> keys, std::span<const int64_t> offsets,
                const float* weights, bool mean, float* out, int64_t out_stride) const;

 private:
  static constexpr int kPageBits = ServedIndex::kPageBits;

  ServedTable(const ServedTable&) = default;
  uint32_t AddPages(const ServedRows& part);
  const std::byte* RowAt(uint32_t row) const {
    const Page& page = pages_[ServedIndex::PageOf(row)];
    return page.rows + ServedIndex::PlaceOf(row) * page.stride_bytes;
  }
  void ReadRange(const int64_t* keys, int64_t n, float* out, int64_t out_stride,
                 uint8_t* found) const;
  void Decode(const std::byte* row, float* out) const;
  void ReadMissing(int64_t key, float* out) const;

  struct Page {
    const std::byte* rows;
    int64_t stride_bytes;
  };
  struct SharedVectors {
    int64_t rows;
    Ownership by;
    std::vector<const float*> vectors;  // by number; null: unused in training
    std::vector<float> values;
  };
  ServedTableOptions options_;
  std::optional<Initializer> initializer_;
  std::shared_ptr<const ServedIndex> base_, overlay_;  // overlay_ null: nothing changed yet
  std::vector<Page> pages_;
  std::vector<std::shared_ptr<const void>> owners_;
  std::shared_ptr<const SharedVectors> shared_;  // null: there are none
  int64_t size_ = 0;
};

}  // namespace embstore
