#include "embstore/plugin.h"

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <numeric>
#include <sstream>
#include <utility>

#include "argument_check.h"
#include "embstore/parameter_server_plugin.h"
#include "embstore/types.h"

namespace embstore {

struct PluginLibrary {
  std::string path;
  void* (*initialize)(const char*);
  void (*finalize)(void*);
  void (*pull)(void*, IOPullParameter);
  void (*push)(void*, IOPushParameter);
};

namespace {

static_assert(sizeof(IOPullParameter) == 64 && sizeof(IOPushParameter) == 88);

constexpr size_t kMostIds = UINT32_MAX / 64;

std::mutex libraries_mutex;
std::map<std::string, PluginLibrary>& Libraries() {
  static std::map<std::string, PluginLibrary> libraries;
  return libraries;
}

template <typename Function>
Function* Symbol(void* handle, const std::string& path, const char* name,
                 const char* other = nullptr) {
  void* symbol = dlsym(handle, name);
  if (symbol == nullptr && other != nullptr) symbol = dlsym(handle, other);
  if (symbol == nullptr) {
    throw InvalidArgument("the plug-in " + path + " should export " + name + " but does not");
  }
  return reinterpret_cast<Function*>(symbol);
}

// A call on its way. The plug-in holds one reference until it completes, the host another until it
// stops waiting, so a plug-in that is late writes into memory that is still there.
struct Call {
  std::mutex mutex;
  std::condition_variable completed;
  bool done = false;
  std::string error;

  std::vector<int64_t> ids;
  std::vector<int64_t> tensor_bytes, tensor_begins;
  int64_t row_bytes = 0;
  std::vector<std::byte> rows;
  std::vector<uint8_t> seen;  // pieces
  std::vector<uint32_t> tensor_ids;
  std::vector<uint64_t> offsets;

  void Fail(const std::string& message) {
    const std::lock_guard lock(mutex);
    if (error.empty()) error = message.empty() ? "the plug-in gave no reason" : message;
  }
};

using Reference = std::shared_ptr<Call>;

Call& CallOf(void* context) { return **static_cast<Reference*>(context); }

void OnError(void* context, const char* message) {
  CallOf(context).Fail(message == nullptr ? "" : message);
}

void OnFetched(void* context, uint32_t offset, uint32_t tensor, void* data, uint32_t bytes) {
  Call& call = CallOf(context);
  if (data == nullptr) return;
  if (offset >= call.ids.size() || tensor >= call.tensor_bytes.size()) {
    return call.Fail("it answered for offset " + std::to_string(offset) + ", tensor " +
                     std::to_string(tensor) + ", which was not asked for");
  }
  if (bytes != call.tensor_bytes[tensor]) {
    return call.Fail("tensor " + std::to_string(tensor) + " of id " +
                     std::to_string(call.ids[offset]) + " should have " +
                     std::to_string(call.tensor_bytes[tensor]) +
                     " bytes but has: " + std::to_string(bytes));
  }
  std::memcpy(call.rows.data() + offset * call.row_bytes + call.tensor_begins[tensor], data, bytes);
  call.seen[offset * call.tensor_bytes.size() + tensor] = 1;
}

void OnComplete(void* context) {
  const std::unique_ptr<Reference> reference(static_cast<Reference*>(context));
  Call& call = **reference;
  const std::lock_guard lock(call.mutex);
  call.done = true;
  call.completed.notify_all();
}

// Starts the call and waits for it. `start` gets the context.
template <typename Start>
void Run(const Reference& call, double timeout_seconds, const std::string& what,
         const Start& start) {
  auto* context = new Reference(call);
  try {
    start(context);
  } catch (const std::exception& error) {  // thrown instead of completed: the context stays, unused
    throw InvalidState(what + ": " + error.what());
  } catch (...) {
    throw InvalidState(what + ": the plug-in threw something that is no std::exception");
  }
  std::unique_lock lock(call->mutex);
  if (!call->completed.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                [&] { return call->done; })) {
    std::ostringstream message;
    message << what << ": not completed within " << timeout_seconds << " seconds";
    throw InvalidState(message.str());
  }
  if (!call->error.empty()) throw InvalidState(what + ": " + call->error);
}

}  // namespace

LoadedPlugin LoadPlugin(const std::string& path) {
  // Not closed when it is refused: a library may have started threads as it was loaded.
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw InvalidArgument("the plug-in cannot be loaded: " + std::string(reason ? reason : path));
  }
  const char* type = *Symbol<const char*>(handle, path, "IO_type");
  CheckArgument(type != nullptr && *type != '\0', "IO_type of the plug-in " + path, "a name",
                "empty");
  const PluginLibrary library{
      path, Symbol<void*(const char*)>(handle, path, "IO_Initialize"),
      Symbol<void(void*)>(handle, path, "IO_Finalize"),
      Symbol<void(void*, IOPullParameter)>(handle, path, "IO_Pull", "IO_Fetch"),
      Symbol<void(void*, IOPushParameter)>(handle, path, "IO_Push")};
  const std::lock_guard lock(libraries_mutex);
  const bool is_new = Libraries().emplace(type, library).second;
  if (is_new) {
    if (void* symbol = dlsym(handle, "IO_SetErrorHandler")) {
      reinterpret_cast<void (*)(IOErrorHandler)>(symbol)(&OnError);
    }
  }
  return {type, is_new};
}

std::vector<std::string> PluginTypes() {
  const std::lock_guard lock(libraries_mutex);
  std::vector<std::string> types;
  for (const auto& [type, library] : Libraries()) types.push_back(type);
  return types;
}

PluginInstance::PluginInstance(const std::string& type, const std::string& cfg, std::string table,
                               int64_t column, std::vector<int64_t> tensor_bytes)
    : table_(std::move(table)), column_(column), tensor_bytes_(std::move(tensor_bytes)) {
  CheckArgument(!tensor_bytes_.empty(), "tensor_bytes", "one size for each tensor", "empty");
  for (const int64_t bytes : tensor_bytes_) {
    CheckArgument(bytes > 0 && bytes <= INT32_MAX, "tensor_bytes", "above 0 and below 2^31", bytes);
    row_bytes_ += bytes;
  }
  {
    const std::lock_guard lock(libraries_mutex);
    const auto found = Libraries().find(type);
    CheckArgument(found != Libraries().end(), "type", "that of a plug-in that was loaded", type);
    library_ = &found->second;  // nodes of a map stay where they are
  }
  instance_ = library_->initialize(cfg.c_str());
  if (instance_ == nullptr) {
    throw InvalidState("the plug-in " + library_->path + " refused to open the table " + table_);
  }
}

PluginInstance::~PluginInstance() { library_->finalize(instance_); }

void PluginInstance::Pull(std::span<const int64_t> ids, std::byte* rows, uint8_t* found,
                          double timeout_seconds) {
  CheckArgument(ids.size() <= kMostIds, "the number of ids", "below 2^26", ids.size());
  if (ids.empty()) return;
  const std::lock_guard lock(mutex_);
  const auto call = std::make_shared<Call>();
  call->ids.assign(ids.begin(), ids.end());
  call->tensor_bytes = tensor_bytes_;
  call->tensor_begins.resize(tensor_bytes_.size());
  std::exclusive_scan(tensor_bytes_.begin(), tensor_bytes_.end(), call->tensor_begins.begin(),
                      int64_t{0});
  call->row_bytes = row_bytes_;
  call->rows.resize(ids.size() * static_cast<size_t>(row_bytes_));
  call->seen.resize(ids.size() * tensor_bytes_.size());
  Run(call, timeout_seconds, "pull of " + table_, [&](void* context) {
    library_->pull(instance_, {table_.c_str(), 1, static_cast<uint32_t>(ids.size()), &column_,
                               call->ids.data(), static_cast<uint32_t>(tensor_bytes_.size()),
                               context, &OnFetched, &OnComplete});
  });
  std::memcpy(rows, call->rows.data(), call->rows.size());
  const size_t tensors = tensor_bytes_.size();
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint8_t* seen = call->seen.data() + i * tensors;
    found[i] = std::accumulate(seen, seen + tensors, size_t{0}) == tensors;
  }
}

void PluginInstance::Push(std::span<const int64_t> ids, const std::byte* rows,
                          double timeout_seconds) {
  CheckArgument(ids.size() <= kMostIds, "the number of ids", "below 2^26", ids.size());
  if (ids.empty()) return;
  const std::lock_guard lock(mutex_);
  const auto call = std::make_shared<Call>();
  call->ids.assign(ids.begin(), ids.end());
  call->rows.assign(rows, rows + ids.size() * static_cast<size_t>(row_bytes_));
  call->tensor_ids.resize(tensor_bytes_.size());
  std::iota(call->tensor_ids.begin(), call->tensor_ids.end(), 0u);
  call->offsets.reserve(ids.size() * tensor_bytes_.size() + 1);
  call->offsets.push_back(0);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (const int64_t bytes : tensor_bytes_) {
      call->offsets.push_back(call->offsets.back() + static_cast<uint64_t>(bytes));
    }
  }
  Run(call, timeout_seconds, "push of " + table_, [&](void* context) {
    library_->push(instance_, {table_.c_str(), 1, static_cast<uint32_t>(ids.size()), &column_,
                               call->ids.data(), static_cast<uint32_t>(tensor_bytes_.size()),
                               call->tensor_ids.data(), static_cast<uint32_t>(call->offsets.size()),
                               call->offsets.data(), call->rows.data(), context, &OnComplete});
  });
}

}  // namespace embstore
