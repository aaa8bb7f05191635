#include "embstore/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace embstore {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // bits reversed: the highest power is bit 0

using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

constexpr size_t kLeastFolded = 64;  // bytes

// Without the inversion before and after, as are the others here. Eight bytes at a time.
uint32_t Plain(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(__x86_64__)
// x times the powers of x in `by`: moves it that much further on in the message.
__attribute__((target("pclmul,sse4.1"))) inline __m128i Fold(__m128i x, __m128i by, __m128i next) {
  return _mm_xor_si128(
      next, _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)));
}

// The remainder of 16 bytes, with two more folds and Barrett's reduction.
__attribute__((target("pclmul,sse4.1"))) inline uint32_t Remainder(__m128i sum) {
  const __m128i by8 = _mm_set_epi64x(0x00ccaa009e, 0x0163cd6124);      // x^96, x^64 mod P
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);  // x^64 / P, P
  const __m128i low = _mm_set_epi32(0, ~0, 0, ~0);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by8, 0x10));
  sum = _mm_xor_si128(_mm_srli_si128(sum, 4),
                      _mm_clmulepi64_si128(_mm_and_si128(sum, low), by8, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, low), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1));
}

// Four lanes of 16 bytes are folded over the message with carry-less products (Gopal et al., Intel,
// 2009); the 16 bytes that remain have the remainder of the whole.
__attribute__((target("pclmul,sse4.1"))) inline uint32_t FoldLanes(__m128i lanes[4],
                                                                   const uint8_t* data,
                                                                   size_t bytes) {
  const __m128i by16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);  // x^96, x^160 mod P
  __m128i sum = lanes[0];
  for (size_t i = 1; i < 4; ++i) sum = Fold(sum, by16, lanes[i]);
  for (; bytes >= 16; data += 16, bytes -= 16) {
    sum = Fold(sum, by16, _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
  }
  return Plain(Remainder(sum), data, bytes);
}

__attribute__((target("pclmul,sse4.1"))) uint32_t Folded(uint32_t crc, const uint8_t* data,
                                                         size_t bytes) {
  const __m128i by64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);  // x^480, x^544 mod P
  const auto load = [&](size_t i) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
  };
  __m128i lanes[4];
  for (size_t i = 0; i < 4; ++i) lanes[i] = load(i);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
    for (size_t i = 0; i < 4; ++i) lanes[i] = Fold(lanes[i], by64, load(i));
  }
  return FoldLanes(lanes, data, bytes);
}

// The same with the four lanes in one register.
__attribute__((target("pclmul,sse4.1,avx512f,vpclmulqdq"))) uint32_t FoldedWide(uint32_t crc,
                                                                                const uint8_t* data,
                                                                                size_t bytes) {
  const __m512i by64 = _mm512_set4_epi64(0x01c6e41596, 0x0154442bd4, 0x01c6e41596, 0x0154442bd4);
  __m512i sum = _mm512_xor_si512(_mm512_loadu_si512(data),
                                 _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
    // a ^ b ^ c
    sum = _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, by64, 0x00),
                                    _mm512_clmulepi64_epi128(sum, by64, 0x11),
                                    _mm512_loadu_si512(data), 0x96);
  }
  __m128i lanes[4];
  _mm512_storeu_si512(lanes, sum);
  return FoldLanes(lanes, data, bytes);
}
#endif

template <uint32_t (*kSum)(uint32_t, const uint8_t*, size_t)>
uint32_t Inverted(uint32_t crc, const void* data, size_t bytes) {
  const auto* const from = static_cast<const uint8_t*>(data);
  return ~(bytes < kLeastFolded ? Plain : kSum)(~crc, from, bytes);
}

// a * b mod P.
uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ (b & 1 ? kPolynomial : 0);
  }
  return product;
}

}  // namespace

std::vector<Crc32Function> AvailableCrc32() {
  std::vector<Crc32Function> available;
#if defined(__x86_64__)
  const bool can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (can_fold && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
    available.push_back(Inverted<FoldedWide>);
  }
  if (can_fold) available.push_back(Inverted<Folded>);
#endif
  available.push_back(Inverted<Plain>);
  return available;
}

// Chosen when the library is loaded, for the reason that ForkGuard::kRegistered has.
static const Crc32Function kFastest = AvailableCrc32().front();

uint32_t Crc32(uint32_t crc, const void* data, size_t bytes) { return kFastest(crc, data, bytes); }

uint32_t Crc32Combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_of_b) {
  uint32_t power = uint32_t{1} << 23;  // x^8: one byte
  uint32_t shift = uint32_t{1} << 31;  // x^0
  for (; bytes_of_b != 0; bytes_of_b >>= 1) {
    if (bytes_of_b & 1) shift = Multiply(shift, power);
    power = Multiply(power, power);
  }
  return Multiply(shift, crc_a) ^ crc_b;
}

}  // namespace embstore
