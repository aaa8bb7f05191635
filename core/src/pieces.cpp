#include "embstore/pieces.h"

#include <algorithm>
#include <cstring>

#include "embstore/parallel.h"

namespace embstore {
namespace {

constexpr int64_t kRowsPerTask = 1024, kAhead = 8;

// Calls move(address of the piece, its place in `rows`, bytes) for every piece of every row.
template <typename Byte, typename Move>
void ForPieces(std::span<const Piece> pieces, std::span<const int64_t> slots, Byte* rows,
               bool writes, const Move& move) {
  int64_t row_bytes = 0;
  for (const Piece& piece : pieces) row_bytes += piece.bytes;
  const auto n = static_cast<int64_t>(slots.size());
  ParallelFor((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kRowsPerTask, n);
    int64_t at = 0;
    for (const Piece& piece : pieces) {
      for (int64_t i = task * kRowsPerTask; i < end; ++i) {
        if (i + kAhead < end) {
          const std::byte* next =
              piece.base + slots[static_cast<size_t>(i + kAhead)] * piece.stride_bytes;
          for (int64_t byte = 0; byte < piece.bytes; byte += 64) {
            writes ? __builtin_prefetch(next + byte, 1) : __builtin_prefetch(next + byte);
          }
        }
        move(piece.base + slots[static_cast<size_t>(i)] * piece.stride_bytes,
             rows + i * row_bytes + at, static_cast<size_t>(piece.bytes));
      }
      at += piece.bytes;
    }
  });
}

}  // namespace

void GatherPieces(std::span<const Piece> pieces, std::span<const int64_t> slots, std::byte* rows) {
  ForPieces(pieces, slots, rows, false,
            [](const std::byte* piece, std::byte* row, size_t n) { std::memcpy(row, piece, n); });
}

void ScatterPieces(std::span<const Piece> pieces, std::span<const int64_t> slots,
                   const std::byte* rows) {
  ForPieces(pieces, slots, rows, true,
            [](std::byte* piece, const std::byte* row, size_t n) { std::memcpy(piece, row, n); });
}

}  // namespace embstore
