// Binding of served tables, which read-only processes answer from.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "embstore/served_table.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

// part: key file (None when an index is given), row file, n, stride_bytes, offset_bytes of the
// first row.
ServedRows RowsFrom(const nb::tuple& part) {
  std::shared_ptr<MappedFile> keys;
  if (!part[0].is_none()) keys = nb::cast<std::shared_ptr<MappedFile>>(part[0]);
  const auto rows = nb::cast<std::shared_ptr<MappedFile>>(part[1]);
  const auto n = nb::cast<int64_t>(part[2]), stride = nb::cast<int64_t>(part[3]),
             offset = nb::cast<int64_t>(part[4]);
  if (n < 0 || stride < 1 || offset < 0 || (keys && static_cast<int64_t>(keys->size()) / 8 < n) ||
      static_cast<int64_t>(rows->size()) / stride < n) {
    throw InvalidArgument("part should have " + std::to_string(n) +
                          " rows but its files are too small");
  }
  auto owner =
      std::make_shared<std::pair<std::shared_ptr<MappedFile>, std::shared_ptr<MappedFile>>>(keys,
                                                                                            rows);
  const std::byte* first_key = keys ? keys->data() : nullptr;
  return {std::move(owner), reinterpret_cast<const int64_t*>(first_key), rows->data() + offset, n,
          stride};
}

std::vector<ServedRows> RowsFrom(const nb::list& parts) {
  std::vector<ServedRows> all;
  for (nb::handle part : parts) all.push_back(RowsFrom(nb::cast<nb::tuple>(part)));
  return all;
}

std::span<const int64_t> Keys(uintptr_t keys, int64_t n) {
  return {Address<const int64_t>(keys), static_cast<size_t>(n)};
}

// Takes and returns arrays: checking them in Python would cost more than a small lookup.
nb::tuple FindVectors(const ServedTable& table,
                      const nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>& ids) {
  const size_t n = ids.size(), dim = static_cast<size_t>(table.options().dim);
  auto* buffer = new RecycledBuffer(n * (dim * sizeof(float) + 1));
  nb::capsule owner(buffer, [](void* p) noexcept { delete static_cast<RecycledBuffer*>(p); });
  auto* vectors = buffer->as<float>();
  auto* found = buffer->as<uint8_t>() + n * dim * sizeof(float);
  {
    nb::gil_scoped_release unlocked;
    table.Read({ids.data(), n}, vectors, static_cast<int64_t>(dim), found);
  }
  std::vector<size_t> shape;
  for (size_t i = 0; i < ids.ndim(); ++i) shape.push_back(ids.shape(i));
  const nb::ndarray<nb::numpy, bool> flags(found, shape.size(), shape.data(), owner);
  shape.push_back(dim);
  return nb::make_tuple(nb::ndarray<nb::numpy, float>(vectors, shape.size(), shape.data(), owner),
                        flags);
}

}  // namespace

void BindServing(nb::module_& m) {
  nb::class_<MappedFile>(m, "MappedFile", "A file as read-only memory that processes share.")
      .def(nb::init<int, int64_t>(), "fd"_a, "bytes"_a)
      .def(nb::init<const std::string&, int64_t>(), "path"_a, "bytes"_a)
      .def_prop_ro("address",
                   [](const MappedFile& file) { return reinterpret_cast<uintptr_t>(file.data()); })
      .def_prop_ro("bytes", &MappedFile::size)
      .def("checksum", &MappedFile::Checksum, nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "served_row_bytes",
      [](int64_t dim, int dtype) { return ServedRowBytes(dim, static_cast<ServedDType>(dtype)); },
      "dim"_a, "dtype"_a);
  m.def(
      "encode_served_rows",
      [](uintptr_t values, int64_t n, int64_t dim, int dtype, uintptr_t out) {
        EncodeServedRows(Address<const float>(values), n, dim, static_cast<ServedDType>(dtype),
                         Address<std::byte>(out));
      },
      nb::call_guard<nb::gil_scoped_release>(), "values"_a, "n"_a, "dim"_a, "dtype"_a, "out"_a);

  nb::class_<ServedTable>(m, "ServedTable", "An immutable state of a table: rows by key.")
      .def(
          "__init__",
          [](ServedTable* self, const std::string& name, int64_t dim, int dtype, uint64_t seed,
             int table_dtype, int initializer, const std::vector<double>& initializer_values,
             const nb::list& parts, const std::string& index_path, uint32_t keys_crc) {
            ServedTableOptions options;
            options.name = name;
            options.dim = dim;
            options.dtype = static_cast<ServedDType>(dtype);
            options.seed = seed;
            options.table_dtype = static_cast<DType>(table_dtype);
            if (initializer >= 0) {
              options.initial = InitializerFrom(initializer, initializer_values);
            }
            std::vector<ServedRows> rows = RowsFrom(parts);
            nb::gil_scoped_release unlocked;
            new (self) ServedTable(options, std::move(rows), index_path, keys_crc);
          },
          "name"_a, "dim"_a, "dtype"_a, "seed"_a, "table_dtype"_a, "initializer"_a,
          "initializer_values"_a, "parts"_a, "index_path"_a, "keys_crc"_a,
          "initializer -1: a missing key reads 0.0.")
      .def(
          "with_increment",
          [](const ServedTable& self, uintptr_t removed, int64_t n, const nb::list& parts) {
            std::vector<ServedRows> rows = RowsFrom(parts);
            nb::gil_scoped_release unlocked;
            return std::const_pointer_cast<ServedTable>(
                self.With(Keys(removed, n), std::move(rows)));
          },
          "removed"_a, "n"_a, "parts"_a)
      .def(
          "with_shared",
          [](const ServedTable& self, int64_t rows, int by, uintptr_t numbers, int64_t n,
             uintptr_t values) {
            return std::const_pointer_cast<ServedTable>(self.WithShared(
                rows, static_cast<Ownership>(by), Keys(numbers, n), Address<const float>(values)));
          },
          "rows"_a, "by"_a, "numbers"_a, "n"_a, "values"_a)
      .def(
          "save_index",
          [](const ServedTable& self, const std::string& path, uint32_t keys_crc) {
            self.base().Save(path, keys_crc);
          },
          nb::call_guard<nb::gil_scoped_release>(), "path"_a, "keys_crc"_a)
      .def_prop_ro("size", &ServedTable::size)
      .def_prop_ro("dim", [](const ServedTable& table) { return table.options().dim; })
      .def_prop_ro("private_bytes", &ServedTable::private_bytes)
      .def("find", &FindVectors, "ids"_a, "Vectors and which ids have a row.")
      .def(
          "read_bags",
          [](const ServedTable& self, uintptr_t keys, int64_t n, uintptr_t offsets, int64_t bags,
             uintptr_t weights, bool mean, uintptr_t out, int64_t stride) {
            self.ReadBags(Keys(keys, n), Keys(offsets, bags + 1), Address<const float>(weights),
                          mean, Address<float>(out), stride);
          },
          nb::call_guard<nb::gil_scoped_release>(), "keys"_a, "n"_a, "offsets"_a, "bags"_a,
          "weights"_a, "mean"_a, "out"_a, "stride"_a);
}

}  // namespace embstore
