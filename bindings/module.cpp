// embstore._core: the engine for Python.
//
// Arrays are passed as addresses: src/embstore checks dtype, shape and device first and keeps the
// arrays alive during the call. So numpy, torch and TensorFlow memory is used in place, and a call
// costs a few microseconds. Every call that may take long releases the GIL.
#include "module.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "embstore/checksum.h"
#include "embstore/fork_guard.h"
#include "embstore/hash.h"
#include "embstore/kernels.h"
#include "embstore/memory.h"
#include "embstore/parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

// An array that is not initialised, in a recycled buffer.
template <typename T, typename... Sizes>
nb::ndarray<nb::numpy, T, nb::ndim<sizeof...(Sizes)>> Empty(Sizes... shape) {
  auto* buffer = new RecycledBuffer(sizeof(T) * (... * shape));
  nb::capsule owner(buffer, [](void* p) noexcept { delete static_cast<RecycledBuffer*>(p); });
  return {buffer->as<T>(), {shape...}, owner};
}

void OwnersOf(uintptr_t keys, int64_t n, uint32_t world, int ownership, uintptr_t out,
              uint64_t rows) {
  if (world < 1) throw InvalidArgument("world should be at least 1 but is: 0");
  if (ownership < 0 || ownership > static_cast<int>(Ownership::kOnRank)) {
    throw InvalidArgument("ownership should be between 0 and 4 but is: " +
                          std::to_string(ownership));
  }
  const auto* from = Address<const int64_t>(keys);
  auto* to = Address<int64_t>(out);
  constexpr int64_t kPerTask = 16384;
  ParallelFor((n + kPerTask - 1) / kPerTask, [&](int64_t task) {
    const int64_t end = std::min((task + 1) * kPerTask, n);
    for (int64_t i = task * kPerTask; i < end; ++i) {
      to[i] = Owner(from[i], world, static_cast<Ownership>(ownership), rows);
    }
  });
}

}  // namespace
}  // namespace embstore

NB_MODULE(_core, m) {
  using namespace embstore;
  nb::set_leak_warnings(false);  // tables that live until the interpreter exits are not leaks
  m.def("set_num_threads", &SetNumThreads, "threads"_a);
  m.def("get_num_threads", &NumThreads);
  m.def("isa", [] { return std::string(ActiveKernels().name); });
  m.def("empty_bytes", &Empty<uint8_t, size_t>, "bytes"_a,
        "Uninitialised bytes from the engine's recycled buffers.");
  m.def("empty_floats", &Empty<float, size_t, size_t>, "rows"_a, "columns"_a,
        "The same as float32 (rows, columns).");
  m.def("idle_pool_bytes", &IdleBufferBytes);
  m.def("owners", &OwnersOf, "keys"_a, "n"_a, "world"_a, "ownership"_a, "out"_a, "rows"_a = 0,
        nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "crc32",
      [](uintptr_t data, size_t bytes, uint32_t crc) {
        return Crc32(crc, Address<const void>(data), bytes);
      },
      "data"_a, "bytes"_a, "crc"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("crc32_combine", &Crc32Combine, "crc_a"_a, "crc_b"_a, "bytes_of_b"_a);
  // A fork waits for threads that work on tables. It releases the GIL, which a store written in
  // Python needs to finish.
  const auto before =
      nb::cpp_function(&ForkGuard::Prepare, nb::call_guard<nb::gil_scoped_release>());
  const auto after = nb::cpp_function(&ForkGuard::Release);
  nb::module_::import_("os").attr("register_at_fork")("before"_a = before,
                                                      "after_in_parent"_a = after);
  BindStore(m);
  BindTable(m);
  BindInitializer(m);
  BindLookup(m);
  BindRouting(m);
  BindBagMessages(m);
  BindParameterServer(m);
  BindSlotMap(m);
  BindServing(m);
  BindStringIds(m);
}
