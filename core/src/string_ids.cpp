#include "embstore/string_ids.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "embstore/parallel.h"
#include "embstore/types.h"
#include "xxh64.h"

namespace embstore {
namespace {

constexpr int64_t kPerTask = 16384;
constexpr int64_t kNone = INT64_MAX;

// Calls each(i) -> bool for all strings; throws with the number of the first that gave false.
template <class Prepare>
void ForAll(int64_t n, const char* what, Prepare&& prepare) {
  std::atomic<int64_t> bad{kNone};
  ParallelFor((n + kPerTask - 1) / kPerTask, [&](int64_t task) {
    auto each = prepare();
    const int64_t end = std::min((task + 1) * kPerTask, n);
    for (int64_t i = task * kPerTask; i < end; ++i) {
      if (each(i)) continue;
      int64_t first = bad.load();
      while (i < first && !bad.compare_exchange_weak(first, i)) {
      }
      return;
    }
  });
  if (bad != kNone) throw InvalidArgument("string " + std::to_string(bad.load()) + " " + what);
}

template <class Offset>
void OfSlices(std::span<const uint8_t> data, std::span<const Offset> offsets, uint64_t seed,
              std::span<int64_t> ids) {
  const auto bytes = static_cast<int64_t>(data.size());
  ForAll(static_cast<int64_t>(ids.size()), "leaves the data of its column", [&] {
    return [&](int64_t i) {
      const int64_t begin = offsets[i], end = offsets[i + 1];
      if (begin < 0 || begin > end || end > bytes) return false;
      ids[i] =
          static_cast<int64_t>(Xxh64(data.data() + begin, static_cast<size_t>(end - begin), seed));
      return true;
    };
  });
}

// Bytes written, or -1.
int64_t WriteUtf8(const uint32_t* points, size_t count, uint8_t* out) {
  uint8_t* at = out;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t c = points[i];
    const auto tail = [c](int shift) { return static_cast<uint8_t>(0x80 | ((c >> shift) & 0x3F)); };
    if (c < 0x80) {
      *at++ = static_cast<uint8_t>(c);
    } else if (c < 0x800) {
      *at++ = static_cast<uint8_t>(0xC0 | (c >> 6));
      *at++ = tail(0);
    } else if (c < 0x10000) {
      if (c >= 0xD800 && c < 0xE000) return -1;  // one half of a pair of UTF-16
      *at++ = static_cast<uint8_t>(0xE0 | (c >> 12));
      *at++ = tail(6);
      *at++ = tail(0);
    } else if (c < 0x110000) {
      *at++ = static_cast<uint8_t>(0xF0 | (c >> 18));
      *at++ = tail(12);
      *at++ = tail(6);
      *at++ = tail(0);
    } else {
      return -1;
    }
  }
  return at - out;
}

}  // namespace

int64_t IdOf(std::string_view text, uint64_t seed) {
  return static_cast<int64_t>(Xxh64(text.data(), text.size(), seed));
}

void IdsOfSlices(std::span<const uint8_t> data, std::span<const int32_t> offsets, uint64_t seed,
                 std::span<int64_t> ids) {
  OfSlices(data, offsets, seed, ids);
}

void IdsOfSlices(std::span<const uint8_t> data, std::span<const int64_t> offsets, uint64_t seed,
                 std::span<int64_t> ids) {
  OfSlices(data, offsets, seed, ids);
}

void IdsOfFixedBytes(std::span<const uint8_t> data, size_t width, bool padded, uint64_t seed,
                     std::span<int64_t> ids) {
  ForAll(static_cast<int64_t>(ids.size()), "", [&] {
    return [&](int64_t i) {
      const uint8_t* text = data.data() + static_cast<size_t>(i) * width;
      size_t size = width;
      while (padded && size > 0 && text[size - 1] == 0) --size;
      ids[i] = static_cast<int64_t>(Xxh64(text, size, seed));
      return true;
    };
  });
}

void IdsOfFixedUnicode(std::span<const uint32_t> data, size_t width, uint64_t seed,
                       std::span<int64_t> ids) {
  ForAll(static_cast<int64_t>(ids.size()), "has a code point that UTF-8 does not have", [&] {
    return [&, text = std::vector<uint8_t>(4 * width)](int64_t i) mutable {
      const uint32_t* points = data.data() + static_cast<size_t>(i) * width;
      size_t count = width;
      while (count > 0 && points[count - 1] == 0) --count;
      const int64_t size = WriteUtf8(points, count, text.data());
      if (size < 0) return false;
      ids[i] = static_cast<int64_t>(Xxh64(text.data(), static_cast<size_t>(size), seed));
      return true;
    };
  });
}

}  // namespace embstore
