/* The C interface of parameter server plug-ins, for embstore and for its face
 * torchrec_dynamic_embedding.
 *
 * A plug-in is a shared library that exports one variable and four functions. The host loads it
 * with torch.ops.tde.register_io(path) and then opens URLs "<IO_type>://<cfg>" with it.
 *
 *     include=$(python -c 'import embstore.stores.plugin as p; print(p.include_dir())')
 *     c++ -std=c++17 -O2 -shared -fPIC -I "$include" my_plugin.cpp -o my_plugin.so
 *
 * Words: an id has `num_cols_` columns (parts of its vector; 0 counts as 1), and every column has
 * `num_optimizer_stats_` tensors: number 0 is the weight, 1 and above are optimizer states. Piece
 * (i, j, k) is tensor k of column j of id i. The tensors of one id may differ in length.
 *
 * Each instance serves one table of one process. The host makes one call at a time on an instance,
 * each on a thread of its own. A call may complete before it returns, or later from another thread.
 * The host waits until it has done both, up to a limit; a late call fails, and the next one on this
 * instance starts only when it is over. An instance whose call never ends is not finalized.
 */
#ifndef EMBSTORE_PARAMETER_SERVER_PLUGIN_H_
#define EMBSTORE_PARAMETER_SERVER_PLUGIN_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The names and arrays are valid during the call only: copy what is needed later. */
struct IOPullParameter {
  const char* table_name_;
  uint32_t num_cols_;
  uint32_t num_global_ids_;
  const int64_t* col_ids_;    /* num_cols_ */
  const int64_t* global_ids_; /* num_global_ids_ */
  uint32_t num_optimizer_stats_;
  void* on_complete_context_;
  /* For id i, column j and every tensor k: offset = i * max(num_cols_, 1) + j, optimizer_state = k.
   * The host copies at once. data == NULL, or no call at all, means that the piece is not there; an
   * id counts as found when all of its pieces are. Calls for different offsets may come from
   * different threads at the same time. */
  void (*on_global_id_fetched_)(void* context, uint32_t offset, uint32_t optimizer_state,
                                void* data, uint32_t data_len);
  /* Exactly once, after the last of the calls above has returned. The context is gone afterwards.
   */
  void (*on_all_fetched_)(void* context);
};

/* Piece x = (i * max(num_cols_, 1) + j) * num_optimizer_stats_ + k is data_[offsets_[x] ..
 * offsets_[x + 1]), of the tensor optimizer_stats_ids_[k]. global_ids_, optimizer_stats_ids_,
 * offsets_ and data_ stay valid until on_push_complete returns; table_name_ and col_ids_ during the
 * call only. */
struct IOPushParameter {
  const char* table_name_;
  uint32_t num_cols_;
  uint32_t num_global_ids_;
  const int64_t* col_ids_;
  const int64_t* global_ids_;
  uint32_t num_optimizer_stats_;
  const uint32_t* optimizer_stats_ids_;
  uint32_t num_offsets_; /* pieces + 1 */
  const uint64_t* offsets_;
  const void* data_;
  void* on_complete_context_;
  void (*on_push_complete)(void* context); /* exactly once */
};

#ifndef __cplusplus
typedef struct IOPullParameter IOPullParameter;
typedef struct IOPushParameter IOPushParameter;
#endif
typedef struct IOPullParameter IOFetchParameter;

/* ---- what a plug-in exports ----
 *
 * const char* IO_type = "my-ps";                    a variable, not an array
 * void* IO_Initialize(const char* cfg);             the text after "://"; NULL: refused
 * void IO_Finalize(void* instance);
 * void IO_Pull(void* instance, IOPullParameter p);  or IO_Fetch, which is the same
 * void IO_Push(void* instance, IOPushParameter p);
 *
 * Optional: errors. The host hands over a function before IO_Initialize. A plug-in calls it with
 * the on_complete_context_ of a call that failed, before it completes that call as usual; the
 * message is copied, and the call fails in the host with it.
 *
 * void IO_SetErrorHandler(IOErrorHandler handler);
 */
typedef void (*IOErrorHandler)(void* on_complete_context, const char* message);

#ifdef __cplusplus
}
#endif

#endif /* EMBSTORE_PARAMETER_SERVER_PLUGIN_H_ */
