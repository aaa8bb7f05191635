// Plug-ins of parameter servers: shared libraries with the interface of parameter_server_plugin.h.
//
// Thread safety: every function and method may be called from any thread; calls on one instance
// follow one another.
#pragma once

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
  bool is_new;       // false: another library had this type before, and stays
};

// Loads a library for the rest of the process. Throws InvalidArgument with the reason: the file
// cannot be loaded, or a symbol is missing.
LoadedPlugin LoadPlugin(const std::string& path);
std::vector<std::string> PluginTypes();

// One table (or one column of it) on the server of a plug-in. A row is the concatenation of its
// tensors.
class PluginInstance {
 public:
  // Throws InvalidArgument when there is no such type, InvalidState when the plug-in refuses `cfg`.
  PluginInstance(const std::string& type, const std::string& cfg, std::string table, int64_t column,
                 std::vector<int64_t> tensor_bytes);
  ~PluginInstance();
  PluginInstance(const PluginInstance&) = delete;
  PluginInstance& operator=(const PluginInstance&) = delete;

  int64_t row_bytes() const { return row_bytes_; }

  // rows + i * row_bytes() is set where found[i] becomes 1. Both throw InvalidState with the
  // message of the plug-in, when it answers with a value of the wrong length, or when it has not
  // both completed and returned in time. The buffers of a late call stay alive until it has, and no
  // other call begins before that: those throw when their own time is over.
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
  std::timed_mutex mutex_;            // one call at a time
  std::shared_ptr<PluginCall> call_;  // the last one
};

}  // namespace embstore
