// CRC-32C (Castagnoli) of rows and files: one instruction for 8 bytes where the processor has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace embstore {

uint32_t Crc32c(const void* data, size_t bytes, uint32_t crc = 0);

}  // namespace embstore
