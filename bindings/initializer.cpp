// Binding of the initializers: the vectors that new rows start with.
#include "embstore/initializer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "embstore/parallel.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {

InitializerOptions InitializerFrom(int kind, const std::vector<double>& values) {
  const auto number = [&](size_t i) { return static_cast<float>(values.at(i)); };
  InitializerOptions options;
  options.kind = static_cast<InitializerKind>(kind);
  options.value = number(0);
  options.mean = number(1);
  options.std_dev = number(2);
  options.lower = number(3);
  options.upper = number(4);
  Validate(options);
  return options;
}

namespace {

// out (n, dim) of float32.
void InitialRows(int kind, const std::vector<double>& values, uint64_t seed,
                 const std::string& table, uintptr_t keys, int64_t n, int64_t dim, uintptr_t out) {
  const Initializer initializer(InitializerFrom(kind, values), seed, table);
  constexpr int64_t kPerTask = 256;
  ParallelFor((n + kPerTask - 1) / kPerTask, [&](int64_t task) {
    for (int64_t i = task * kPerTask; i < std::min((task + 1) * kPerTask, n); ++i) {
      initializer.Fill(Address<const int64_t>(keys)[i],
                       {Address<float>(out) + i * dim, static_cast<size_t>(dim)});
    }
  });
}

}  // namespace

void BindInitializer(nb::module_& m) {
  m.def("initial_rows", &InitialRows, "kind"_a, "values"_a, "seed"_a, "table"_a, "keys"_a, "n"_a,
        "dim"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace embstore
