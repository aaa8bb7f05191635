// What CheckInvariants methods say when they find a bug of the engine.
#pragma once

#include <stdexcept>
#include <string>

namespace embstore {

// Throws std::logic_error unless `holds`. `rule` states what should hold.
inline void RequireInvariant(bool holds, const char* rule) {
  if (!holds) throw std::logic_error(std::string("broken invariant: ") + rule);
}

}  // namespace embstore
