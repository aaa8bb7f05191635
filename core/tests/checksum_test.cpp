#include "embstore/checksum.h"

#include <cstdint>
#include <vector>

#include "check.h"

namespace embstore {
namespace {

// A bit at a time, as the polynomial says.
uint32_t Slowly(const std::vector<uint8_t>& bytes, size_t begin, size_t end) {
  uint32_t crc = ~0u;
  for (size_t i = begin; i < end; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

std::vector<uint8_t> Bytes(size_t n) {
  std::vector<uint8_t> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(i * i * 31 + i / 7);
  return bytes;
}

TEST(A checksum is that of zlib for every length and start) {
  const std::vector<uint8_t> bytes = Bytes(1023);
  for (const Crc32Function crc32 : AvailableCrc32()) {
    CHECK_EQ(crc32(0, "123456789", 9), 0xcbf43926u);
    for (size_t begin : {0, 1, 7, 64}) {
      for (size_t end = begin; end <= bytes.size(); end += end < 300 ? 1 : 97) {
        CHECK_EQ(crc32(0, bytes.data() + begin, end - begin), Slowly(bytes, begin, end));
      }
    }
  }
}

TEST(Checksums of parts go on and combine to that of the whole) {
  const std::vector<uint8_t> bytes = Bytes(70'000);
  const uint32_t whole = Slowly(bytes, 0, bytes.size());
  for (const Crc32Function crc32 : AvailableCrc32()) {
    for (size_t cut : {0, 1, 15, 16, 63, 64, 65, 1023, 65'535, 70'000}) {
      const uint32_t first = crc32(0, bytes.data(), cut);
      const uint32_t second = crc32(0, bytes.data() + cut, bytes.size() - cut);
      CHECK_EQ(crc32(first, bytes.data() + cut, bytes.size() - cut), whole);
      CHECK_EQ(Crc32Combine(first, second, bytes.size() - cut), whole);
    }
  }
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
