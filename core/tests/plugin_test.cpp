// The host of plug-ins, with the plug-in of tests/stores/odd_plugin.cpp: it misbehaves when the
// text of its configuration asks for it.
#include "embstore/plugin.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "embstore/types.h"
#include "failing_allocations.h"
#include "store_oracle.h"

namespace embstore {
namespace {

constexpr double kSoon = 0.05, kPatient = 60.0;
const std::vector<int64_t> kTensors = {12, 4, 7};
constexpr size_t kRowBytes = 23;

std::vector<std::byte> RowsOf(const std::vector<int64_t>& ids, uint64_t version) {
  std::vector<std::byte> rows(ids.size() * kRowBytes);
  for (size_t i = 0; i < ids.size(); ++i)
    FillRow(ids[i], version, {&rows[i * kRowBytes], kRowBytes});
  return rows;
}

PluginInstance Open(const std::string& mood) {
  LoadPlugin(EMBSTORE_ODD_PLUGIN);
  return PluginInstance("odd", mood, "table", 0, kTensors);
}

// The rows of ids that were pushed with this version come back, and no others.
void CheckPull(PluginInstance& instance, const std::vector<int64_t>& ids, uint64_t version,
               int64_t end) {
  std::vector<std::byte> rows(ids.size() * kRowBytes);
  std::vector<uint8_t> found(ids.size(), 2);
  instance.Pull(ids, rows.data(), found.data(), kPatient);
  const std::vector<std::byte> expected = RowsOf(ids, version);
  for (size_t i = 0; i < ids.size(); ++i) {
    CHECK_EQ(found[i] != 0, ids[i] < end);
    if (!found[i]) continue;
    CHECK(std::equal(&rows[i * kRowBytes], &rows[i * kRowBytes] + kRowBytes,
                     &expected[i * kRowBytes]));
  }
}

TEST(Rows that were pushed are pulled and others are not found) {
  PluginInstance instance = Open("well");
  CHECK(!LoadPlugin(EMBSTORE_ODD_PLUGIN).is_new);
  CHECK(PluginTypes() == std::vector<std::string>{"odd"});
  CHECK_EQ(instance.row_bytes(), int64_t{kRowBytes});
  std::vector<int64_t> ids;
  for (int64_t id = -500; id < 523; ++id) ids.push_back(id);
  for (const uint64_t version : {1, 2}) {
    instance.Push(ids, RowsOf(ids, version).data(), kPatient);
    std::vector<int64_t> wanted = ids;
    wanted.insert(wanted.end(), {ids[7], 523, 524, 1 << 20});
    CheckPull(instance, wanted, version, 523);
  }
  instance.Pull({}, nullptr, nullptr, kPatient);
  instance.Push({}, nullptr, kPatient);
}

TEST(A misbehaving library is an error that says so) {
  const std::vector<int64_t> ids = {1, 2, 3};
  std::vector<std::byte> rows(3 * kRowBytes);
  std::vector<uint8_t> found(3);
  const auto pull = [&](PluginInstance& instance, double seconds) {
    instance.Pull(ids, rows.data(), found.data(), seconds);
  };
  const std::vector<std::pair<std::string, std::string>> moods = {
      {"throws", "pull of table: the cable is cut"},
      {"short", "tensor 0 of id 1 should have 12 bytes but has: 11"},
      {"beyond", "it answered for offset 3, tensor 0, which was not asked for"},
  };
  for (const auto& [mood, message] : moods) {
    PluginInstance instance = Open(mood);
    instance.Push(ids, RowsOf(ids, 1).data(), kPatient);
    CHECK_THROWS(InvalidState, message, pull(instance, kPatient));
    CHECK_THROWS(InvalidState, message, pull(instance, kPatient));  // and the next one too
  }
  PluginInstance forgetful = Open("forgets states");
  forgetful.Push(ids, RowsOf(ids, 1).data(), kPatient);
  pull(forgetful, kPatient);
  CHECK(found == std::vector<uint8_t>(3, 0));
  PluginInstance silent = Open("silent");
  CHECK_THROWS(InvalidState, "not completed within 0.05 seconds", pull(silent, kSoon));
  CHECK_THROWS(InvalidState, "waiting for an earlier call", pull(silent, kSoon));
  CHECK_THROWS(InvalidState, "no such place", Open("throws at the start"));
  Open("throws at the end");
  CHECK_THROWS(InvalidArgument, "type should be", PluginInstance("other", "", "t", 0, kTensors));
  CHECK_THROWS(InvalidArgument, "tensor_bytes should be", PluginInstance("odd", "", "t", 0, {0}));
  CHECK_THROWS(InvalidArgument, "cannot be loaded", LoadPlugin("/nonexistent.so"));
}

TEST(A late call uses its own memory and the next one waits for it) {
  for (const char* mood : {"late", "blocks"}) {
    PluginInstance instance = Open(mood);
    {
      const std::vector<int64_t> ids = {1, 2, 3, 4, 5};
      instance.Push(ids, RowsOf(ids, 1).data(), kPatient);
      std::vector<std::byte> rows(5 * kRowBytes, std::byte{9});
      std::vector<uint8_t> found(5, 9);
      CHECK_THROWS(InvalidState, "pull of table: not completed within",
                   instance.Pull(ids, rows.data(), found.data(), kSoon));
      CHECK(rows == std::vector<std::byte>(5 * kRowBytes, std::byte{9}));
      CHECK(found == std::vector<uint8_t>(5, 9));
    }
    CheckPull(instance, {5, 6, 1}, 1, 6);
  }
}

TEST(Several threads share an instance that runs one call at a time) {
  PluginInstance instance = Open("well");
  std::atomic<int> errors{0};
  std::vector<std::thread> threads;
  for (int64_t who = 0; who < 3; ++who) {
    threads.emplace_back([&, who] {
      try {
        for (uint64_t version = 1; version <= 20; ++version) {
          std::vector<int64_t> ids;
          for (int64_t i = 0; i < 31; ++i) ids.push_back(100 * who + i);
          instance.Push(ids, RowsOf(ids, version).data(), kPatient);
          std::vector<std::byte> rows(ids.size() * kRowBytes);
          std::vector<uint8_t> found(ids.size());
          instance.Pull(ids, rows.data(), found.data(), kPatient);
          errors += rows != RowsOf(ids, version);
        }
      } catch (const std::exception&) {
        ++errors;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(errors.load(), 0);
}

TEST(A library that runs out of memory is an error and can be used again) {
  PluginInstance instance = Open("well");
  std::vector<int64_t> ids(97);
  std::iota(ids.begin(), ids.end(), -48);
  const std::vector<std::byte> rows = RowsOf(ids, 1);
  std::vector<std::byte> pulled(rows.size());
  std::vector<uint8_t> found(ids.size());
  const auto fail_each = [](const auto& work) {
    const int64_t failures = FailEachAllocation(
        [&] {
          try {
            work();
          } catch (const InvalidState&) {  // it was the plug-in's own memory
            throw std::bad_alloc();
          }
        },
        [] {});
    CHECK(failures > 5);
  };
  fail_each([&] { instance.Push(ids, rows.data(), kPatient); });
  fail_each([&] { instance.Pull(ids, pulled.data(), found.data(), kPatient); });
  CHECK(pulled == rows);
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
