// Parameter server plug-ins: shared libraries with the interface of parameter_server_plugin.h.
//
// Thread safety: every function and method may be called from any thread; an instance runs one call
// at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace embstore {

struct PluginCall;
struct PluginLibrary;

struct LoadedPlugin {
  std::string type;  // IO_type
  bool is_new;       // false: a library of this type was loaded before, and is kept
};

// Loads a library for the rest of the process. Throws InvalidArgument with the reason: the file
// cannot be loaded, or a symbol is missing.
LoadedPlugin LoadPlugin(const std::string& path);
std::vector<std::string> PluginTypes();

// One table (or one column of it) on a plug-in's server. A row is the concatenation of its tensors.
class PluginInstance {
 public:
  // Throws InvalidArgument for an unknown type, InvalidState when the plug-in refuses `cfg`.
  PluginInstance(const std::string& type, const std::string& cfg, std::string table, int64_t column,
                 std::vector<int64_t> tensor_bytes);
  ~PluginInstance();
  PluginInstance(const PluginInstance&) = delete;
  PluginInstance& operator=(const PluginInstance&) = delete;

  int64_t row_bytes() const { return row_bytes_; }

  // Sets rows + i * row_bytes() where found[i] becomes 1. Both throw InvalidState with the
  // plug-in's message, when a value has the wrong length, or when the call has not both completed
  // and returned in time. The buffers of a late call stay alive until then, and the next call waits
  // for it, or throws at its own deadline.
  void Pull(std::span<const int64_t> ids, std::byte* rows, uint8_t* found, double timeout_seconds);
  void Push(std::span<const int64_t> ids, const std::byte* rows, double timeout_seconds);

 private:
  std::shared_ptr<PluginCall> NewCall(std::span<const int64_t> ids) const;
  template <typename Start>
  void Run(const std::shared_ptr<PluginCall>& call, const std::string& what, double timeout_seconds,
           const Start& start);

  const PluginLibrary* library_;
  void* instance_ = nullptr;
  std::string table_;
  int64_t column_;
  std::vector<int64_t> tensor_bytes_;
  int64_t row_bytes_ = 0;
  // One call at a time. Not a std::timed_mutex, whose lock the thread sanitizer does not see.
  std::mutex mutex_;
  std::condition_variable freed_;
  bool busy_ = false;
  std::shared_ptr<PluginCall> call_;  // the last one
};

}  // namespace embstore
