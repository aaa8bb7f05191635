// Binding of stores, and of stores that are written in Python.
#include "embstore/store.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "embstore/fork_guard.h"
#include "embstore/ssd_store.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

using KeyArray = nb::ndarray<nb::numpy, const int64_t, nb::ndim<1>>;
using ScoreArray = nb::ndarray<nb::numpy, const uint64_t, nb::ndim<1>>;
using RowArray = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<2>>;
// What a store written in Python returns: C order, on the CPU.
using KeysBack = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ScoresBack = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowsBack = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FoundBack = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Copies: the Python side may keep what it is given.
template <typename T, typename Array>
Array Copied(const T* data, std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t size : shape) count *= size;
  auto* kept = new std::vector<T>(data, data + count);
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Array(kept->data(), shape, owner);
}

KeyArray ToArray(std::span<const int64_t> keys) {
  return Copied<int64_t, KeyArray>(keys.data(), {keys.size()});
}

// Calls the methods of an embstore.stores.Store, on any thread; takes the GIL for each call.
class PythonStore final : public Store {
 public:
  PythonStore(nb::object store, int64_t row_bytes)
      : Store(row_bytes), description_(nb::cast<std::string>(nb::repr(store))), store_(store) {}

  ~PythonStore() override {
    if (!nb::is_alive()) {
      (void)store_.release();
      return;
    }
    nb::gil_scoped_acquire locked;
    store_.reset();
  }

  std::string Describe() const override { return description_; }

  int64_t size() const override {
    const Inside inside(*this);
    return static_cast<int64_t>(nb::len(store_));
  }

  void Get(std::span<const int64_t> keys, std::byte* rows, uint64_t* scores,
           uint8_t* found) const override {
    const Inside inside(*this);
    const nb::object answer = store_.attr("get")(ToArray(keys));
    const auto parts = Parts(answer, "get", 3);
    const auto their_rows = Cast<RowsBack>(parts[0], "get", "rows of uint8 (n, row_bytes)");
    const auto their_scores = Cast<ScoresBack>(parts[1], "get", "scores of uint64 (n)");
    const auto their_found = Cast<FoundBack>(parts[2], "get", "found of bool (n)");
    RequireShapes("get", keys.size(), their_rows, their_scores);
    if (their_found.shape(0) != keys.size()) Complain("get", "one found flag for each key");
    std::memcpy(rows, their_rows.data(), keys.size() * static_cast<size_t>(row_bytes()));
    if (scores) std::memcpy(scores, their_scores.data(), keys.size() * sizeof(uint64_t));
    std::memcpy(found, their_found.data(), keys.size());
  }

  void Contains(std::span<const int64_t> keys, uint8_t* found) const override {
    const Inside inside(*this);
    const nb::object answer = store_.attr("contains")(ToArray(keys));
    const auto flags = Cast<FoundBack>(answer, "contains", "found of bool (n)");
    if (flags.shape(0) != keys.size()) Complain("contains", "one found flag for each key");
    std::memcpy(found, flags.data(), keys.size());
  }

  void Put(std::span<const int64_t> keys, const std::byte* rows, const uint64_t* scores) override {
    const Inside inside(*this);
    const size_t n = keys.size();
    store_.attr("put")(ToArray(keys),
                       Copied<uint8_t, RowArray>(reinterpret_cast<const uint8_t*>(rows),
                                                 {n, static_cast<size_t>(row_bytes())}),
                       Copied<uint64_t, ScoreArray>(scores, {n}));
  }

  void Erase(std::span<const int64_t> keys) override {
    const Inside inside(*this);
    store_.attr("erase")(ToArray(keys));
  }

  void Clear() override { Call("clear"); }
  void Flush() override { Call("flush"); }

  void SaveCheckpoint(const std::string& name) override {
    const Inside inside(*this);
    store_.attr("snapshot")(name);
  }

  void LoadCheckpoint(const std::string& name) override {
    const Inside inside(*this);
    store_.attr("load_snapshot")(name);
  }

  std::unique_ptr<StoreScanner> Scan() const override {
    const Inside inside(*this);
    return std::make_unique<Scanner>(*this, nb::iter(store_.attr("scan")()));
  }

  std::unique_ptr<KeyScanner> ScanKeys() const override {
    const Inside inside(*this);
    return std::make_unique<KeyBlocks>(*this, nb::iter(store_.attr("scan_keys")()));
  }

 private:
  // A method call. A fork waits for it, since it may hold locks of its own.
  struct Inside {
    explicit Inside(const PythonStore& store) : guard(store.lock_) {}
    std::shared_lock<StoreLock> guard;  // before the GIL, which others need to finish
    nb::gil_scoped_acquire locked;
  };

  // An iterator of Python, used and dropped with the GIL.
  class Blocks {
   public:
    explicit Blocks(nb::object blocks) : blocks_(std::move(blocks)) {}
    ~Blocks() {
      if (!nb::is_alive()) {
        (void)blocks_.release();
        return;
      }
      nb::gil_scoped_acquire locked;
      blocks_.reset();
    }
    // Not valid after the last. REQUIRES the GIL.
    nb::object Next() {
      nb::object next = nb::steal(PyIter_Next(blocks_.ptr()));
      if (!next.is_valid() && PyErr_Occurred()) throw nb::python_error();
      return next;
    }

   private:
    nb::object blocks_;
  };

  class KeyBlocks final : public KeyScanner {
   public:
    KeyBlocks(const PythonStore& store, nb::object blocks)
        : store_(store), blocks_(std::move(blocks)) {}
    void Next(int64_t, std::vector<int64_t>& keys) override {
      const Inside inside(store_);
      keys.clear();
      while (keys.empty()) {
        const nb::object next = blocks_.Next();
        if (!next.is_valid()) return;
        const auto array = store_.Cast<KeysBack>(next, "scan_keys", "keys of int64 (n)");
        keys.assign(array.data(), array.data() + array.shape(0));
      }
    }

   private:
    const PythonStore& store_;
    Blocks blocks_;
  };

  // The Python side decides how large the blocks are.
  class Scanner final : public StoreScanner {
   public:
    Scanner(const PythonStore& store, nb::object blocks)
        : store_(store), blocks_(std::move(blocks)) {}
    void Next(int64_t, StoredRows& block) override {
      const Inside inside(store_);
      block = {};
      while (block.keys.empty()) {
        const nb::object next = blocks_.Next();
        if (!next.is_valid()) return;
        const auto parts = store_.Parts(next, "scan", 3);
        const auto keys = store_.Cast<KeysBack>(parts[0], "scan", "keys of int64 (n)");
        const auto rows = store_.Cast<RowsBack>(parts[1], "scan", "rows of uint8 (n, row_bytes)");
        const auto scores = store_.Cast<ScoresBack>(parts[2], "scan", "scores of uint64 (n)");
        store_.RequireShapes("scan", keys.shape(0), rows, scores);
        block.keys.assign(keys.data(), keys.data() + keys.shape(0));
        block.scores.assign(scores.data(), scores.data() + keys.shape(0));
        const auto* bytes = reinterpret_cast<const std::byte*>(rows.data());
        block.rows.assign(bytes, bytes + keys.shape(0) * static_cast<size_t>(store_.row_bytes()));
      }
    }

   private:
    const PythonStore& store_;
    Blocks blocks_;
  };

  void Call(const char* method) {
    const Inside inside(*this);
    store_.attr(method)();
  }

  [[noreturn]] void Complain(const char* method, const std::string& wanted) const {
    throw InvalidArgument(std::string(method) + " of " + description_ + " should return " + wanted);
  }

  nb::tuple Parts(const nb::object& answer, const char* method, size_t count) const {
    nb::tuple parts;
    if (!nb::try_cast(answer, parts) || parts.size() != count) {
      Complain(method, "a tuple of " + std::to_string(count) + " arrays");
    }
    return parts;
  }

  template <typename Array>
  Array Cast(nb::handle value, const char* method, const char* wanted) const {
    Array array;
    if (!nb::try_cast(value, array, /*convert=*/false)) Complain(method, wanted);
    return array;
  }

  void RequireShapes(const char* method, size_t n, const RowsBack& rows,
                     const ScoresBack& scores) const {
    if (rows.shape(0) != n || rows.shape(1) != static_cast<size_t>(row_bytes())) {
      Complain(method, "rows of the shape (" + std::to_string(n) + ", " +
                           std::to_string(row_bytes()) + ")");
    }
    if (scores.shape(0) != n) Complain(method, "one score for each key");
  }

  std::string description_;
  nb::object store_;
  mutable StoreLock lock_;
};

std::span<const int64_t> Keys(uintptr_t address, int64_t n) {
  return {Address<const int64_t>(address), static_cast<size_t>(n)};
}

// (keys, rows, scores) of the next block, or None after the last.
std::optional<nb::tuple> NextBlock(StoreScanner& scanner, int64_t max_rows, int64_t row_bytes) {
  auto* block = new StoredRows;
  nb::capsule owner(block, [](void* p) noexcept { delete static_cast<StoredRows*>(p); });
  {
    nb::gil_scoped_release unlocked;
    scanner.Next(max_rows, *block);
  }
  const size_t n = block->keys.size();
  if (n == 0) return std::nullopt;
  return nb::make_tuple(nb::ndarray<nb::numpy, int64_t>(block->keys.data(), {n}, owner),
                        nb::ndarray<nb::numpy, uint8_t>(block->rows.data(),
                                                        {n, static_cast<size_t>(row_bytes)}, owner),
                        nb::ndarray<nb::numpy, uint64_t>(block->scores.data(), {n}, owner));
}

}  // namespace

void BindStore(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<StoreScanner>(m, "StoreScanner").def("next", &NextBlock, "max_rows"_a, "row_bytes"_a);
  nb::class_<Store>(m, "Store", "A store of the engine: rows by key.")
      .def_prop_ro("row_bytes", &Store::row_bytes)
      .def("describe", &Store::Describe)
      .def("size", &Store::size, Unlocked())
      .def(
          "get",
          [](const Store& store, uintptr_t keys, int64_t n, uintptr_t rows, uintptr_t scores,
             uintptr_t found) {
            store.Get(Keys(keys, n), Address<std::byte>(rows), Address<uint64_t>(scores),
                      Address<uint8_t>(found));
          },
          Unlocked())
      .def(
          "contains",
          [](const Store& store, uintptr_t keys, int64_t n, uintptr_t found) {
            store.Contains(Keys(keys, n), Address<uint8_t>(found));
          },
          Unlocked())
      .def(
          "put",
          [](Store& store, uintptr_t keys, int64_t n, uintptr_t rows, uintptr_t scores) {
            store.Put(Keys(keys, n), Address<const std::byte>(rows),
                      Address<const uint64_t>(scores));
          },
          Unlocked())
      .def(
          "erase", [](Store& store, uintptr_t keys, int64_t n) { store.Erase(Keys(keys, n)); },
          Unlocked())
      .def("clear", &Store::Clear, Unlocked())
      .def("flush", &Store::Flush, Unlocked())
      .def("snapshot", &Store::SaveCheckpoint, Unlocked(), "name"_a)
      .def("load_snapshot", &Store::LoadCheckpoint, Unlocked(), "name"_a)
      .def("scan", &Store::Scan, nb::keep_alive<0, 1>(), Unlocked());

  // Errors with an errno become the OSError that Python users expect. Messages quote what damaged
  // files say, which need not be UTF-8.
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      const nb::object value = nb::handle(PyExc_OSError)(error.code().value(), Text(error.what()));
      PyErr_SetObject(value.type().ptr(), value.ptr());
    } catch (const InvalidArgument& error) {
      PyErr_SetObject(PyExc_ValueError, Text(error.what()).ptr());
    } catch (const InvalidState& error) {
      PyErr_SetObject(PyExc_RuntimeError, Text(error.what()).ptr());
    }
  });

  nb::class_<SsdStoreStats>(m, "SsdStoreStats")
      .def_ro("rows", &SsdStoreStats::rows)
      .def_ro("index_bytes", &SsdStoreStats::index_bytes)
      .def_ro("file_bytes", &SsdStoreStats::file_bytes)
      .def_ro("bytes_put", &SsdStoreStats::bytes_put)
      .def_ro("bytes_written", &SsdStoreStats::bytes_written)
      .def_ro("moved_rows", &SsdStoreStats::moved_rows)
      .def_ro("direct", &SsdStoreStats::direct);
  nb::class_<SsdStore, Store>(m, "SsdStore")
      .def("stats", &SsdStore::stats, Unlocked())
      .def("snapshots",
           [](const SsdStore& store) {
             std::vector<std::string> names;
             {
               nb::gil_scoped_release unlocked;
               names = store.Checkpoints();
             }
             nb::list found;  // folders whose names are not UTF-8 are no snapshots of ours
             for (const std::string& name : names) {
               const nb::object text = nb::steal(PyUnicode_DecodeUTF8(
                   name.data(), static_cast<Py_ssize_t>(name.size()), nullptr));
               if (text) {
                 found.append(text);
               } else if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
                 PyErr_Clear();
               } else {
                 throw nb::python_error();
               }
             }
             return found;
           })
      .def("delete_snapshot", &SsdStore::DeleteCheckpoint, Unlocked(), "name"_a)
      .def("close", &SsdStore::Close, Unlocked());
  m.def(
      "ssd_store",
      [](const std::string& path, int64_t row_bytes, int64_t key_bytes,
         int64_t physical_block_bytes, int64_t capacity_rows, bool direct, bool create,
         const std::string& flush_snapshot) {
        return SsdStore::Open({path, row_bytes, key_bytes, physical_block_bytes, capacity_rows,
                               direct, create, flush_snapshot});
      },
      Unlocked(), "path"_a, "row_bytes"_a, "key_bytes"_a, "physical_block_bytes"_a,
      "capacity_rows"_a, "direct"_a, "create"_a, "flush_snapshot"_a);
  m.def("memory_store", &MakeMemoryStore, "row_bytes"_a, "capacity_rows"_a);
  m.def("tiered_store", &MakeTieredStore, "upper"_a, "lower"_a, "upper_rows"_a);
  m.def("null_store", &MakeNullStore, "row_bytes"_a);
  m.def(
      "python_store",
      [](nb::object store, int64_t row_bytes) -> std::shared_ptr<Store> {
        return std::make_shared<PythonStore>(std::move(store), row_bytes);
      },
      "store"_a, "row_bytes"_a);
}

}  // namespace embstore
