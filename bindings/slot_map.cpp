// Binding of SlotMap: pairs come back as arrays of (key, slot).
#include "embstore/slot_map.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <span>

#include "embstore/memory.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

using Pairs = nb::ndarray<nb::numpy, int64_t, nb::shape<-1, 2>>;
static_assert(sizeof(KeySlot) == 2 * sizeof(int64_t));

// Calls without the GIL, then copies, since the spans of a SlotMap are valid until its next call.
// The copy uses a recycled buffer: fresh pages would cost more than the call.
template <typename Call>
Pairs Unlocked(const Call& call) {
  auto* kept = new RecycledBuffer;
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<RecycledBuffer*>(p); });
  size_t count = 0;
  {
    nb::gil_scoped_release release;
    const auto pairs = call();
    count = pairs.size();
    *kept = RecycledBuffer(count * sizeof(KeySlot));
    std::copy_n(pairs.data(), count, kept->as<KeySlot>());
  }
  return Pairs(kept->as<int64_t>(), {count, 2}, owner);
}

std::span<const int64_t> Keys(uintptr_t address, int64_t n) {
  return {Address<const int64_t>(address), static_cast<size_t>(n)};
}

}  // namespace

void BindSlotMap(nb::module_& m) {
  nb::class_<SlotMap>(m, "SlotMap")
      .def(
          "__init__",
          [](SlotMap* self, int64_t slots, int min_used_freq_power) {
            new (self) SlotMap({slots, min_used_freq_power});
          },
          "slots"_a, "min_used_freq_power"_a)
      .def_prop_ro("slots", &SlotMap::slots)
      .def_prop_ro("size", &SlotMap::size)
      .def_prop_ro("free_slots", &SlotMap::free_slots)
      .def_prop_ro("last_time", &SlotMap::last_time)
      .def_prop_ro("bytes", &SlotMap::bytes)
      .def(
          "find",
          [](SlotMap& map, uintptr_t keys, int64_t n, int64_t time, uintptr_t out) {
            return map.Find(Keys(keys, n), time, Address<int64_t>(out));
          },
          "keys"_a, "n"_a, "time"_a, "out"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "victims",
          [](SlotMap& map, int64_t count, int64_t pinned_from) {
            return Unlocked([&] { return map.Victims(count, pinned_from); });
          },
          "count"_a, "pinned_from"_a)
      .def("drop", &SlotMap::Drop, nb::call_guard<nb::gil_scoped_release>())
      .def("admit", [](SlotMap& map) { return Unlocked([&] { return map.Admit(); }); })
      .def(
          "forget", [](SlotMap& map, uintptr_t keys, int64_t n) { map.Forget(Keys(keys, n)); },
          "keys"_a, "n"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "worst",
          [](SlotMap& map, int64_t count) { return Unlocked([&] { return map.Worst(count); }); },
          "count"_a)
      .def(
          "used_since",
          [](SlotMap& map, int64_t since) {
            return Unlocked([&] { return map.UsedSince(since); });
          },
          "since"_a);
}

}  // namespace embstore
