#include "embstore/served_table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "embstore/kernels.h"
#include "embstore/parallel.h"

namespace embstore {
namespace {

constexpr int64_t kBlock = 16;          // keys between two steps of a lookup
constexpr int64_t kAhead = 12;          // keys between two steps of an insertion
constexpr int64_t kFetchedBytes = 512;  // of a row; the hardware prefetches the rest
constexpr int64_t kKeysPerTask = 4096;
constexpr int64_t kRowsPerTask = 1 << 14;

struct Int8Head {
  float minimum, scale;
};

void EncodeInt8(const float* values, int64_t dim, int64_t row, std::byte* out) {
  const auto [low, high] = std::minmax_element(values, values + dim);
  const bool finite = std::all_of(values, values + dim, [](float v) { return std::isfinite(v); });
  if (!finite) {
    throw InvalidArgument("values should be finite to become int8 but row " + std::to_string(row) +
                          " is not");
  }
  // In double: the difference of two floats may overflow a float.
  const double scale = (static_cast<double>(*high) - *low) / 255.0;
  const Int8Head head{*low, static_cast<float>(scale)};
  std::memcpy(out, &head, sizeof(head));
  auto* codes = reinterpret_cast<uint8_t*>(out + sizeof(head));
  for (int64_t i = 0; i < dim; ++i) {
    const double code =
        head.scale > 0 ? std::nearbyint((static_cast<double>(values[i]) - *low) / head.scale) : 0.0;
    codes[i] = static_cast<uint8_t>(std::clamp(code, 0.0, 255.0));
  }
}

DType FloatType(ServedDType dtype) { return static_cast<DType>(dtype); }

}  // namespace

int64_t ServedRowBytes(int64_t dim, ServedDType dtype) {
  if (dtype == ServedDType::kInt8) return static_cast<int64_t>(sizeof(Int8Head)) + dim;
  return dim * static_cast<int64_t>(SizeOf(FloatType(dtype)));
}

void EncodeServedRows(const float* values, int64_t n, int64_t dim, ServedDType dtype,
                      std::byte* out) {
  const int64_t bytes = ServedRowBytes(dim, dtype);
  ParallelFor((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kRowsPerTask, n);
    for (int64_t i = task * kRowsPerTask; i < end; ++i) {
      if (dtype == ServedDType::kInt8) {
        EncodeInt8(values + i * dim, dim, i, out + i * bytes);
      } else {
        ActiveKernels().store_vector(values + i * dim, dim, FloatType(dtype), out + i * bytes);
      }
    }
  });
}

ServedTable::ServedTable(const ServedTableOptions& options, std::vector<ServedRows> parts,
                         const std::string& index_path, uint32_t keys_crc)
    : options_(options) {
  if (options.initial) initializer_.emplace(*options.initial, options.seed, options.name);
  for (const ServedRows& part : parts) size_ += part.n;
  std::vector<uint32_t> first;
  for (const ServedRows& part : parts) first.push_back(AddPages(part));
  if (!index_path.empty()) {
    std::vector<uint32_t> rows_of_page;
    for (const ServedRows& part : parts) {
      for (int64_t at = 0; at < part.n; at += int64_t{1} << kPageBits) {
        rows_of_page.push_back(
            static_cast<uint32_t>(std::min(part.n - at, int64_t{1} << kPageBits)));
      }
    }
    base_ = std::make_shared<ServedIndex>(index_path, size_, keys_crc, rows_of_page);
    return;
  }
  // Not the seed of the table: who wrote the dump knows it, and could choose keys that collide.
  std::random_device device;
  const uint64_t secret = static_cast<uint64_t>(device()) << 32 | device();
  auto index = std::make_shared<ServedIndex>(size_, secret);
  std::vector<ServedIndex::NumberedKeys> numbered;
  for (size_t p = 0; p < parts.size(); ++p) {
    numbered.push_back({parts[p].keys, parts[p].n, first[p]});
  }
  if (const std::optional<int64_t> twice = index->PutAll(numbered)) {
    throw InvalidArgument("keys of table '" + options.name + "' should be distinct but " +
                          std::to_string(*twice) + " comes twice");
  }
  base_ = std::move(index);
}

uint32_t ServedTable::AddPages(const ServedRows& part) {
  const int64_t row_bytes = ServedRowBytes(options_.dim, options_.dtype);
  if (part.n > 0 && part.stride_bytes < row_bytes) {
    throw InvalidArgument("stride_bytes should be at least " + std::to_string(row_bytes) +
                          " but is: " + std::to_string(part.stride_bytes));
  }
  constexpr int64_t kRows = int64_t{1} << kPageBits;
  const size_t first = pages_.size();
  if (static_cast<int64_t>(first) * kRows + part.n >= int64_t{ServedIndex::kRemoved}) {
    throw InvalidArgument("table '" + options_.name + "' has more rows than a reader can number");
  }
  for (int64_t at = 0; at < part.n; at += kRows) {
    pages_.push_back({part.rows + at * part.stride_bytes, part.stride_bytes});
  }
  owners_.push_back(part.owner);
  return static_cast<uint32_t>(first << kPageBits);
}

std::shared_ptr<const ServedTable> ServedTable::With(std::span<const int64_t> removed,
                                                     std::vector<ServedRows> parts) const {
  std::shared_ptr<ServedTable> next(new ServedTable(*this));
  int64_t coming = static_cast<int64_t>(removed.size());
  for (const ServedRows& part : parts) coming += part.n;
  if (coming == 0) return next;
  const int64_t known = overlay_ ? overlay_->size() : 0;
  auto overlay = overlay_
                     ? std::make_shared<ServedIndex>(*overlay_, known + coming)
                     : std::make_shared<ServedIndex>(coming, base_->secret(), /*filtered=*/true);
  const auto put = [&](int64_t key, uint32_t row) {
    const std::optional<uint32_t> before = overlay->Put(key, row);
    const bool was_there = before ? *before != ServedIndex::kRemoved : base_->Find(key) != nullptr;
    next->size_ += (row != ServedIndex::kRemoved) - was_there;
  };
  for (const int64_t key : removed) put(key, ServedIndex::kRemoved);
  for (const ServedRows& part : parts) {
    const uint32_t first = next->AddPages(part);
    for (int64_t i = 0; i < part.n; ++i) {
      if (i + kAhead < part.n) {
        __builtin_prefetch(overlay->HomeOf(part.keys[i + kAhead]), 1);
        __builtin_prefetch(base_->HomeOf(part.keys[i + kAhead]));
      }
      put(part.keys[i], first + static_cast<uint32_t>(i));
    }
  }
  next->overlay_ = std::move(overlay);
  return next;
}

std::shared_ptr<const ServedTable> ServedTable::WithShared(int64_t rows, Ownership by,
                                                           std::span<const int64_t> numbers,
                                                           const float* values) const {
  std::shared_ptr<ServedTable> next(new ServedTable(*this));
  auto shared = std::make_shared<SharedVectors>();
  shared->rows = rows;
  shared->by = by;
  shared->vectors.resize(static_cast<size_t>(rows), nullptr);
  shared->values.assign(values, values + std::ssize(numbers) * options_.dim);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < 0 || numbers[i] >= rows) {
      throw InvalidArgument("shared rows of table '" + options_.name + "' should be below " +
                            std::to_string(rows) + " but one is: " + std::to_string(numbers[i]));
    }
    shared->vectors[static_cast<size_t>(numbers[i])] =
        shared->values.data() + static_cast<int64_t>(i) * options_.dim;
  }
  next->shared_ = rows > 0 ? std::move(shared) : nullptr;
  return next;
}

size_t ServedTable::private_bytes() const {
  return pages_.size() * sizeof(Page) +
         (overlay_ ? overlay_->bytes() + overlay_->filter_bytes() : 0);
}

void ServedTable::Decode(const std::byte* row, float* out) const {
  const int64_t dim = options_.dim;
  switch (options_.dtype) {
    case ServedDType::kFloat32:
      std::memcpy(out, row, static_cast<size_t>(dim) * sizeof(float));
      return;
    case ServedDType::kFloat16:
    case ServedDType::kBFloat16:
      ActiveKernels().load_vector(row, dim, FloatType(options_.dtype), out);
      return;
    case ServedDType::kInt8: {
      Int8Head head;
      std::memcpy(&head, row, sizeof(head));
      const auto* codes = reinterpret_cast<const uint8_t*>(row + sizeof(head));
      for (int64_t i = 0; i < dim; ++i) {
        out[i] = head.minimum + head.scale * static_cast<float>(codes[i]);
      }
    }
  }
}

void ServedTable::ReadMissing(int64_t key, float* out) const {
  const int64_t dim = options_.dim;
  if (shared_) {
    const uint32_t number = Owner(key, static_cast<uint32_t>(shared_->rows), shared_->by);
    if (const float* vector = shared_->vectors[number]) {
      std::copy_n(vector, dim, out);
      return;
    }
  }
  if (!initializer_) {
    std::fill_n(out, dim, 0.0f);
    return;
  }
  initializer_->FillRounded(key, options_.table_dtype, {out, static_cast<size_t>(dim)});
}

// A pipeline of four steps, a block of keys apart, so that memory loads overlap: prefetch the home
// lines of the index; find the rows and prefetch them; find those whose key is on a later line;
// copy them.
void ServedTable::ReadRange(const int64_t* keys, int64_t n, float* out, int64_t out_stride,
                            uint8_t* found) const {
  struct Block {
    const ServedIndex::Line *home[kBlock], *above[kBlock], *next[kBlock];
    const std::byte* rows[kBlock];
  } ring[4];
  const ServedIndex *base = base_.get(), *overlay = overlay_.get();
  const int64_t row_bytes = ServedRowBytes(options_.dim, options_.dtype);
  const int64_t fetched_bytes = std::min(row_bytes, kFetchedBytes);
  const bool plain = options_.dtype == ServedDType::kFloat32;
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  const auto end = [&](int64_t block) { return std::min(kBlock, n - block * kBlock); };
  const auto row_of = [&](const uint32_t* row) {
    return row && *row != ServedIndex::kRemoved ? RowAt(*row) : nullptr;
  };
  for (int64_t step = 0; step < blocks + 3; ++step) {
    if (step < blocks) {
      Block& at = ring[step % 4];
      const int64_t* wanted = keys + step * kBlock;
      for (int64_t i = 0, m = end(step); i < m; ++i) {
        const uint64_t hash = base->Hash(wanted[i]);
        __builtin_prefetch(at.home[i] = base->LineOf(hash));
        at.above[i] = overlay && overlay->MayHave(hash) ? overlay->LineOf(hash) : nullptr;
        if (at.above[i]) __builtin_prefetch(at.above[i]);
      }
    }
    if (const int64_t block = step - 1; block >= 0 && block < blocks) {
      Block& at = ring[block % 4];
      const int64_t* wanted = keys + block * kBlock;
      for (int64_t i = 0, m = end(block); i < m; ++i) {
        ServedIndex::Hint hint{nullptr, nullptr};
        if (at.above[i]) hint.row = overlay->Find(wanted[i], at.above[i]);
        if (!hint.row) hint = base->FindAt(wanted[i], at.home[i]);
        at.rows[i] = row_of(hint.row);
        __builtin_prefetch(at.next[i] = hint.next);
      }
      // Close together, so that the addresses of several rows are translated at a time.
      for (int64_t i = 0, m = end(block); i < m; ++i) __builtin_prefetch(at.rows[i]);
      for (int64_t i = 0, m = end(block); i < m; ++i) {
        for (int64_t b = 64; b < fetched_bytes; b += 64) __builtin_prefetch(at.rows[i] + b);
      }
    }
    if (const int64_t block = step - 2; block >= 0 && block < blocks) {
      Block& at = ring[block % 4];
      for (int64_t i = 0, m = end(block); i < m; ++i) {
        if (!at.next[i]) continue;
        at.rows[i] = row_of(base->Find(keys[block * kBlock + i], at.next[i]));
        __builtin_prefetch(at.rows[i]);
      }
    }
    if (const int64_t block = step - 3; block >= 0) {
      const Block& at = ring[block % 4];
      for (int64_t i = 0, m = end(block); i < m; ++i) {
        const std::byte* row = at.rows[i];
        float* vector = out + (block * kBlock + i) * out_stride;
        if (!row) {
          ReadMissing(keys[block * kBlock + i], vector);
        } else if (plain) {
          std::memcpy(vector, row, static_cast<size_t>(row_bytes));
        } else {
          Decode(row, vector);
        }
        if (found) found[block * kBlock + i] = row != nullptr;
      }
    }
  }
}

void ServedTable::Read(std::span<const int64_t> keys, float* out, int64_t out_stride,
                       uint8_t* found) const {
  const auto n = static_cast<int64_t>(keys.size());
  ParallelFor((n + kKeysPerTask - 1) / kKeysPerTask, [&](int64_t task) {
    const int64_t begin = task * kKeysPerTask;
    ReadRange(keys.data() + begin, std::min(kKeysPerTask, n - begin), out + begin * out_stride,
              out_stride, found ? found + begin : nullptr);
  });
}

void ServedTable::ReadBags(std::span<const int64_t> keys, std::span<const int64_t> offsets,
                           const float* weights, bool mean, float* out, int64_t out_stride) const {
  const auto n = static_cast<int64_t>(keys.size());
  if (offsets.empty() || offsets.front() != 0 || offsets.back() != n ||
      !std::is_sorted(offsets.begin(), offsets.end())) {
    throw InvalidArgument("offsets should rise from 0 to the number of keys, " + std::to_string(n));
  }
  const int64_t dim = options_.dim;
  const RecycledBuffer vectors(static_cast<size_t>(n * dim) * sizeof(float));
  Read(keys, vectors.as<float>(), dim, nullptr);
  std::vector<Row> numbers(keys.size());
  std::iota(numbers.begin(), numbers.end(), Row{0});
  const RowsView rows{vectors.as<std::byte>(), dim * 4, dim, DType::kFloat32, dim * 4};
  VectorsView bags;
  bags.base = out;
  bags.stride = out_stride;
  ActiveKernels().pool(rows, numbers.data(), nullptr, offsets.data(), weights, mean, 0,
                       static_cast<int64_t>(offsets.size()) - 1, bags);
}

}  // namespace embstore
