// Binding of what a parameter server needs: plug-ins, and rows that are spread over several arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "embstore/pieces.h"
#include "embstore/plugin.h"
#include "embstore/redis_protocol.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

using PieceTuple = std::tuple<uintptr_t, int64_t, int64_t>;  // address, stride and size in bytes

std::vector<Piece> ToPieces(const std::vector<PieceTuple>& tuples) {
  std::vector<Piece> pieces;
  for (const auto& [base, stride, bytes] : tuples) {
    pieces.push_back({Address<std::byte>(base), stride, bytes});
  }
  return pieces;
}

// The commands for rows [first, last), at most `step` rows each, as one text. Valid until the next
// call.
template <typename Add>
nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> Commands(RedisRows& rows, int64_t first,
                                                            int64_t last, int64_t step,
                                                            const Add& add) {
  {
    const nb::gil_scoped_release release;
    rows.BeginText();
    for (int64_t at = first; at < last; at += step) add(at, std::min(at + step, last));
  }
  return {rows.text().data(), {rows.text().size()}, nb::find(rows)};
}

std::span<const int64_t> Numbers(uintptr_t address, int64_t n) {
  return {Address<const int64_t>(address), static_cast<size_t>(n)};
}

}  // namespace

void BindParameterServer(nb::module_& m) {
  m.def(
      "gather_pieces",
      [](const std::vector<PieceTuple>& pieces, uintptr_t slots, int64_t n, uintptr_t rows) {
        const std::vector<Piece> all = ToPieces(pieces);
        const nb::gil_scoped_release release;
        GatherPieces(all, Numbers(slots, n), Address<std::byte>(rows));
      },
      "pieces"_a, "slots"_a, "n"_a, "rows"_a);
  m.def(
      "scatter_pieces",
      [](const std::vector<PieceTuple>& pieces, uintptr_t slots, int64_t n, uintptr_t rows) {
        const std::vector<Piece> all = ToPieces(pieces);
        const nb::gil_scoped_release release;
        ScatterPieces(all, Numbers(slots, n), Address<const std::byte>(rows));
      },
      "pieces"_a, "slots"_a, "n"_a, "rows"_a);

  nb::class_<RedisRows>(m, "RedisRows")
      .def(
          "__init__",
          [](RedisRows* self, const std::string& head, const std::vector<std::string>& tails,
             const std::vector<std::vector<PieceTuple>>& values, uintptr_t ids, int64_t n,
             uintptr_t found) {
            std::vector<std::vector<Piece>> pieces;
            for (const auto& value : values) pieces.push_back(ToPieces(value));
            new (self)
                RedisRows(head, tails, std::move(pieces), Numbers(ids, n), Address<uint8_t>(found));
          },
          "head"_a, "tails"_a, "values"_a, "ids"_a, "n"_a, "found"_a)
      .def(
          "mget",
          [](RedisRows& self, int64_t first, int64_t last, int64_t step) {
            return Commands(self, first, last, step,
                            [&](int64_t a, int64_t b) { self.Mget(a, b); });
          },
          "first"_a, "last"_a, "step"_a)
      .def(
          "mset",
          [](RedisRows& self, int64_t first, int64_t last, int64_t step) {
            return Commands(self, first, last, step,
                            [&](int64_t a, int64_t b) { self.Mset(a, b); });
          },
          "first"_a, "last"_a, "step"_a)
      .def(
          "receive",
          [](RedisRows& self, uintptr_t bytes, size_t n) {
            return self.Receive({Address<const char>(bytes), n});
          },
          "bytes"_a, "n"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("waiting", &RedisRows::waiting)
      .def_prop_ro("error", &RedisRows::error)
      .def_prop_ro("most_value_bytes", &RedisRows::most_value_bytes);

  m.def("load_plugin", [](const std::string& path) {
    LoadedPlugin loaded;
    {
      const nb::gil_scoped_release release;
      loaded = LoadPlugin(path);
    }
    return std::make_tuple(loaded.type, loaded.is_new);
  });
  m.def("plugin_types", &PluginTypes);
  nb::class_<PluginInstance>(m, "PluginInstance")
      .def(nb::init<const std::string&, const std::string&, std::string, int64_t,
                    std::vector<int64_t>>(),
           "type"_a, "cfg"_a, "table"_a, "column"_a, "tensor_bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "pull",
          [](PluginInstance& self, uintptr_t ids, int64_t n, uintptr_t rows, uintptr_t found,
             double timeout_seconds) {
            self.Pull(Numbers(ids, n), Address<std::byte>(rows), Address<uint8_t>(found),
                      timeout_seconds);
          },
          "ids"_a, "n"_a, "rows"_a, "found"_a, "timeout_seconds"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "push",
          [](PluginInstance& self, uintptr_t ids, int64_t n, uintptr_t rows,
             double timeout_seconds) {
            self.Push(Numbers(ids, n), Address<const std::byte>(rows), timeout_seconds);
          },
          "ids"_a, "n"_a, "rows"_a, "timeout_seconds"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace embstore
