#include "embstore/redis_protocol.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "embstore/types.h"

namespace {

using embstore::InvalidState;
using embstore::Piece;
using embstore::RedisRows;

const std::vector<int64_t> kIds = {7, -1, INT64_MIN};
constexpr char kUntouched = '.';

// Three rows of 6 bytes: one value of two pieces ("packed"), or two values of 4 and 2 bytes.
struct Rows {
  explicit Rows(bool packed)
      : codec("h_", packed ? std::vector<std::string>{"_c"} : std::vector<std::string>{"_a", "_b"},
              Values(packed), kIds, found.data()) {}

  std::vector<std::vector<Piece>> Values(bool packed) {
    const Piece first = {reinterpret_cast<std::byte*>(fours.data()), 4, 4};
    const Piece second = {reinterpret_cast<std::byte*>(twos.data()), 2, 2};
    if (packed) return {{first, second}};
    return {{first}, {second}};
  }

  std::string fours = std::string(12, kUntouched), twos = std::string(6, kUntouched);
  std::vector<uint8_t> found = {9, 9, 9};
  RedisRows codec;
};

const std::string kPackedAnswer = "*3\r\n$6\r\nabcd\r\n\r\n$-1\r\n$6\r\n$-1\r\nX\r\n";
const std::string kTwoKeysAnswer =
    "*6\r\n$4\r\nabcd\r\n$2\r\n\r\n\r\n$-1\r\n$2\r\nno\r\n$4\r\n$-1\r\r\n$2\r\n\nX\r\n";

std::string Answer(bool packed) { return packed ? kPackedAnswer : kTwoKeysAnswer; }

// Bytes that look like ends of lines and lengths are part of the values.
void CheckAnswerWasTaken(const Rows& rows, bool packed) {
  CHECK_EQ(rows.codec.waiting(), 0);
  CHECK_EQ(rows.codec.error(), "");
  CHECK(rows.found == std::vector<uint8_t>({1, 0, 1}));
  CHECK_EQ(rows.fours, "abcd....$-1\r");
  CHECK_EQ(rows.twos, packed ? "\r\n..\nX" : "\r\nno\nX");
}

TEST(Commands are written as Redis reads them) {
  Rows rows(true);
  rows.fours = "abcdefghijkl";
  rows.twos = "012345";
  rows.codec.Mget(0, 3);
  CHECK_EQ(
      rows.codec.text(),
      "*4\r\n$4\r\nMGET\r\n$5\r\nh_7_c\r\n$6\r\nh_-1_c\r\n$24\r\nh_-9223372036854775808_c\r\n");
  rows.codec.BeginText();
  rows.codec.Mset(1, 2);
  CHECK_EQ(rows.codec.text(), "*3\r\n$4\r\nMSET\r\n$6\r\nh_-1_c\r\n$6\r\nefgh23\r\n");
  CHECK_EQ(rows.codec.waiting(), 2);

  Rows two(false);
  two.fours = "abcdefghijkl";
  two.twos = "012345";
  two.codec.Mset(1, 2);
  two.codec.Mget(0, 1);
  CHECK_EQ(two.codec.text(),
           "*5\r\n$4\r\nMSET\r\n$6\r\nh_-1_a\r\n$4\r\nefgh\r\n$6\r\nh_-1_b\r\n$2\r\n23\r\n"
           "*3\r\n$4\r\nMGET\r\n$5\r\nh_7_a\r\n$5\r\nh_7_b\r\n");
}

TEST(A reply may be split at any byte) {
  for (const bool packed : {true, false}) {
    const std::string answer = Answer(packed);
    for (size_t cut = 0; cut <= answer.size(); ++cut) {
      Rows rows(packed);
      rows.codec.Mget(0, 3);
      const size_t used = rows.codec.Receive(std::string_view(answer).substr(0, cut));
      CHECK(used <= cut);
      if (cut < answer.size()) CHECK_EQ(rows.codec.waiting(), 1);
      CHECK_EQ(used + rows.codec.Receive(std::string_view(answer).substr(used)), answer.size());
      CheckAnswerWasTaken(rows, packed);
    }
  }
}

TEST(A buffer of the longest value is enough for any stream of replies) {
  for (const bool packed : {true, false}) {
    const std::string stream = Answer(packed) + "+OK\r\n" + Answer(packed) + "+OK\r\n";
    for (const size_t step : {size_t{1}, size_t{2}, size_t{3}, size_t{7}, stream.size()}) {
      Rows rows(packed);
      // What is written is what was read: the second answer has to bring it again.
      for (int twice = 0; twice < 2; ++twice) {
        rows.codec.Mget(0, 3);
        rows.codec.Mset(0, 0);
      }
      std::string buffer;
      for (size_t next = 0; next < stream.size();) {
        const size_t room = rows.codec.most_value_bytes() - buffer.size();
        CHECK(room > 0);
        if (room == 0) return;
        const size_t count = std::min({step, room, stream.size() - next});
        buffer += stream.substr(next, count);
        next += count;
        buffer.erase(0, rows.codec.Receive(buffer));
      }
      CHECK_EQ(buffer, "");
      CheckAnswerWasTaken(rows, packed);
    }
  }
}

TEST(Bytes after the last reply are left alone) {
  Rows rows(true);
  rows.codec.Mget(0, 3);
  CHECK_EQ(rows.codec.Receive(kPackedAnswer + "+OK\r\n"), kPackedAnswer.size());
  CheckAnswerWasTaken(rows, true);
  CHECK_EQ(rows.codec.Receive("+OK\r\n"), 0u);
}

TEST(An id is found when all of its values are) {
  for (const bool first : {false, true}) {
    for (const bool second : {false, true}) {
      Rows rows(false);
      rows.codec.Mget(1, 2);
      rows.codec.Receive(std::string("*2\r\n") + (first ? "$4\r\nwxyz\r\n" : "$-1\r\n") +
                         (second ? "$2\r\nuv\r\n" : "$-1\r\n"));
      CHECK(rows.found == std::vector<uint8_t>({9, first && second, 9}));
      CHECK_EQ(rows.fours, first ? "....wxyz...." : "............");
      CHECK_EQ(rows.twos, second ? "..uv.." : "......");
    }
  }
}

TEST(A reply with the wrong number of values is refused) {
  for (const char* count : {"2", "4", "0", "-1", "9223372036854775807"}) {
    Rows rows(true);
    rows.codec.Mget(0, 3);
    CHECK_THROWS(InvalidState, std::string("should hold 3 values but holds: ") + count,
                 rows.codec.Receive(std::string("*") + count + "\r\n"));
    CHECK(rows.found == std::vector<uint8_t>({9, 9, 9}));
  }
}

TEST(A value of the wrong length is refused by its name and nothing of it is written) {
  for (const char* length : {"5", "7", "0", "-2", "9223372036854775807", "-9223372036854775808"}) {
    Rows rows(true);
    rows.codec.Mget(0, 3);
    CHECK_THROWS(
        InvalidState, std::string("h_-1_c should have 6 bytes but has: ") + length,
        rows.codec.Receive(std::string("*3\r\n$6\r\nabcdef\r\n$") + length + "\r\n1234567890\r\n"));
    CHECK_EQ(rows.fours, "abcd........");
  }
}

TEST(Anything but a reply to a command is refused) {
  struct Case {
    bool is_read;
    const char* bytes;
  };
  for (const Case& c : {Case{true, "+OK\r\n"},
                        Case{true, ":3\r\n"},
                        Case{true, "$6\r\nabcdef\r\n"},
                        Case{true, "*three\r\n"},
                        Case{true, "*3 \r\n"},
                        Case{true, "*\r\n"},
                        Case{true, "*00000000000000000000000000003\r\n"},
                        Case{true, "*99999999999999999999\r\n"},
                        Case{true, "-\r\n"},
                        Case{true, "HTTP/1.1 400 Bad Request\r\n"},
                        Case{true, "*3\r\n:6\r\n"},
                        Case{true, "*3\r\n-ERR inside\r\n"},
                        Case{true, "*3\r\n*1\r\n"},
                        Case{true, "*3\r\n$6\r\nabcdefgh\r\n"},
                        Case{true, "*3\r\n$+6\r\nabcdef\r\n"},
                        Case{false, ":1\r\n"},
                        Case{false, "*1\r\n$2\r\nOK\r\n"},
                        Case{false, "$2\r\nOK\r\n"},
                        Case{false, "-\r\n"},
                        Case{false, "HTTP/1.1 400 Bad Request\r\n"}}) {
    Rows rows(true);
    if (c.is_read) {
      rows.codec.Mget(0, 3);
    } else {
      rows.codec.Mset(0, 3);
    }
    CHECK_THROWS(InvalidState, "should be rows but begins with: ", rows.codec.Receive(c.bytes));
  }
}

TEST(An error message shows printable characters only) {
  Rows rows(true);
  rows.codec.Mset(0, 3);
  CHECK_THROWS(InvalidState, "begins with: \\xff?\\x00",
               rows.codec.Receive(std::string("\xff?\0\r\n", 5)));
}

TEST(The text of an error is kept and nothing after it is taken) {
  const std::string error = "-OOM command not allowed when used memory > 'maxmemory'.\r\n";
  for (const bool is_read : {true, false}) {
    for (size_t cut = 0; cut <= error.size(); ++cut) {
      Rows rows(true);
      if (is_read) {
        rows.codec.Mget(0, 3);
      } else {
        rows.codec.Mset(0, 3);
      }
      rows.codec.Mget(0, 3);
      const std::string bytes = error + kPackedAnswer;
      const size_t used = rows.codec.Receive(std::string_view(bytes).substr(0, cut));
      if (cut < error.size()) CHECK_EQ(rows.codec.error(), "");
      CHECK_EQ(used + rows.codec.Receive(std::string_view(bytes).substr(used)), error.size());
      CHECK_EQ(rows.codec.error(), "OOM command not allowed when used memory > 'maxmemory'.");
      CHECK(rows.found == std::vector<uint8_t>({9, 9, 9}));
      CHECK_EQ(rows.fours, "............");
    }
  }
}

}  // namespace

TEST_MAIN()
