// Binding of string ids.
#include "embstore/string_ids.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <span>
#include <string>

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

size_t Count(int64_t n) { return static_cast<size_t>(n); }

template <class Offset>
void Slices(uintptr_t data, int64_t bytes, uintptr_t offsets, int64_t n, uint64_t seed,
            uintptr_t ids) {
  IdsOfSlices(std::span{Address<const uint8_t>(data), Count(bytes)},
              std::span{Address<const Offset>(offsets), Count(n + 1)}, seed,
              {Address<int64_t>(ids), Count(n)});
}

// Hashes the str and bytes elements of a list. Returns the positions of all others, whose ids stay
// as they are.
nb::list Objects(nb::list strings, uint64_t seed, uintptr_t ids, int64_t n) {
  nb::list others;
  if (static_cast<int64_t>(strings.size()) != n) {
    throw nb::value_error("the list changed its length");
  }
  auto* out = Address<int64_t>(ids);
  for (int64_t i = 0; i < n; ++i) {
    const nb::handle object = PyList_GetItem(strings.ptr(), i);
    if (PyUnicode_Check(object.ptr())) {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
      if (text == nullptr) throw nb::python_error();
      out[i] = IdOf({text, Count(size)}, seed);
    } else if (PyBytes_Check(object.ptr())) {
      const nb::bytes text = nb::borrow<nb::bytes>(object);
      out[i] = IdOf({text.c_str(), text.size()}, seed);
    } else {
      others.append(i);
    }
  }
  return others;
}

}  // namespace

void BindStringIds(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.def("id_of", &IdOf, "text"_a, "seed"_a);
  m.def("ids_of_slices32", &Slices<int32_t>, Unlocked(), "data"_a, "bytes"_a, "offsets"_a, "n"_a,
        "seed"_a, "ids"_a);
  m.def("ids_of_slices64", &Slices<int64_t>, Unlocked(), "data"_a, "bytes"_a, "offsets"_a, "n"_a,
        "seed"_a, "ids"_a);
  m.def(
      "ids_of_fixed_bytes",
      [](uintptr_t data, int64_t width, bool padded, int64_t n, uint64_t seed, uintptr_t ids) {
        IdsOfFixedBytes({Address<const uint8_t>(data), Count(width * n)}, Count(width), padded,
                        seed, {Address<int64_t>(ids), Count(n)});
      },
      Unlocked(), "data"_a, "width"_a, "padded"_a, "n"_a, "seed"_a, "ids"_a);
  m.def(
      "ids_of_fixed_unicode",
      [](uintptr_t data, int64_t width, int64_t n, uint64_t seed, uintptr_t ids) {
        IdsOfFixedUnicode({Address<const uint32_t>(data), Count(width * n)}, Count(width), seed,
                          {Address<int64_t>(ids), Count(n)});
      },
      Unlocked(), "data"_a, "width"_a, "n"_a, "seed"_a, "ids"_a);
  m.def("ids_of_objects", &Objects, "strings"_a, "seed"_a, "ids"_a, "n"_a);
}

}  // namespace embstore
