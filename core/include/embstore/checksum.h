// CRC-32 of files: the one of zlib, gzip and PNG, so that any tool can check a dump.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embstore {

// The checksum of what `crc` stands for followed by these bytes; crc == 0 stands for nothing.
uint32_t Crc32(uint32_t crc, const void* data, size_t bytes);

// The checksum of a || b from those of a and b. Parts of a file may thus be summed apart.
uint32_t Crc32Combine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_of_b);

}  // namespace embstore
