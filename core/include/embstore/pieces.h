// Rows that lie in several arrays: a weight here, its optimizer states there.
//
//     row s  =  piece 0 at base_0 + s * stride_0  |  piece 1 at base_1 + s * stride_1  |  ...
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace embstore {

struct Piece {
  std::byte* base = nullptr;
  int64_t stride_bytes = 0;
  int64_t bytes = 0;
};

// rows (n, sum of bytes): row i is the concatenation of the pieces of slots[i], and back.
// Slots of a scatter differ. Uses the engine's threads.
void GatherPieces(std::span<const Piece> pieces, std::span<const int64_t> slots, std::byte* rows);
void ScatterPieces(std::span<const Piece> pieces, std::span<const int64_t> slots,
                   const std::byte* rows);

}  // namespace embstore
