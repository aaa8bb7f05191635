// Binding of routing.
#include "embstore/routing.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

nb::tuple PyRoute(uintptr_t keys, int64_t n, uintptr_t offsets, int64_t cells, uint32_t world,
                  int ownership, uintptr_t unique, uint64_t rows,
                  const std::vector<int32_t>& rank_of_cell) {
  auto* route = new Route;
  nb::capsule owner(route, [](void* p) noexcept { delete static_cast<Route*>(p); });
  {
    nb::gil_scoped_release unlocked;
    *route = RouteKeys({Address<const int64_t>(keys), static_cast<size_t>(n)},
                       {Address<const int64_t>(offsets), static_cast<size_t>(cells + 1)}, world,
                       static_cast<Ownership>(ownership),
                       {Address<const uint8_t>(unique), unique ? static_cast<size_t>(cells) : 0},
                       rows, rank_of_cell);
  }
  return nb::make_tuple(
      nb::ndarray<nb::numpy, int64_t>(route->keys.data(), {route->keys.size()}, owner),
      nb::ndarray<nb::numpy, int32_t>(
          route->counts.data(), {static_cast<size_t>(world), static_cast<size_t>(cells)}, owner),
      nb::ndarray<nb::numpy, int64_t>(route->index.data(), {route->index.size()}, owner));
}

}  // namespace

void BindRouting(nb::module_& m) {
  m.def("route_keys", &PyRoute, "keys"_a, "n"_a, "offsets"_a, "cells"_a, "world"_a, "ownership"_a,
        "unique"_a, "rows"_a = 0, "rank_of_cell"_a = std::vector<int32_t>{});
  m.def(
      "sum_rows",
      [](uintptr_t vectors, uintptr_t index, int64_t n, int64_t dim, int64_t rows, uintptr_t out) {
        SumRows(Address<const float>(vectors),
                {Address<const int64_t>(index), static_cast<size_t>(n)}, dim, rows,
                Address<float>(out));
      },
      nb::call_guard<nb::gil_scoped_release>(), "vectors"_a, "index"_a, "n"_a, "dim"_a, "rows"_a,
      "out"_a);
}

}  // namespace embstore
