// Binding of the forward and backward pass over several tables.
#include "embstore/lookup.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>
#include <vector>

#include "embstore/gradient.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

// Vectors of a batch as Python describes them: address, dtype, stride and positions.
VectorsView View(uintptr_t base, int dtype, int64_t stride, uintptr_t positions) {
  VectorsView view;
  view.base = Address<void>(base);
  view.dtype = static_cast<DType>(dtype);
  view.stride = stride;
  view.positions = Address<const int64_t>(positions);
  return view;
}

std::span<const int64_t> Offsets(uintptr_t offsets, int64_t bags) {
  if (!offsets) return {};
  return {Address<const int64_t>(offsets), static_cast<size_t>(bags + 1)};
}

nb::list PyLookUp(const std::vector<LookupRequest>& requests, int access) {
  std::vector<LookupResult> results;
  {
    nb::gil_scoped_release unlocked;
    results = LookUp(requests, static_cast<Access>(access));
  }
  nb::list list;
  for (LookupResult& result : results) {
    list.append(nb::make_tuple(nb::cast(std::move(result.slots)), result.refused));
  }
  return list;
}

nb::tuple PyReduce(const GradientRequest& request) {
  auto* reduced = new ReducedGradients;
  nb::capsule owner(reduced, [](void* p) noexcept { delete static_cast<ReducedGradients*>(p); });
  {
    nb::gil_scoped_release unlocked;
    *reduced = ReduceGradients(request);
  }
  const auto n = reduced->keys.size();
  const auto dim = static_cast<size_t>(request.slots->table().dim());
  return nb::make_tuple(
      nb::ndarray<nb::numpy, int64_t>(reduced->keys.data(), {n}, owner),
      nb::ndarray<nb::numpy, float>(reduced->sums.data(), {n, dim}, owner),
      nb::ndarray<nb::numpy, int64_t>(reduced->shared.data(), {reduced->shared.size()}, owner));
}

}  // namespace

void BindLookup(nb::module_& m) {
  nb::class_<SlotList>(m, "SlotList", "The rows of a training batch, pinned while this lives.")
      .def("__len__", &SlotList::size);

  nb::class_<LookupRequest>(m, "LookupRequest")
      .def(
          "__init__",
          [](LookupRequest* self, std::shared_ptr<Table> table, uintptr_t keys, int64_t n,
             int pooling, uintptr_t offsets, int64_t bags, uintptr_t weights, uintptr_t out,
             int out_dtype, int64_t out_stride, uintptr_t positions, uintptr_t initial,
             uintptr_t admitted) {
            new (self) LookupRequest{std::move(table),
                                     {Address<const int64_t>(keys), static_cast<size_t>(n)},
                                     static_cast<Pooling>(pooling),
                                     Offsets(offsets, bags),
                                     Address<const float>(weights),
                                     Address<const float>(initial),
                                     Address<const uint8_t>(admitted),
                                     View(out, out_dtype, out_stride, positions)};
          },
          "table"_a, "keys"_a, "n"_a, "pooling"_a, "offsets"_a, "bags"_a, "weights"_a, "out"_a,
          "out_dtype"_a, "out_stride"_a, "positions"_a, "initial"_a = 0, "admitted"_a = 0);

  nb::class_<GradientRequest>(m, "GradientRequest")
      .def(
          "__init__",
          [](GradientRequest* self, const SlotList& slots, int pooling, uintptr_t offsets,
             int64_t bags, uintptr_t weights, uintptr_t gradients, int dtype, int64_t stride,
             uintptr_t positions, const StepOptions& step) {
            new (self) GradientRequest{&slots,
                                       static_cast<Pooling>(pooling),
                                       Offsets(offsets, bags),
                                       Address<const float>(weights),
                                       View(gradients, dtype, stride, positions),
                                       step};
          },
          nb::keep_alive<1, 2>(), "slots"_a, "pooling"_a, "offsets"_a, "bags"_a, "weights"_a,
          "gradients"_a, "dtype"_a, "stride"_a, "positions"_a, "step"_a);

  nb::class_<KeyGradients>(m, "KeyGradients")
      .def(
          "__init__",
          [](KeyGradients* self, std::shared_ptr<Table> table, uintptr_t keys, int64_t n,
             uintptr_t offsets, int64_t bags, uintptr_t gradients, const StepOptions& step) {
            const int64_t dim = table->dim();
            new (self) KeyGradients{std::move(table),
                                    {Address<const int64_t>(keys), static_cast<size_t>(n)},
                                    Offsets(offsets, bags),
                                    View(gradients, static_cast<int>(DType::kFloat32), dim, 0),
                                    step};
          },
          "table"_a, "keys"_a, "n"_a, "offsets"_a, "bags"_a, "gradients"_a, "step"_a);

  m.def("look_up", &PyLookUp, "requests"_a, "access"_a);
  m.def(
      "apply_gradients",
      [](const std::vector<GradientRequest>& requests) { ApplyGradients(requests); },
      nb::call_guard<nb::gil_scoped_release>(), "requests"_a);
  m.def(
      "apply_gradients_by_key",
      [](const std::vector<KeyGradients>& requests, bool renew_scores) {
        return ApplyGradientsByKey(requests, renew_scores);
      },
      nb::call_guard<nb::gil_scoped_release>(), "requests"_a, "renew_scores"_a);
  m.def("reduce_gradients", &PyReduce, "request"_a);
  m.def(
      "weight_gradients",
      [](const GradientRequest& request, uintptr_t out) {
        WeightGradients(request, Address<float>(out));
      },
      nb::call_guard<nb::gil_scoped_release>(), "request"_a, "out"_a);
}

}  // namespace embstore
