// Checks of a caller's numbers: every message names the argument, the rule and the value.
#pragma once

#include <cmath>
#include <sstream>
#include <string_view>

#include "embstore/types.h"

namespace embstore {

// Throws "<name> should be <rule> but is: <value>" unless `ok`.
template <class T>
void CheckArgument(bool ok, std::string_view name, std::string_view rule, const T& value) {
  if (ok) return;
  std::ostringstream message;
  message << name << " should be " << rule << " but is: " << value;
  throw InvalidArgument(message.str());
}

inline void CheckFinite(std::string_view name, double value) {
  CheckArgument(std::isfinite(value), name, "finite", value);
}

inline void CheckNotNegative(std::string_view name, double value) {
  CheckFinite(name, value);
  CheckArgument(value >= 0.0, name, "at least 0", value);
}

}  // namespace embstore
