#include "embstore/plugin.h"

#include <dlfcn.h>
#include <pthread.h>

#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <sstream>
#include <thread>
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
std::map<std::string, PluginLibrary> libraries;

// A child that is forked while a thread loads a plug-in may load one too. When this library is
// loaded, for the reason that ForkGuard::kRegistered has.
[[maybe_unused]] const int registered =
    pthread_atfork([] { libraries_mutex.lock(); }, [] { libraries_mutex.unlock(); },
                   [] { libraries_mutex.unlock(); });

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

using Clock = std::chrono::steady_clock;

// Without memory for it, a shorter one that needs none.
std::string TextOf(const char* message) noexcept {
  try {
    return message;
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

}  // namespace

// A running call and all memory that the plug-in may use during it. The plug-in holds one reference
// until it completes, the thread that runs it another until it returns, and the host a third until
// it stops waiting. So a late plug-in never uses freed memory.
struct PluginCall {
  std::mutex mutex;
  std::condition_variable changed;
  bool completed = false;  // the plug-in said so, or threw
  bool returned = false;
  std::string error;

  std::string table;
  int64_t column = 0;
  std::vector<int64_t> ids;
  std::vector<int64_t> tensor_bytes, tensor_begins;
  int64_t row_bytes = 0;
  std::vector<std::byte> rows;
  std::vector<uint8_t> seen;  // pieces
  std::vector<uint32_t> tensor_ids;
  std::vector<uint64_t> offsets;

  bool WaitUntil(Clock::time_point deadline) {
    std::unique_lock lock(mutex);
    return changed.wait_until(lock, deadline, [&] { return completed && returned; });
  }

  // The first message stays. Must not throw: the caller may be code in C.
  void Fail(const char* message) noexcept {
    const std::lock_guard lock(mutex);
    if (error.empty()) error = TextOf(*message ? message : "the plug-in gave no reason");
  }
};

namespace {

using Call = PluginCall;
using Reference = std::shared_ptr<Call>;

Call& CallOf(void* context) { return **static_cast<Reference*>(context); }

void OnError(void* context, const char* message) {
  CallOf(context).Fail(message == nullptr ? "" : message);
}

void OnFetched(void* context, uint32_t offset, uint32_t tensor, void* data, uint32_t bytes) {
  Call& call = CallOf(context);
  if (data == nullptr) return;
  char message[160];
  if (offset >= call.ids.size() || tensor >= call.tensor_bytes.size()) {
    std::snprintf(message, sizeof(message),
                  "it answered for offset %u, tensor %u, which was not asked for", offset, tensor);
    return call.Fail(message);
  }
  if (bytes != call.tensor_bytes[tensor]) {
    std::snprintf(message, sizeof(message),
                  "tensor %u of id %" PRId64 " should have %" PRId64 " bytes but has: %u", tensor,
                  call.ids[offset], call.tensor_bytes[tensor], bytes);
    return call.Fail(message);
  }
  std::memcpy(call.rows.data() + offset * call.row_bytes + call.tensor_begins[tensor], data, bytes);
  call.seen[offset * call.tensor_bytes.size() + tensor] = 1;
}

void OnComplete(void* context) {
  const std::unique_ptr<Reference> reference(static_cast<Reference*>(context));
  Call& call = **reference;
  const std::lock_guard lock(call.mutex);
  call.completed = true;
  call.changed.notify_all();
}

// Runs `function` and returns what it threw, or nothing.
template <typename Function>
std::string ErrorOf(const Function& function) noexcept {
  try {
    function();
    return {};
  } catch (const std::exception& error) {
    return TextOf(*error.what() == '\0' ? "an exception without a message" : error.what());
  } catch (...) {
    return TextOf("something that is not a std::exception");
  }
}

[[noreturn]] void ThrowLate(const std::string& what, double seconds) {
  std::ostringstream message;
  message << what << ": not completed within " << seconds
          << " seconds; the table can be used again when it completes";
  throw InvalidState(message.str());
}

}  // namespace

LoadedPlugin LoadPlugin(const std::string& path) {
  // A refused library stays loaded: it may have started threads.
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
  bool is_new = false;
  {
    const std::lock_guard lock(libraries_mutex);
    is_new = libraries.emplace(type, library).second;
  }
  if (void* symbol = is_new ? dlsym(handle, "IO_SetErrorHandler") : nullptr) {
    reinterpret_cast<void (*)(IOErrorHandler)>(symbol)(&OnError);
  }
  return {type, is_new};
}

std::vector<std::string> PluginTypes() {
  const std::lock_guard lock(libraries_mutex);
  std::vector<std::string> types;
  for (const auto& [type, library] : libraries) types.push_back(type);
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
    const auto found = libraries.find(type);
    CheckArgument(found != libraries.end(), "type", "that of a loaded plug-in", type);
    library_ = &found->second;  // nodes of a map do not move
  }
  const std::string error = ErrorOf([&] { instance_ = library_->initialize(cfg.c_str()); });
  if (instance_ == nullptr) {
    throw InvalidState("the plug-in " + library_->path + " refused to open the table " + table_ +
                       (error.empty() ? "" : ": " + error));
  }
}

PluginInstance::~PluginInstance() {
  // If its call has not completed, the plug-in still uses the instance: leave it alone.
  if (call_ != nullptr && !call_->WaitUntil(Clock::now())) return;
  const std::string error = ErrorOf([&] { library_->finalize(instance_); });
  if (!error.empty()) {
    std::fprintf(stderr, "embstore: IO_Finalize of the plug-in %s threw: %s\n",
                 library_->path.c_str(), error.c_str());
  }
}

std::shared_ptr<PluginCall> PluginInstance::NewCall(std::span<const int64_t> ids) const {
  CheckArgument(ids.size() <= kMostIds, "the number of ids", "below 2^26", ids.size());
  auto call = std::make_shared<PluginCall>();
  call->table = table_;
  call->column = column_;
  call->ids.assign(ids.begin(), ids.end());
  call->tensor_bytes = tensor_bytes_;
  call->row_bytes = row_bytes_;
  return call;
}

template <typename Start>
void PluginInstance::Run(const std::shared_ptr<PluginCall>& call, const std::string& what,
                         double timeout_seconds, const Start& start) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(timeout_seconds));
  const std::string waiting = what + ": waiting for an earlier call";
  {
    std::unique_lock lock(mutex_);
    if (!freed_.wait_until(lock, deadline, [&] { return !busy_; })) {
      ThrowLate(waiting, timeout_seconds);
    }
    busy_ = true;
  }
  struct Leave {
    PluginInstance& instance;
    ~Leave() {
      const std::lock_guard guard(instance.mutex_);
      instance.busy_ = false;
      instance.freed_.notify_one();
    }
  } leave{*this};
  if (call_ != nullptr && !call_->WaitUntil(deadline)) ThrowLate(waiting, timeout_seconds);
  // A thread for each call: a plug-in that blocks cannot block its caller, and no thread has to
  // survive a fork. What needs memory is done here, where it can fail.
  auto context = std::make_unique<Reference>(call);
  std::thread thread([call, start, taken = context.get()] {
    const std::string error = ErrorOf([&] { start(*call, taken); });
    if (!error.empty()) call->Fail(error.c_str());
    const std::lock_guard guard(call->mutex);
    call->returned = true;
    // It threw and did not complete: keep the context, since the plug-in may still have it.
    call->completed |= !error.empty();
    call->changed.notify_all();
  });
  context.release();  // OnComplete deletes it
  thread.detach();
  call_ = call;
  if (!call->WaitUntil(deadline)) ThrowLate(what, timeout_seconds);
  if (!call->error.empty()) throw InvalidState(what + ": " + call->error);
}

void PluginInstance::Pull(std::span<const int64_t> ids, std::byte* rows, uint8_t* found,
                          double timeout_seconds) {
  if (ids.empty()) return;
  const auto call = NewCall(ids);
  const size_t tensors = tensor_bytes_.size();
  call->tensor_begins.resize(tensors);
  std::exclusive_scan(tensor_bytes_.begin(), tensor_bytes_.end(), call->tensor_begins.begin(),
                      int64_t{0});
  call->rows.resize(ids.size() * static_cast<size_t>(row_bytes_));
  call->seen.resize(ids.size() * tensors);
  Run(call, "pull of " + table_, timeout_seconds,
      [pull = library_->pull, instance = instance_](PluginCall& c, void* context) {
        pull(instance,
             {c.table.c_str(), 1, static_cast<uint32_t>(c.ids.size()), &c.column, c.ids.data(),
              static_cast<uint32_t>(c.tensor_bytes.size()), context, &OnFetched, &OnComplete});
      });
  std::memcpy(rows, call->rows.data(), call->rows.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint8_t* seen = call->seen.data() + i * tensors;
    found[i] = std::accumulate(seen, seen + tensors, size_t{0}) == tensors;
  }
}

void PluginInstance::Push(std::span<const int64_t> ids, const std::byte* rows,
                          double timeout_seconds) {
  if (ids.empty()) return;
  const auto call = NewCall(ids);
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
  Run(call, "push of " + table_, timeout_seconds,
      [push = library_->push, instance = instance_](PluginCall& c, void* context) {
        push(instance, {c.table.c_str(), 1, static_cast<uint32_t>(c.ids.size()), &c.column,
                        c.ids.data(), static_cast<uint32_t>(c.tensor_ids.size()),
                        c.tensor_ids.data(), static_cast<uint32_t>(c.offsets.size()),
                        c.offsets.data(), c.rows.data(), context, &OnComplete});
      });
}

}  // namespace embstore
