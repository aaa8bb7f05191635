#include "embstore/served_table.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "embstore/checksum.h"
#include "embstore/parallel.h"

namespace {

using namespace embstore;

constexpr int64_t kDim = 7;

struct Rows {
  std::vector<int64_t> keys;
  std::vector<float> values;
};

Rows RowsOf(const std::vector<int64_t>& keys, float shift) {
  Rows rows{keys, {}};
  for (const int64_t key : keys) {
    for (int64_t j = 0; j < kDim; ++j) {
      rows.values.push_back(static_cast<float>(key % 1000) + shift + static_cast<float>(j) / 8);
    }
  }
  return rows;
}

ServedRows Part(std::shared_ptr<const Rows> rows) {
  return {rows, rows->keys.data(), reinterpret_cast<const std::byte*>(rows->values.data()),
          static_cast<int64_t>(rows->keys.size()), kDim * 4};
}

ServedTableOptions Options() {
  ServedTableOptions options;
  options.name = "user";
  options.dim = kDim;
  options.seed = 5;
  return options;
}

TEST(States follow a dictionary through increments and deletions and old states stay) {
  std::mt19937_64 random(1);
  std::map<int64_t, float> oracle;
  std::vector<int64_t> keys = {0, -1, INT64_MIN, INT64_MAX};
  for (int i = 0; i < 70'001; ++i) keys.push_back(static_cast<int64_t>(random()));
  for (const int64_t key : keys) oracle[key] = 0;
  std::vector<std::shared_ptr<const ServedTable>> states = {std::make_shared<ServedTable>(
      Options(), std::vector{Part(std::make_shared<Rows>(RowsOf(keys, 0)))}, "", 0)};
  std::vector<std::map<int64_t, float>> oracles = {oracle};
  for (int step = 1; step <= 9; ++step) {
    std::set<int64_t> changed, removed;
    for (int i = 0; i < 997 * step; ++i) changed.insert(keys[random() % keys.size()]);
    for (int i = 0; i < 131; ++i) changed.insert(static_cast<int64_t>(random() % 5000));
    for (int i = 0; i < 211; ++i) removed.insert(keys[random() % keys.size()]);
    for (const int64_t key : removed) oracle.erase(key);
    for (const int64_t key : changed) oracle[key] = static_cast<float>(step);
    const std::vector<int64_t> gone(removed.begin(), removed.end());
    auto rows =
        std::make_shared<Rows>(RowsOf({changed.begin(), changed.end()}, static_cast<float>(step)));
    states.push_back(states.back()->With(gone, {Part(std::move(rows))}));
    oracles.push_back(oracle);
  }
  for (int64_t key = 0; key < 5000; key += 3) keys.push_back(key);
  std::vector<float> out(keys.size() * kDim);
  std::vector<uint8_t> found(keys.size());
  for (size_t s = 0; s < states.size(); ++s) {
    CHECK_EQ(states[s]->size(), static_cast<int64_t>(oracles[s].size()));
    states[s]->Read(keys, out.data(), kDim, found.data());
    int wrong = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto expected = oracles[s].find(keys[i]);
      wrong += found[i] != (expected != oracles[s].end());
      for (int64_t j = 0; j < kDim; ++j) {
        const float value =
            expected == oracles[s].end()
                ? 0.0f
                : static_cast<float>(keys[i] % 1000) + expected->second + static_cast<float>(j) / 8;
        wrong += out[i * kDim + static_cast<size_t>(j)] != value;
      }
    }
    CHECK_EQ(wrong, 0);
  }
}

TEST(Threads read the newest state while the next one is made) {
  constexpr int64_t kKeys = 3001;
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < kKeys; ++key) keys.push_back(key);
  std::mutex mutex;
  std::shared_ptr<const ServedTable> newest = std::make_shared<ServedTable>(
      Options(), std::vector{Part(std::make_shared<Rows>(RowsOf(keys, 0)))}, "", 0);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> wrong{0}, reads{0};
  const auto read = [&] {
    std::vector<float> out(keys.size() * kDim);
    std::vector<uint8_t> found(keys.size());
    while (!stop || reads == 0) {
      std::shared_ptr<const ServedTable> state;
      {
        std::lock_guard guard(mutex);
        state = newest;
      }
      state->Read(keys, out.data(), kDim, found.data());
      // Key 0 is in every increment, so its first component is the number of the state; of the
      // other keys, some are removed and the rest are not from a later state.
      const float version = out[0];
      for (size_t i = 0; i < keys.size(); ++i) {
        const float shift = out[i * kDim] - static_cast<float>(keys[i] % 1000);
        wrong += found[i] && (shift < 0 || shift > version);
      }
      ++reads;
    }
  };
  std::thread first(read), second(read);
  for (int step = 1; step <= 60; ++step) {
    std::vector<int64_t> changed = {0}, removed;
    for (int64_t key = step; key < kKeys; key += 61) changed.push_back(key);
    for (int64_t key = step + 7; key < kKeys; key += 97) removed.push_back(key);
    auto rows = std::make_shared<Rows>(RowsOf(changed, static_cast<float>(step)));
    const auto next = newest->With(removed, {Part(std::move(rows))});
    std::lock_guard guard(mutex);
    newest = next;
  }
  stop = true;
  first.join();
  second.join();
  CHECK_EQ(wrong.load(), 0);
}

// Changes an index file as an attacker does, who computes its checksums again.
void Forge(const std::string& path,
           const std::function<void(std::vector<ServedIndex::Line>&)>& edit) {
  std::ifstream in(path, std::ios::binary);
  std::string data((std::istreambuf_iterator<char>(in)), {});
  std::vector<ServedIndex::Line> lines(data.size() / 64 - 1);
  std::memcpy(lines.data(), data.data() + 64, 64 * lines.size());
  edit(lines);
  std::memcpy(data.data() + 64, lines.data(), 64 * lines.size());
  const uint32_t crc = Crc32(0, data.data() + 64, data.size() - 64);
  std::memcpy(data.data() + 40, &crc, 4);
  const uint32_t head = Crc32(0, data.data(), 60);
  std::memcpy(data.data() + 60, &head, 4);
  std::ofstream(path, std::ios::binary) << data;
}

TEST(A forged index is refused before a search leaves it or never ends) {
  using Lines = std::vector<ServedIndex::Line>;
  const std::string path = "/tmp/embstore_forged_index_" + std::to_string(getpid());
  std::vector<int64_t> keys(30'000);
  std::iota(keys.begin(), keys.end(), 0);
  const auto rows = std::make_shared<Rows>(RowsOf(keys, 0.5f));
  const ServedTable built(Options(), {Part(rows)}, "", 0);
  const auto used = [](Lines& lines) -> ServedIndex::Line& {
    return *std::find_if(lines.begin(), lines.end(), [](const auto& l) {
      return l.count > 0 && l.count < ServedIndex::Line::kEntries;
    });
  };
  const struct {
    const char* says;
    std::function<void(Lines&)> edit;
  } forgeries[] = {
      {"lines are wrong", [&](Lines& lines) { used(lines).count = 6; }},
      {"lines are wrong", [&](Lines& lines) { used(lines).count = 0xffff; }},
      {"lines are wrong", [&](Lines& lines) { used(lines).passed = 1; }},
      {"lines are wrong",
       [](Lines& lines) {
         for (auto& line : lines) line.passed = 1;
       }},
      {"rows that are not there", [&](Lines& lines) { used(lines).rows[0] = 30'000; }},
      {"rows that are not there", [&](Lines& lines) { used(lines).rows[0] = 1u << 16; }},
      {"rows that are not there", [&](Lines& lines) { used(lines).rows[0] = UINT32_MAX; }},
      {"number of entries", [&](Lines& lines) { --used(lines).count; }},
      {"searches are too long",
       [](Lines& lines) {
         for (size_t i = 0; i < 4097; ++i) {
           lines[i] = {};
           lines[i].count = ServedIndex::Line::kEntries;
           lines[i].passed = 1;
         }
       }},
  };
  for (const auto& [says, edit] : forgeries) {
    std::remove(path.c_str());
    built.base().Save(path, 77);
    Forge(path, [](Lines&) {});
    CHECK_EQ(ServedTable(Options(), {Part(rows)}, path, 77).size(), int64_t{30'000});
    Forge(path, edit);
    CHECK_THROWS(InvalidArgument, says, ServedTable(Options(), {Part(rows)}, path, 77));
  }
  std::remove(path.c_str());
}

TEST(Keys that collide under the seed of a table do not collide in its served index) {
  // Who wrote a dump knows its seed. A search of colliding keys passes all lines that they fill.
  std::vector<int64_t> keys;
  for (int64_t key = 0; keys.size() < 4000; ++key) {
    if (HashKey(key ^ static_cast<int64_t>(Options().seed)) >> 54 == 0) keys.push_back(key);
  }
  const std::string path = "/tmp/embstore_seeded_index_" + std::to_string(getpid());
  std::remove(path.c_str());
  const auto rows = std::make_shared<Rows>(RowsOf(keys, 0.5f));
  const ServedTable built(Options(), {Part(rows)}, "", 0);
  built.base().Save(path, 77);
  int64_t longest = 0, now = 0;
  Forge(path, [&](std::vector<ServedIndex::Line>& lines) {
    for (const auto& line : lines) longest = std::max(longest, now = line.passed ? now + 1 : 0);
  });
  CHECK_EQ(longest < 200, true);
  std::remove(path.c_str());
}

TEST(A saved index answers as the one that was built and refuses other keys and damage) {
  const std::string path = "/tmp/embstore_served_index_" + std::to_string(getpid());
  std::remove(path.c_str());
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 1023; ++i) keys.push_back(i * i * i - 500);
  const auto rows = std::make_shared<Rows>(RowsOf(keys, 0.5f));
  const ServedTable built(Options(), {Part(rows)}, "", 0);
  built.base().Save(path, 77);
  const ServedTable mapped(Options(), {Part(rows)}, path, 77);
  std::vector<float> a(keys.size() * kDim), b(a.size());
  built.Read(keys, a.data(), kDim, nullptr);
  mapped.Read(keys, b.data(), kDim, nullptr);
  CHECK_EQ(a == b, true);
  CHECK_THROWS(InvalidArgument, "other keys", ServedTable(Options(), {Part(rows)}, path, 78));
  for (const int64_t at : {3, 40, 63, 64 + 4, 64 * 100 + 41}) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char old = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(old ^ 1));
    file.close();
    CHECK_THROWS(InvalidArgument, path, ServedTable(Options(), {Part(rows)}, path, 77));
    std::fstream again(path, std::ios::in | std::ios::out | std::ios::binary);
    again.seekp(at);
    again.put(old);
  }
  CHECK_EQ(ServedTable(Options(), {Part(rows)}, path, 77).size(), int64_t{1023});
  CHECK_EQ(truncate(path.c_str(), 64 * 20), 0);
  CHECK_THROWS(InvalidArgument, path, ServedTable(Options(), {Part(rows)}, path, 77));
  std::remove(path.c_str());
}

TEST(A duplicate key is refused) {
  const auto rows = std::make_shared<Rows>(RowsOf({1, 2, 1}, 0));
  CHECK_THROWS(InvalidArgument, "twice", ServedTable(Options(), {Part(rows)}, "", 0));
}

TEST(Any number of threads indexes the keys of all parts and finds one that comes twice) {
  std::mt19937_64 random(3);
  for (const int threads : {1, 2, 3, 7}) {
    SetNumThreads(threads);
    // Few lines: most keys do not fit into the range of their home.
    for (const int64_t n : {0, 1, 4, 11, 29, 1021, 20'011}) {
      std::set<int64_t> drawn;
      while (std::ssize(drawn) < n) drawn.insert(static_cast<int64_t>(random()));
      const std::vector<int64_t> keys(drawn.begin(), drawn.end());
      const int64_t half = n / 2;
      ServedIndex index(n, random());
      CHECK(!index.PutAll(std::vector<ServedIndex::NumberedKeys>{
          {keys.data(), half, 1000}, {keys.data() + half, n - half, 70'000}}));
      CHECK_EQ(index.size(), n);
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t* row = index.Find(keys[static_cast<size_t>(i)]);
        CHECK(row != nullptr);
        CHECK_EQ(int64_t{*row}, i < half ? 1000 + i : 70'000 + i - half);
      }
      CHECK(index.Find(static_cast<int64_t>(random())) == nullptr);
      if (n == 0) continue;
      const int64_t again = keys[random() % keys.size()];
      ServedIndex twice(n + 1, random());
      CHECK(twice.PutAll(std::vector<ServedIndex::NumberedKeys>{{keys.data(), n, 0},
                                                                {&again, 1, 90'000}}) == again);
    }
  }
  SetNumThreads(2);
}

TEST(Rows of int8 differ by at most half a step of their scale) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  for (const int64_t dim : {1, 7, 64, 97}) {
    std::vector<float> values(static_cast<size_t>(11 * dim));
    for (float& value : values) value = normal(random);
    std::fill_n(values.begin(), dim, -2.5f);  // a constant row
    auto bytes = std::make_shared<std::vector<std::byte>>(
        static_cast<size_t>(11 * ServedRowBytes(dim, ServedDType::kInt8)));
    EncodeServedRows(values.data(), 11, dim, ServedDType::kInt8, bytes->data());
    ServedTableOptions options = Options();
    options.dim = dim;
    options.dtype = ServedDType::kInt8;
    const std::vector<int64_t> keys = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    const ServedTable table(
        options, {{bytes, keys.data(), bytes->data(), 11, ServedRowBytes(dim, ServedDType::kInt8)}},
        "", 0);
    std::vector<float> out(values.size());
    table.Read(keys, out.data(), dim, nullptr);
    for (int64_t i = 0; i < 11; ++i) {
      const auto first = values.begin() + i * dim;
      const float scale =
          (*std::max_element(first, first + dim) - *std::min_element(first, first + dim)) / 255;
      for (int64_t j = 0; j < dim; ++j) {
        const float error = std::fabs(out[static_cast<size_t>(i * dim + j)] - first[j]);
        CHECK_EQ(error <= 0.5f * scale + 1e-6f, true);
      }
    }
  }
  float wrong[2] = {1.0f, INFINITY};
  std::byte out[16];
  CHECK_THROWS(InvalidArgument, "finite", EncodeServedRows(wrong, 1, 2, ServedDType::kInt8, out));
}

TEST(A file that is not regular or has the wrong size is refused) {
  CHECK_THROWS(InvalidArgument, "regular file", MappedFile("/dev/zero", -1));
  CHECK_THROWS(InvalidArgument, "regular file", MappedFile("/tmp", -1));
  const std::string path = "/tmp/embstore_mapped_" + std::to_string(getpid());
  std::ofstream(path) << "abc";
  CHECK_THROWS(InvalidArgument, "expected 4 bytes, found 3", MappedFile(path, 4));
  CHECK_EQ(MappedFile(path, 3).Checksum(), 0x352441c2u);
  std::remove(path.c_str());
}

}  // namespace

TEST_MAIN()
