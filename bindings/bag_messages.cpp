// Binding of the messages that carry bags, and of copies of columns.
#include "embstore/bag_messages.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "embstore/columns.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

// (messages, keys of each, bytes of each)
nb::tuple PyPack(uintptr_t keys, int64_t n, uintptr_t offsets, int64_t bags, uintptr_t weights,
                 int64_t features, uint32_t world, uint32_t self, int ownership, uint64_t rows,
                 const std::vector<int32_t>& rank_of_feature) {
  const BagBatch batch{{Address<const int64_t>(keys), static_cast<size_t>(n)},
                       {Address<const int64_t>(offsets), static_cast<size_t>(bags + 1)},
                       Address<const float>(weights),
                       features};
  const BagOwners owners{world, self, rank_of_feature, static_cast<Ownership>(ownership), rows};
  PackedBags packed;
  {
    nb::gil_scoped_release unlocked;
    packed = PackBags(batch, owners);
  }
  size_t bytes = 0;
  for (const int64_t of_rank : packed.bytes) bytes += static_cast<size_t>(of_rank);
  auto* buffer = new RecycledBuffer(std::move(packed.messages));
  nb::capsule owner(buffer, [](void* p) noexcept { delete static_cast<RecycledBuffer*>(p); });
  return nb::make_tuple(nb::ndarray<nb::numpy, uint8_t>(buffer->as<uint8_t>(), {bytes}, owner),
                        std::move(packed.keys), std::move(packed.bytes));
}

// from, its stride, to, its stride, bytes
using PyRun = std::tuple<uintptr_t, int64_t, uintptr_t, int64_t, int64_t>;

void PyCopyColumns(const std::vector<PyRun>& runs, int64_t rows) {
  std::vector<ColumnRun> all;
  for (const auto& [from, from_stride, to, to_stride, bytes] : runs) {
    all.push_back(
        {Address<const std::byte>(from), from_stride, Address<std::byte>(to), to_stride, bytes});
  }
  CopyColumns(all, rows);
}

}  // namespace

void BindBagMessages(nb::module_& m) {
  m.def("bag_message_bytes", &BagMessageBytes, "keys"_a, "features"_a, "samples"_a, "weighted"_a);
  m.def("pack_bags", &PyPack, "keys"_a, "n"_a, "offsets"_a, "bags"_a, "weights"_a, "features"_a,
        "world"_a, "self"_a, "ownership"_a, "rows"_a, "rank_of_feature"_a);
  m.def(
      "unpack_bags",
      [](const std::vector<std::pair<uintptr_t, size_t>>& messages,  // address, bytes
         const std::vector<int64_t>& of_keys, const std::vector<int64_t>& samples, int64_t features,
         uintptr_t offsets, uintptr_t keys, uintptr_t weights) {
        std::vector<std::span<const std::byte>> spans;
        for (const auto& [begin, bytes] : messages) {
          spans.emplace_back(Address<const std::byte>(begin), bytes);
        }
        UnpackBags({spans, of_keys, samples, features}, Address<int64_t>(offsets),
                   Address<int64_t>(keys), Address<float>(weights));
      },
      nb::call_guard<nb::gil_scoped_release>(), "messages"_a, "of_keys"_a, "samples"_a,
      "features"_a, "offsets"_a, "keys"_a, "weights"_a);
  m.def("copy_columns", &PyCopyColumns, nb::call_guard<nb::gil_scoped_release>(), "runs"_a,
        "rows"_a);
}

}  // namespace embstore
