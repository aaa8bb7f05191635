// What the files of the binding share.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "embstore/initializer.h"

namespace embstore {

void BindTable(nanobind::module_& m);
void BindInitializer(nanobind::module_& m);
void BindLookup(nanobind::module_& m);
void BindRouting(nanobind::module_& m);
void BindBagMessages(nanobind::module_& m);
void BindParameterServer(nanobind::module_& m);
void BindSlotMap(nanobind::module_& m);
void BindStore(nanobind::module_& m);
void BindServing(nanobind::module_& m);
void BindStringIds(nanobind::module_& m);

// Options from the numbers of embstore.initializers: value, mean, std_dev, lower, upper.
InitializerOptions InitializerFrom(int kind, const std::vector<double>& values);

// An address that Python handed over (0 is null).
template <typename T>
T* Address(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// A message as a string of Python, whatever bytes it quotes.
inline nanobind::object Text(const char* message) {
  return nanobind::steal(PyUnicode_DecodeUTF8(
      message, static_cast<Py_ssize_t>(std::strlen(message)), "backslashreplace"));
}

}  // namespace embstore
