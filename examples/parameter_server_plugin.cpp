// A parameter server plug-in: rows in a map of this process, answered by a thread of its own.
//
//     include=$(python -c 'import embstore.stores.plugin as p; print(p.include_dir())')
//     c++ -std=c++17 -O2 -shared -fPIC -pthread -I "$include" parameter_server_plugin.cpp -o plugin.so
//
//     torch.ops.tde.register_io("plugin.so")
//     tde.wrap("example://shop", ...)      # tables of the same name and text after :// share their rows
//
// A real one would send requests over a network where this one puts them in a queue.
#include <embstore/parameter_server_plugin.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using PieceName = std::tuple<std::string, int64_t, int64_t, uint32_t>;  // table, id, column, tensor
using Rows = std::map<PieceName, std::string>;

std::mutex servers_mutex;
std::map<std::string, std::shared_ptr<Rows>> servers;  // by the text after "://"
IOErrorHandler report_error = nullptr;

// One connection: requests are done in order by its thread.
class Connection {
 public:
  explicit Connection(std::shared_ptr<Rows> rows)
      : rows_(std::move(rows)), thread_([this] { Run(); }) {}

  ~Connection() {
    Submit(nullptr);
    thread_.join();
  }

  void Submit(std::function<void(Rows&)> request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    requests_.push_back(std::move(request));
    arrived_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      arrived_.wait(lock, [this] { return !requests_.empty(); });
      const auto request = std::move(requests_.front());
      requests_.pop_front();
      lock.unlock();
      if (!request) return;
      const std::lock_guard<std::mutex> rows_lock(servers_mutex);
      request(*rows_);
    }
  }

  std::shared_ptr<Rows> rows_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<std::function<void(Rows&)>> requests_;
  std::thread thread_;
};

std::vector<int64_t> Columns(uint32_t count, const int64_t* columns) {
  return count == 0 ? std::vector<int64_t>{-1} : std::vector<int64_t>(columns, columns + count);
}

}  // namespace

extern "C" {

const char* IO_type = "example";

void IO_SetErrorHandler(IOErrorHandler handler) { report_error = handler; }

void* IO_Initialize(const char* cfg) {
  if (std::strcmp(cfg, "refused") == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(servers_mutex);
  std::shared_ptr<Rows>& rows = servers[cfg];
  if (!rows) rows = std::make_shared<Rows>();
  return new Connection(rows);
}

void IO_Finalize(void* instance) { delete static_cast<Connection*>(instance); }

void IO_Pull(void* instance, IOPullParameter p) {
  // The arrays are the host's, and only for this call.
  const std::string table = p.table_name_;
  const std::vector<int64_t> columns = Columns(p.num_cols_, p.col_ids_);
  const std::vector<int64_t> ids(p.global_ids_, p.global_ids_ + p.num_global_ids_);
  static_cast<Connection*>(instance)->Submit([=](Rows& rows) {
    uint32_t offset = 0;
    for (const int64_t id : ids) {
      for (const int64_t column : columns) {
        for (uint32_t tensor = 0; tensor < p.num_optimizer_stats_; ++tensor) {
          const auto found = rows.find({table, id, column, tensor});
          if (found == rows.end()) continue;  // not there: nothing is said
          std::string& bytes = found->second;
          p.on_global_id_fetched_(p.on_complete_context_, offset, tensor, bytes.data(),
                                  static_cast<uint32_t>(bytes.size()));
        }
        ++offset;
      }
    }
    p.on_all_fetched_(p.on_complete_context_);
  });
}

void IO_Push(void* instance, IOPushParameter p) {
  const std::string table = p.table_name_;
  const std::vector<int64_t> columns = Columns(p.num_cols_, p.col_ids_);
  static_cast<Connection*>(instance)->Submit([=](Rows& rows) {
    const char* data = static_cast<const char*>(p.data_);
    uint32_t piece = 0;
    for (uint32_t i = 0; i < p.num_global_ids_; ++i) {
      for (const int64_t column : columns) {
        for (uint32_t k = 0; k < p.num_optimizer_stats_; ++k, ++piece) {
          rows[{table, p.global_ids_[i], column, p.optimizer_stats_ids_[k]}].assign(
              data + p.offsets_[piece], data + p.offsets_[piece + 1]);
        }
      }
    }
    if (table == "full" && report_error) report_error(p.on_complete_context_, "no room for this table");
    p.on_push_complete(p.on_complete_context_);
  });
}

}  // extern "C"
