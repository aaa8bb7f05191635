#include "embstore/string_ids.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "embstore/hash.h"
#include "embstore/parallel.h"
#include "embstore/types.h"

namespace {

using embstore::IdOf;
using embstore::InvalidArgument;

// Strings of every length up to 70, so that all paths of the hash are met.
std::vector<std::string> Words(int n) {
  std::vector<std::string> words;
  for (int i = 0; i < n; ++i) {
    std::string word = "w" + std::to_string(i * 7919);
    word.resize(static_cast<size_t>(i % 71), static_cast<char>('a' + i % 26));
    words.push_back(word);
  }
  return words;
}

template <class Offset>
std::vector<int64_t> OfSlices(const std::vector<std::string>& words, uint64_t seed) {
  std::vector<uint8_t> data;
  std::vector<Offset> offsets{0};
  for (const std::string& word : words) {
    data.insert(data.end(), word.begin(), word.end());
    offsets.push_back(static_cast<Offset>(data.size()));
  }
  std::vector<int64_t> ids(words.size());
  embstore::IdsOfSlices(data, std::span<const Offset>(offsets), seed, ids);
  return ids;
}

TEST(The hash is the published xxh64) {
  CHECK_EQ(static_cast<uint64_t>(IdOf("", 0)), 0xEF46DB3751D8E999ULL);
  CHECK_EQ(static_cast<uint64_t>(IdOf("a", 0)), 0xD24EC4F1A98C6E5BULL);
  CHECK_EQ(static_cast<uint64_t>(IdOf("abc", 0)), 0x44BC2CF5AD770999ULL);
  CHECK_EQ(static_cast<uint64_t>(IdOf("Nobody inspects the spammish repetition", 0)),
           0xFBCEA83C8A378BF1ULL);
  const int64_t key = -7;
  CHECK_EQ(static_cast<uint64_t>(IdOf({reinterpret_cast<const char*>(&key), 8}, 1)),
           embstore::Xxh64OfKey(key, 1));
}

TEST(Every layout gives the id of the single string at any number of threads) {
  const std::vector<std::string> words = Words(40'003);
  std::vector<int64_t> expected;
  for (const std::string& word : words) expected.push_back(IdOf(word, 5));
  const size_t width = 70;
  std::vector<uint8_t> bytes(words.size() * width);
  std::vector<uint32_t> points(words.size() * width);
  for (size_t i = 0; i < words.size(); ++i) {
    std::memcpy(bytes.data() + i * width, words[i].data(), words[i].size());
    for (size_t j = 0; j < words[i].size(); ++j) points[i * width + j] = words[i][j];
  }
  const int before = embstore::NumThreads();
  for (const int threads : {1, 2, 4}) {
    embstore::SetNumThreads(threads);
    CHECK(OfSlices<int32_t>(words, 5) == expected);
    CHECK(OfSlices<int64_t>(words, 5) == expected);
    std::vector<int64_t> ids(words.size());
    embstore::IdsOfFixedBytes(bytes, width, true, 5, ids);
    CHECK(ids == expected);
    ids.assign(words.size(), 0);
    embstore::IdsOfFixedUnicode(points, width, 5, ids);
    CHECK(ids == expected);
  }
  embstore::SetNumThreads(before);
}

TEST(Code points are hashed as UTF - 8) {
  const std::vector<uint32_t> points = {0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10FFFF};
  std::vector<int64_t> ids(1);
  embstore::IdsOfFixedUnicode(points, points.size(), 3, ids);
  CHECK_EQ(
      ids[0],
      IdOf("\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xEF\xBF\xBF\xF4\x8F\xBF\xBF",
           3));
}

TEST(Malformed input is refused with the number of its first string) {
  std::vector<int64_t> ids(40'000);
  std::vector<uint32_t> points(ids.size(), 'a');
  points[39'999] = points[20'001] = 0xD800;
  CHECK_THROWS(InvalidArgument, "string 20001 has a code point",
               embstore::IdsOfFixedUnicode(points, 1, 0, ids));
  const std::vector<uint8_t> data(4);
  for (const std::vector<int32_t>& offsets :
       {std::vector<int32_t>{0, 5}, std::vector<int32_t>{3, 2}, std::vector<int32_t>{-1, 2}}) {
    std::vector<int64_t> one(1);
    CHECK_THROWS(InvalidArgument, "string 0 leaves the data",
                 embstore::IdsOfSlices(data, std::span<const int32_t>(offsets), 0, one));
  }
}

}  // namespace

TEST_MAIN()
