// Fuzzes the readers of the engine with libFuzzer, which sees their branches, and under ASan and
// UBSan; `python -m trust.fuzz_core` builds and runs it. The environment variable EMBSTORE_FUZZ
// names the reader: redis, index or store; EMBSTORE_FUZZ_FOLDER a folder for files.
//
// Checksums are recomputed for each input: an attacker can do that as well.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "embstore/checksum.h"
#include "embstore/parallel.h"
#include "embstore/redis_protocol.h"
#include "embstore/served_table.h"
#include "embstore/ssd_store.h"
#include "embstore/types.h"

namespace {

using namespace embstore;

// Takes numbers from the front of an input; 0 when it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(reinterpret_cast<const char*>(data), size) {}
  bool empty() const { return rest_.empty(); }
  std::string_view Take(size_t bytes) {
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  template <typename T>
  T Number() {
    T number = 0;
    const std::string_view taken = Take(sizeof(T));
    if (!taken.empty()) std::memcpy(&number, taken.data(), taken.size());
    return number;
  }

 private:
  std::string_view rest_;
};

void Require(bool holds) {
  if (!holds) std::abort();
}

void WriteBytes(const std::string& path, std::string_view data) {
  std::ofstream(path, std::ios::binary)
      .write(data.data(), static_cast<std::streamsize>(data.size()));
}

// The documented exceptions.
template <typename Use>
void Allowing(const Use& use) {
  try {
    use();
  } catch (const InvalidArgument&) {
  } catch (const InvalidState&) {
  } catch (const std::system_error&) {
  }
}

// For the files of an input; trust/fuzz_core.py makes and removes it.
const std::string& Folder() {
  static const std::string& folder = *new std::string(std::getenv("EMBSTORE_FUZZ_FOLDER"));
  return folder;
}

// Replies that arrive in pieces: byte 0 says in which.
void Redis(Input input) {
  const auto form = input.Number<uint8_t>();
  std::vector<std::byte> fours(12), twos(6);
  std::vector<uint8_t> found(3);
  const std::vector<int64_t> ids = {7, -1, INT64_MIN};
  const Piece first = {fours.data(), 4, 4}, second = {twos.data(), 2, 2};
  const bool packed = form & 1;
  std::vector<std::string> tails = {"_a", "_b"};
  std::vector<std::vector<Piece>> values = {{first}, {second}};
  if (packed) tails = {"_c"}, values = {{first, second}};
  RedisRows rows("h_", tails, values, ids, found.data());
  rows.BeginText();
  if (form & 2) rows.Mset(0, 2);
  rows.Mget(0, 3);
  if (form & 4) rows.Mset(1, 3);
  std::string received;
  const size_t step = form >> 3 ? form >> 3 : 4096;
  Allowing([&] {
    while (!input.empty() && rows.waiting() > 0 && rows.error().empty()) {
      received += input.Take(step);
      const size_t taken = rows.Receive(received);
      Require(taken <= received.size());
      received.erase(0, taken);
    }
  });
}

// An index of as many rows as the input says, whose lines are the rest of it.
void Index(Input input) {
  constexpr int64_t kDim = 3;
  const int64_t rows = input.Number<uint8_t>(), entries = rows;
  std::vector<uint64_t> words(8 * static_cast<size_t>(1 + entries / 4 + 1));
  std::memcpy(words.data(), "EMBINDEX", 8);
  words[1] = 1;  // version, and checksum 0 of the keys
  words[2] = static_cast<uint64_t>(entries / 4 + 1);
  words[3] = static_cast<uint64_t>(entries);
  words[4] = input.Number<uint64_t>();
  const std::string_view lines = input.Take(8 * (words.size() - 8));
  std::memcpy(words.data() + 8, lines.data(), lines.size());
  auto* head = reinterpret_cast<uint32_t*>(words.data());
  head[10] = Crc32(0, words.data() + 8, 8 * (words.size() - 8));
  head[15] = Crc32(0, words.data(), 60);
  const std::string path = Folder() + "/index";
  WriteBytes(path, {reinterpret_cast<const char*>(words.data()), 8 * words.size()});
  const auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(rows * kDim));
  ServedTableOptions options;
  options.dim = kDim;
  Allowing([&] {
    const ServedRows part = {values, nullptr, reinterpret_cast<const std::byte*>(values->data()),
                             rows, kDim * 4};
    const ServedTable table(options, {part}, path, 0);
    std::vector<int64_t> keys(words.begin() + 8, words.end());
    std::vector<float> out(keys.size() * kDim);
    table.Read(keys, out.data(), kDim, nullptr);
    const auto next = table.With(keys, {});
    next->Read(keys, out.data(), kDim, nullptr);
  });
}

// A store whose files are those of a valid one, with pieces replaced: file (1), offset (2),
// bytes (1), what is put there.
const std::vector<std::string> kFiles = {"keys/key-000000000000",
                                         "meta/meta-000000000000",
                                         "snapshots/s/index-000000000000",
                                         "snapshots/s/LIST",
                                         "snapshots/s/CHECKSUMS",
                                         "values/value-000000000000",
                                         "keys/key-000000000001",
                                         "meta/meta-000000000001",
                                         "snapshots/s/index-000000000001",
                                         "values/value-000000000001",
                                         "FORMAT",
                                         "VALUE_SIZE",
                                         "snapshots/t/LIST",
                                         "snapshots/t/index-000000000000"};
constexpr int64_t kRowBytes = 24;
using Files = std::map<std::string, std::string>;

std::shared_ptr<SsdStore> OpenStore(const std::string& path, bool create) {
  SsdStoreOptions options;
  options.path = path;
  options.row_bytes = kRowBytes;
  options.physical_block_bytes = 512;
  options.direct = false;
  options.create = create;
  return SsdStore::Open(options);
}

const Files& ValidStore() {
  static const Files files = [] {
    namespace fs = std::filesystem;
    const std::string path = Folder() + "/valid";
    {
      const auto store = OpenStore(path, true);
      std::vector<int64_t> keys = {7, -1, 12, INT64_MAX};
      const std::string rows(keys.size() * kRowBytes, 'r');
      const std::vector<uint64_t> scores = {1, 2, 3, 4};
      store->Put(keys, reinterpret_cast<const std::byte*>(rows.data()), scores.data());
      store->SaveCheckpoint("s");
    }
    Files found;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream in(entry.path(), std::ios::binary);
      found[fs::relative(entry.path(), path)] = {std::istreambuf_iterator<char>(in), {}};
    }
    fs::remove_all(path);
    return found;
  }();
  return files;
}

void SealRows(const std::string& keys, const std::string& values, std::string& meta) {
  constexpr size_t kInBlock = 512 / kRowBytes;
  for (size_t i = 0; 8 * i + 8 <= keys.size() && 12 * i + 12 <= meta.size(); ++i) {
    const size_t at = std::min(values.size(), i / kInBlock * 512 + i % kInBlock * kRowBytes);
    const std::string row = values.substr(at, kRowBytes);
    const uint32_t crc = Crc32(Crc32(0, keys.data() + 8 * i, 8), row.data(), row.size()) ^
                         Crc32(0, meta.data() + 12 * i, 8);
    std::memcpy(meta.data() + 12 * i + 8, &crc, 4);
  }
}

void Seal(Files& files) {
  for (const std::string chunk : {"-000000000000", "-000000000001"}) {
    SealRows(files["keys/key" + chunk], files["values/value" + chunk], files["meta/meta" + chunk]);
  }
  for (const std::string name : {"snapshots/s/", "snapshots/t/"}) {
    std::string sums;
    for (const auto& [file, data] : files) {
      if (!file.starts_with(name) || file.ends_with("CHECKSUMS")) continue;
      char line[64];
      std::snprintf(line, sizeof(line), " %zu %08x\n", data.size(),
                    Crc32(0, data.data(), data.size()));
      sums += file.substr(name.size()) + line;
    }
    files[name + "CHECKSUMS"] = sums;
  }
}

void Use(const std::string& path, bool create) {
  const auto store = OpenStore(path, create);
  const std::vector<int64_t> keys = {7, -1, 12, 5, INT64_MAX};
  std::vector<std::byte> rows(keys.size() * kRowBytes);
  std::vector<uint64_t> scores(keys.size(), 1);
  std::vector<uint8_t> found(keys.size());
  for (const std::string& name : store->Checkpoints()) {
    Allowing([&] { store->LoadCheckpoint(name); });
    store->CheckInvariants();
    Allowing([&] { store->Get(keys, rows.data(), scores.data(), found.data()); });
    Allowing([&] {
      const auto scanner = store->Scan();
      StoredRows block;
      do scanner->Next(100, block);
      while (!block.keys.empty());
    });
    if (!create) continue;
    std::fill(scores.begin(), scores.end(), 1);
    Allowing([&] {
      store->Put(keys, rows.data(), scores.data());
      store->Erase(std::span(keys).first(1));
      store->SaveCheckpoint("u");
      store->LoadCheckpoint("u");
    });
    store->CheckInvariants();
  }
}

void StoreFolder(Input input) {
  Files files = ValidStore();
  const auto form = input.Number<uint8_t>();
  while (!input.empty()) {
    std::string& file = files[kFiles[input.Number<uint8_t>() % kFiles.size()]];
    const size_t at = std::min<size_t>(input.Number<uint16_t>(), file.size());
    const std::string_view what = input.Take(input.Number<uint8_t>());
    if (what.empty()) {
      file.resize(at);
    } else {
      file.replace(at, what.size(), what);
    }
  }
  if (form & 1) Seal(files);
  namespace fs = std::filesystem;
  const std::string path = Folder() + "/store";
  fs::remove_all(path);
  for (const auto& [name, data] : files) {
    if (data.empty() && !ValidStore().contains(name)) continue;
    fs::create_directories(fs::path(path + "/" + name).parent_path());
    WriteBytes(path + "/" + name, data);
  }
  Allowing([&] { Use(path, /*create=*/false); });
  Allowing([&] { Use(path, /*create=*/true); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string reader =
      std::getenv("EMBSTORE_FUZZ") ? std::getenv("EMBSTORE_FUZZ") : "";
  const Input input(data, size);
  if (reader == "redis") {
    Redis(input);
  } else if (reader == "index") {
    Index(input);
  } else if (reader == "store") {
    StoreFolder(input);
  } else {
    std::abort();
  }
  return 0;
}
