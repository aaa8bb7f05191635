// A plug-in in the old style: completes inside the call, says IO_Fetch, has no error channel, and misbehaves
// when the text after :// asks for it.
#include <embstore/parameter_server_plugin.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace {
struct Server {
  std::string mood;
  std::map<std::pair<int64_t, uint32_t>, std::string> pieces;
};
}  // namespace

extern "C" {
const char* IO_type = "odd";

void* IO_Initialize(const char* cfg) { return new Server{cfg, {}}; }
void IO_Finalize(void* instance) { delete static_cast<Server*>(instance); }

#ifndef WITHOUT_FETCH
void IO_Fetch(void* instance, IOFetchParameter p) {
  Server& server = *static_cast<Server*>(instance);
  if (server.mood == "throws") throw std::runtime_error("the cable is cut");
  if (server.mood == "silent") return;
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
