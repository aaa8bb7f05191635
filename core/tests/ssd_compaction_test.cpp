// Which segments an SSD store empties, against a plain calculation, and what it moves out of them.
#include <algorithm>
#include <fstream>
#include <random>
#include <set>

#include "embstore/ssd_store.h"
#include "store_oracle.h"

namespace embstore {
namespace {

constexpr int64_t kSegment = 256;  // rows of 4096 bytes

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys;
  for (int64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

// A store whose first segments are in the files, with so many live rows each; the next put closes
// one that is full, and begins another.
struct Garbage {
  TemporaryDirectory directory;
  std::shared_ptr<SsdStore> store;
  Oracle oracle;
  std::vector<int64_t> live;
  int64_t segment;  // rows
  uint64_t version = 1;
  int64_t next = 1'000'000;  // keys from here on are new

  Garbage(const std::vector<int64_t>& live_rows, bool direct, int64_t row_bytes = 4096)
      : live(live_rows), segment(4096 / row_bytes * kSegment) {
    store = SsdStore::Open({.path = directory.path, .row_bytes = row_bytes, .direct = direct});
    // One segment more stays open, and does not count.
    PutAll(*store, Range(0, (std::ssize(live) + 1) * segment), version, oracle);
    store->Flush();
  }

  // Erases rows here and there, so that those that are left are not the first.
  void EraseRows() {
    std::mt19937_64 random(live.size());
    std::vector<int64_t> gone;
    for (int64_t i = 0; i < std::ssize(live); ++i) {
      std::vector<int64_t> keys = Range(i * segment, (i + 1) * segment);
      std::shuffle(keys.begin(), keys.end(), random);
      gone.insert(gone.end(), keys.begin() + live[static_cast<size_t>(i)], keys.end());
    }
    EraseAll(*store, gone, oracle);
  }

  // The number of rows that moved because of so many new segments.
  int64_t Put(int64_t segments) {
    const int64_t before = store->stats().moved_rows;
    PutAll(*store, Range(next, next + segments * segment), ++version, oracle);
    next += segments * segment;
    return store->stats().moved_rows - before;
  }
};

// How many rows leave segments with so many live ones, at most `limit` of them.
int64_t ExpectedMoves(std::vector<int64_t> live, int64_t limit) {
  constexpr int64_t kSlack = 8 * kSegment;
  std::erase(live, 0);  // free already
  std::sort(live.begin(), live.end());
  int64_t moved = 0;
  for (int64_t taken = 0; taken < limit && taken < std::ssize(live); ++taken) {
    int64_t garbage = 0, left = 0;
    for (size_t i = static_cast<size_t>(taken); i < live.size(); ++i) {
      left += live[i];
      garbage += kSegment - live[i];
    }
    if (garbage <= left + kSlack) break;
    moved += live[static_cast<size_t>(taken)];
  }
  return moved;
}

TEST(Segments with the fewest live rows are emptied while more than half of the places and a slack
         are garbage) {
  std::mt19937_64 random(1);
  std::set<int64_t> seen;
  const auto check = [&](const std::vector<int64_t>& live, bool direct) {
    Garbage garbage(live, direct);
    garbage.EraseRows();
    const int64_t expected = ExpectedMoves(live, 4);
    CHECK_EQ(garbage.Put(1), expected);
    seen.insert(expected);
    CheckHolds(*garbage.store, garbage.oracle);
  };
  // Twelve segments: with 512 live rows there is no garbage to spare, with fewer there is.
  for (const int64_t few : {0, 1, 2, 3}) {
    std::vector<int64_t> live(12, 43);  // 512 with the first two
    live[5] = 41 - few;
    live[7] = 41;
    check(live, few % 2 == 0);
  }
  check({}, true);
  check(std::vector<int64_t>(10, 1), true);
  for (int round = 0; round < 6; ++round) {
    std::vector<int64_t> live(9 + random() % 15);
    for (int64_t& rows : live) {
      rows = static_cast<int64_t>(random() % (round % 2 ? kSegment : kSegment / 3));
    }
    check(live, round % 4 < 2);
  }
  CHECK(seen.size() > 4);
}

TEST(Any number of rows moves out of a segment) {
  for (const bool direct : {true, false}) {
    for (const int64_t live : {1, 7, 255, 256, 257}) {  // of 2048
      Garbage garbage(std::vector<int64_t>(11, live), direct, 512);
      garbage.EraseRows();
      CHECK(garbage.Put(1) >= live);
      CheckHolds(*garbage.store, garbage.oracle);
    }
  }
}

TEST(What cannot be read stays where it is, once and for all) {
  struct Damage {
    const char* file;
    int64_t width;  // of an entry
    bool cut;       // the file ends before the row
  };
  const Damage damages[] = {{"/values/value-000000000000", 4096, false},
                            {"/keys/key-000000000000", 8, false},
                            {"/meta/meta-000000000000", 12, false},
                            {"/keys/key-000000000000", 8, true}};
  for (const bool direct : {true, false}) {
    for (const auto& [file, width, cut] : damages) {
      Garbage garbage(std::vector<int64_t>(30, 10), direct);
      const std::vector<int64_t> few{5, 6, 7, 8, 9};
      std::copy(few.begin(), few.end(), garbage.live.end() - 5);
      garbage.EraseRows();
      const int64_t hit = std::prev(garbage.oracle.lower_bound(26 * kSegment))->first;
      const std::string path = garbage.directory.path + file;
      if (cut) {  // the four segments behind it have no keys either
        std::filesystem::resize_file(path, static_cast<size_t>(hit * width));
        CHECK_EQ(garbage.Put(1), 0);
        garbage.store->Flush();
        CHECK_EQ(garbage.Put(1), 3 * 10);
        continue;
      }
      std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(hit * width + 3);
      const int byte = stream.get();
      stream.seekp(hit * width + 3);
      stream.put(static_cast<char>(byte ^ 0x55));
      stream.close();
      CHECK_EQ(garbage.Put(1), 6 + 7 + 8);
      garbage.store->Flush();
      CHECK_EQ(garbage.Put(1), 9 + 3 * 10);
      if (width == 4096) {
        std::vector<std::byte> row(4096);
        uint8_t found = 0;
        CHECK_THROWS(InvalidState, "its block holds rows " + std::to_string(hit),
                     garbage.store->Get({&hit, 1}, row.data(), nullptr, &found));
      }
      EraseAll(*garbage.store, Range(25 * kSegment, 26 * kSegment), garbage.oracle);
      CheckHolds(*garbage.store, garbage.oracle);
    }
  }
}

TEST(Segments that a checkpoint names stay where they are) {
  for (const bool direct : {true, false}) {
    Garbage garbage(std::vector<int64_t>(30, 10), direct);
    garbage.EraseRows();
    garbage.store->SaveCheckpoint("all");
    CHECK_EQ(garbage.Put(2), 0);
    garbage.store->DeleteCheckpoint("all");
    CHECK_EQ(garbage.Put(1), 4 * 10);
    CheckHolds(*garbage.store, garbage.oracle);
  }
}

TEST(Rows do not move while a scanner reads them) {
  Garbage garbage(std::vector<int64_t>(30, 10), true);
  garbage.EraseRows();
  {
    const auto scanner = garbage.store->Scan();
    CHECK_EQ(garbage.Put(1), 0);
  }
  CHECK_EQ(garbage.Put(3), 12 * 10);  // four for each segment
  CheckHolds(*garbage.store, garbage.oracle);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
