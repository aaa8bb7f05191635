// Rows as Redis commands and replies (RESP 2), without an object for each value.
//
//     MGET  head id tail ...            *n $12 ............ $-1 ...
//     MSET  head id tail value ...      +OK
//
// An id has one value for each tail; value k of row i is the concatenation of its pieces, piece p
// at base_p + i * stride_p. The caller handles connections, passwords and network errors.
//
// Thread safety: none; each connection has its own codec.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "embstore/pieces.h"

namespace embstore {

class RedisRows {
 public:
  // `found` may be null when nothing is read. What is passed by address must outlive this object.
  RedisRows(std::string head, std::vector<std::string> tails,
            std::vector<std::vector<Piece>> values, std::span<const int64_t> ids, uint8_t* found);

  // Begin starts the text that the caller sends next; the others append a command for ids
  // [first, last) to it. From then on a reply to each command is expected.
  void BeginText() { text_.clear(); }
  void Mget(int64_t first, int64_t last);
  void Mset(int64_t first, int64_t last);
  std::string_view text() const { return text_; }
  int64_t waiting() const { return static_cast<int64_t>(expected_.size()); }

  // Takes complete values from the front of the received bytes and returns how many bytes it took;
  // the caller passes the rest again with what follows it. Stops at an error reply and keeps its
  // text. Throws InvalidState when a value does not have the length of a row, and for a reply that
  // does not fit the commands.
  size_t Receive(std::string_view bytes);
  const std::string& error() const { return error_; }
  // Receive never needs more bytes than this to make progress.
  size_t most_value_bytes() const;

 private:
  struct Expected {
    int64_t first, last;
    bool is_rows;
  };
  std::string Name(int64_t row, size_t value) const;
  void AppendName(int64_t row, size_t value);
  bool TakeHeader(std::string_view& bytes, const Expected& expected);
  bool TakeValue(std::string_view& bytes);

  std::string head_;
  std::vector<std::string> tails_;
  std::vector<std::vector<Piece>> values_;
  std::vector<int64_t> value_bytes_;
  std::span<const int64_t> ids_;
  uint8_t* found_;
  std::string text_, error_;
  std::deque<Expected> expected_;
  bool in_reply_ = false;  // its header was taken
  int64_t row_ = 0;        // the next value
  size_t value_ = 0;
};

}  // namespace embstore
