// Rows that are spread over several arrays: a weight in one, its optimizer states in others. A
// Piece is the part of each row that one array holds.
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

// Gather: rows (n, sum of bytes), row i is the concatenation of the pieces of slots[i]. Scatter is
// the inverse; its slots must differ. Both use the engine's threads.
//
// Thread safety: concurrent calls must write different rows.
void GatherPieces(std::span<const Piece> pieces, std::span<const int64_t> slots, std::byte* rows);
void ScatterPieces(std::span<const Piece> pieces, std::span<const int64_t> slots,
                   const std::byte* rows);

}  // namespace embstore
