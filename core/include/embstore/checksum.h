// CRC-32 as in zlib, gzip and PNG, so that any tool can check a dump.
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace embstore {

// Continues the checksum `crc` over these bytes. crc == 0 starts a new one.
uint32_t Crc32(uint32_t crc, const void* data, size_t bytes);

// All implementations that this machine can run, the fastest first; Crc32 is that one.
using Crc32Function = uint32_t (*)(uint32_t crc, const void* data, size_t bytes);
std::vector<Crc32Function> AvailableCrc32();

// The checksum of a || b from those of a and b, so that parts of a file can be summed in parallel.
uint32_t Crc32Combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_of_b);

}  // namespace embstore
