// A plug-in in the old style: completes inside the call, says IO_Fetch, has no error channel, and misbehaves
// when the text after :// asks for it.
#include <embstore/parameter_server_plugin.h>

#include <atomic>
#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#ifndef TYPE
#define TYPE "odd"
#endif

namespace {
struct Server {
  std::string mood;
  std::map<std::pair<int64_t, uint32_t>, std::string> pieces;
  std::atomic<int> running{0};
  bool slow = true;  // the first pull is
};

#ifndef WITHOUT_FETCH
const auto kLong = std::chrono::milliseconds(700);

// Answers garbage later, from another thread, to arrays of the host that should still be there.
void CompleteLate(Server& server, IOFetchParameter p) {
  std::thread([&server, p, ids = std::vector<int64_t>(p.global_ids_, p.global_ids_ + p.num_global_ids_)] {
    std::this_thread::sleep_for(kLong);
    std::string data(12, 'x');
    for (uint32_t i = 0; i < ids.size(); ++i) {
      p.on_global_id_fetched_(p.on_complete_context_, i, 0, data.data(), 12);
    }
    --server.running;
    p.on_all_fetched_(p.on_complete_context_);
  }).detach();
}
#endif
}  // namespace

extern "C" {
const char* IO_type = TYPE;

void* IO_Initialize(const char* cfg) {
  if (std::string(cfg) == "throws at the start") throw std::runtime_error("no such place");
  return new Server{cfg, {}};
}
void IO_Finalize(void* instance) {
  const std::string mood = static_cast<Server*>(instance)->mood;
  delete static_cast<Server*>(instance);
  if (mood == "throws at the end") throw std::runtime_error("the door is stuck");
}

#ifndef WITHOUT_FETCH
void IO_Fetch(void* instance, IOFetchParameter p) {
  Server& server = *static_cast<Server*>(instance);
  if (server.mood == "throws") throw std::runtime_error("the cable is cut");
  if (server.mood == "silent") return;
  if (server.running++ > 0) throw std::runtime_error("two calls at a time");
  const bool slow = std::exchange(server.slow, false);
  if (slow && server.mood == "late") return CompleteLate(server, p);
  if (slow && server.mood == "blocks") std::this_thread::sleep_for(kLong);
  for (uint32_t i = 0; i < p.num_global_ids_; ++i) {
    for (uint32_t k = 0; k < p.num_optimizer_stats_; ++k) {
      const auto found = server.pieces.find({p.global_ids_[i], k});
      if (found == server.pieces.end() || (server.mood == "forgets states" && k > 0)) {
        p.on_global_id_fetched_(p.on_complete_context_, i, k, nullptr, 0);
        continue;
      }
      const uint32_t missing_bytes = server.mood == "short" ? 1 : 0;
      const uint32_t offset = server.mood == "beyond" ? p.num_global_ids_ : i;
      p.on_global_id_fetched_(p.on_complete_context_, offset, k, found->second.data(),
                              static_cast<uint32_t>(found->second.size()) - missing_bytes);
    }
  }
  --server.running;
  p.on_all_fetched_(p.on_complete_context_);
}
#endif

void IO_Push(void* instance, IOPushParameter p) {
  Server& server = *static_cast<Server*>(instance);
  const char* data = static_cast<const char*>(p.data_);
  for (uint32_t i = 0, piece = 0; i < p.num_global_ids_; ++i) {
    for (uint32_t k = 0; k < p.num_optimizer_stats_; ++k, ++piece) {
      server.pieces[{p.global_ids_[i], p.optimizer_stats_ids_[k]}].assign(data + p.offsets_[piece],
                                                                          data + p.offsets_[piece + 1]);
    }
  }
  p.on_push_complete(p.on_complete_context_);
}
}
