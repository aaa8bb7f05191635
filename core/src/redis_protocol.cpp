#include "embstore/redis_protocol.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "embstore/types.h"

namespace embstore {
namespace {

constexpr size_t kLongestNumber = 20;
constexpr std::string_view kEnd = "\r\n";

void AppendNumber(std::string& text, int64_t number) {
  char digits[kLongestNumber + 1];
  text.append(digits, std::to_chars(digits, digits + sizeof(digits), number).ptr);
}

void AppendLength(std::string& text, char kind, int64_t length) {
  text += kind;
  AppendNumber(text, length);
  text += kEnd;
}

// Only printable characters, so that the message is text.
[[noreturn]] void ThrowUnexpected(std::string_view bytes) {
  std::string message = "the reply should be rows but begins with: ";
  for (const char byte : bytes.substr(0, bytes.find('\r')).substr(0, 40)) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto code = static_cast<unsigned char>(byte);
    if (code >= ' ' && code <= '~') {
      message += byte;
    } else {
      message += {'\\', 'x', kDigits[code / 16], kDigits[code % 16]};
    }
  }
  throw InvalidState(message);
}

// Parses the number of a line such as "$-1" and advances `bytes` beyond it. False if the line is
// incomplete.
bool TakeLine(std::string_view& bytes, char kind, int64_t& number) {
  if (bytes.empty()) return false;
  if (bytes[0] != kind) ThrowUnexpected(bytes);
  const size_t end = bytes.substr(0, kLongestNumber + 3).find(kEnd);
  if (end == std::string_view::npos) {
    if (bytes.size() > kLongestNumber + 3) ThrowUnexpected(bytes);
    return false;
  }
  const auto parsed = std::from_chars(bytes.data() + 1, bytes.data() + end, number);
  if (parsed.ec != std::errc() || parsed.ptr != bytes.data() + end) ThrowUnexpected(bytes);
  bytes.remove_prefix(end + kEnd.size());
  return true;
}

}  // namespace

RedisRows::RedisRows(std::string head, std::vector<std::string> tails,
                     std::vector<std::vector<Piece>> values, std::span<const int64_t> ids,
                     uint8_t* found)
    : head_(std::move(head)),
      tails_(std::move(tails)),
      values_(std::move(values)),
      ids_(ids),
      found_(found) {
  for (const std::vector<Piece>& value : values_) {
    int64_t bytes = 0;
    for (const Piece& piece : value) bytes += piece.bytes;
    value_bytes_.push_back(bytes);
  }
}

size_t RedisRows::most_value_bytes() const {
  return static_cast<size_t>(*std::max_element(value_bytes_.begin(), value_bytes_.end())) +
         kLongestNumber + 2 * kEnd.size() + 1;
}

std::string RedisRows::Name(int64_t row, size_t value) const {
  std::string name = head_;
  AppendNumber(name, ids_[static_cast<size_t>(row)]);
  return name + tails_[value];
}

void RedisRows::AppendName(int64_t row, size_t value) {
  const std::string name = Name(row, value);
  AppendLength(text_, '$', static_cast<int64_t>(name.size()));
  text_ += name;
  text_ += kEnd;
}

void RedisRows::Mget(int64_t first, int64_t last) {
  AppendLength(text_, '*', 1 + (last - first) * static_cast<int64_t>(tails_.size()));
  text_ += "$4\r\nMGET\r\n";
  for (int64_t row = first; row < last; ++row) {
    for (size_t value = 0; value < tails_.size(); ++value) {
      AppendName(row, value);
    }
  }
  expected_.push_back({first, last, true});
}

void RedisRows::Mset(int64_t first, int64_t last) {
  AppendLength(text_, '*', 1 + 2 * (last - first) * static_cast<int64_t>(tails_.size()));
  text_ += "$4\r\nMSET\r\n";
  for (int64_t row = first; row < last; ++row) {
    for (size_t value = 0; value < tails_.size(); ++value) {
      AppendName(row, value);
      AppendLength(text_, '$', value_bytes_[value]);
      for (const Piece& piece : values_[value]) {
        text_.append(reinterpret_cast<const char*>(piece.base + row * piece.stride_bytes),
                     static_cast<size_t>(piece.bytes));
      }
      text_ += kEnd;
    }
  }
  expected_.push_back({first, last, false});
}

bool RedisRows::TakeHeader(std::string_view& bytes, const Expected& expected) {
  if (bytes.empty()) return false;
  if (bytes[0] == '-' || !expected.is_rows) {
    const size_t end = bytes.find(kEnd);
    if (end == std::string_view::npos) return false;
    if (bytes[0] == '-' && end > 1) {
      error_ = bytes.substr(1, end - 1);
    } else if (bytes[0] != '+') {
      ThrowUnexpected(bytes);
    }
    bytes.remove_prefix(end + kEnd.size());
    return true;
  }
  int64_t count = 0;
  if (!TakeLine(bytes, '*', count)) return false;
  const int64_t wanted = (expected.last - expected.first) * static_cast<int64_t>(tails_.size());
  if (count != wanted) {
    throw InvalidState("the reply should hold " + std::to_string(wanted) +
                       " values but holds: " + std::to_string(count));
  }
  std::fill(found_ + expected.first, found_ + expected.last, uint8_t{1});
  return true;
}

bool RedisRows::TakeValue(std::string_view& bytes) {
  std::string_view rest = bytes;
  int64_t length = 0;
  if (!TakeLine(rest, '$', length)) return false;
  if (length == -1) {
    found_[row_] = 0;
  } else {
    if (length != value_bytes_[value_]) {
      throw InvalidState(Name(row_, value_) + " should have " +
                         std::to_string(value_bytes_[value_]) +
                         " bytes but has: " + std::to_string(length));
    }
    if (rest.size() < static_cast<size_t>(length) + kEnd.size()) return false;
    const char* from = rest.data();
    for (const Piece& piece : values_[value_]) {
      std::memcpy(piece.base + row_ * piece.stride_bytes, from, static_cast<size_t>(piece.bytes));
      from += piece.bytes;
    }
    rest.remove_prefix(static_cast<size_t>(length));
    if (!rest.starts_with(kEnd)) ThrowUnexpected(rest);
    rest.remove_prefix(kEnd.size());
  }
  bytes = rest;
  if (++value_ == tails_.size()) {
    value_ = 0;
    ++row_;
  }
  return true;
}

size_t RedisRows::Receive(std::string_view bytes) {
  const size_t all = bytes.size();
  while (!expected_.empty() && error_.empty()) {
    const Expected& expected = expected_.front();
    if (!in_reply_) {
      if (!TakeHeader(bytes, expected)) break;
      in_reply_ = true;
      row_ = expected.first;
      value_ = 0;
    }
    if (expected.is_rows && error_.empty()) {
      while (row_ < expected.last && TakeValue(bytes)) {
      }
      if (row_ < expected.last) break;
    }
    in_reply_ = false;
    expected_.pop_front();
  }
  return all - bytes.size();
}

}  // namespace embstore
