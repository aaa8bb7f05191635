#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace embstore {
namespace {

constexpr std::array<uint32_t, 256> MakeTable() {
  constexpr uint32_t kReversedPolynomial = 0x82F63B78u;
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kReversedPolynomial : 0);
    table[i] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

uint32_t Portable(const unsigned char* data, size_t bytes, uint32_t crc) {
  for (size_t i = 0; i < bytes; ++i) crc = kTable[(crc ^ data[i]) & 0xff] ^ (crc >> 8);
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t Hardware(const unsigned char* data, size_t bytes,
                                                    uint32_t crc) {
  uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  return Portable(data, bytes, static_cast<uint32_t>(wide));
}
#endif

}  // namespace

uint32_t Crc32c(const void* data, size_t bytes, uint32_t crc) {
  const auto* from = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~Hardware(from, bytes, ~crc);
#endif
  return ~Portable(from, bytes, ~crc);
}

}  // namespace embstore
