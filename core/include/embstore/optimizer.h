// Optimizers that run on rows: [embedding (dim) | state], one fused pass over a summed gradient.
//
// All are lazy: only rows that have a gradient in this step move. All arithmetic is float32;
// float16 and bfloat16 embeddings are converted to float32 and rounded to nearest-even when stored.
// State is float32, except for step counts (SmartDecayAdam), whose bits are kept in floats.
//
// To add one, write a small struct in core/src/optimizers.inc and a line in EMBSTORE_OPTIMIZERS
// below.
//
// Thread safety: pure functions of their arguments.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "embstore/types.h"

namespace embstore {

// clang-format off
#define EMBSTORE_OPTIMIZERS(X)                                                              \
  /* kind            name               states, each `dim` floats wide unless of the row  */ \
  X(Sgd,             "sgd")             /* -                                              */ \
  X(Momentum,        "momentum")        /* momentum                                       */ \
  X(Adagrad,         "adagrad")         /* sum                                            */ \
  X(RowwiseAdagrad,  "rowwise_adagrad") /* sum (one float for the row)                    */ \
  X(Adam,            "adam")            /* exp_avg, exp_avg_sq                            */ \
  X(Adamax,          "adamax")          /* exp_avg, exp_inf                               */ \
  X(Adadelta,        "adadelta")        /* square_avg, acc_delta                          */ \
  X(Ftrl,            "ftrl")            /* accumulator, linear                            */ \
  X(SmartDecayAdam,  "smart_decay_adam") /* exp_avg, exp_avg_sq, last_step (int64 of the row) */
// clang-format on

enum class OptimizerKind : uint8_t {
#define EMBSTORE_KIND(kind, name) k##kind,
  EMBSTORE_OPTIMIZERS(EMBSTORE_KIND)
#undef EMBSTORE_KIND
};

// What stays the same for the life of a table: it fixes the width and the first value of the state.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kSgd;
  float initial_accumulator = 0.0f;  // Adagrad, RowwiseAdagrad, Ftrl: first value of the sum
};

// Where eps enters the denominator. Both are in use; they train differently at small gradients.
//             Adam                        Adamax                 Adagrad, RowwiseAdagrad
//   kTorch    sqrt(v) / sqrt(bc2) + eps   max(b2 u, |g| + eps)   sqrt(sum) + eps
//   kKeras    sqrt(v) + eps, then bc2     max(b2 u, |g|) + eps   sqrt(sum + eps)
enum class EpsPlacement : uint8_t { kTorch = 0, kKeras = 1 };

// What may change from step to step.
// The numbers are doubles although rows are float32: 1 - float(0.999) is off by 1.3e-5 from the
// 0.001f that torch uses. They are combined in double and rounded to float32 once.
struct StepOptions {
  double learning_rate = 0.01;
  double weight_decay = 0.0;  // coupled: g += wd * w; decoupled: w -= lr * wd * w
  bool decoupled_weight_decay = false;
  double gradient_scale = 1.0;  // the summed gradient is multiplied by it, before it is clipped
  double clip_value = 0.0;  // > 0: each component of the summed gradient is clamped to +-clip_value
  double clip_norm = 0.0;   // > 0: the summed gradient of a row is scaled down to this L2 norm
  double eps = 1e-8;
  EpsPlacement eps_placement = EpsPlacement::kTorch;
  double beta1 = 0.9, beta2 = 0.999;  // Adam, Adamax, SmartDecayAdam
  bool bias_correction = true;        // Adam, Adamax
  // The table's step, from 1: t of the bias correction, and what a row of SmartDecayAdam records.
  // Momentum does not damp step 1.
  int64_t step = 1;
  double momentum = 0.0, dampening = 0.0;
  bool nesterov = false;
  // Momentum: the state is Keras' velocity v, with v = momentum v - lr g and w += v, so a new
  // learning rate does not rescale past gradients. torch keeps the sum of gradients instead.
  bool velocity = false;
  double rho = 0.9;  // Adadelta
  // Ftrl. The paper and TensorFlow raise the accumulator to -learning_rate_power;
  // OneEmbedding raises it to +learning_rate_power (ftrl_paper_sign = false).
  double learning_rate_power = -0.5, lambda1 = 0.0, lambda2 = 0.0, beta = 0.0;
  double l2_shrinkage = 0.0;  // added to the gradient as 2 l2_shrinkage w, but not to its square
  bool ftrl_paper_sign = true;
};

struct StateSpec {
  std::string name;
  int64_t width;  // floats
};

std::string_view Name(OptimizerKind kind);
OptimizerKind OptimizerFromName(std::string_view name);  // throws InvalidArgument listing the names

// The states of a row, in the order in which they follow the embedding.
std::vector<StateSpec> States(const OptimizerOptions& options, int64_t dim);
int64_t StateWidth(const OptimizerOptions& options, int64_t dim);  // floats in all

// Sets the state of a new row.
void InitState(const OptimizerOptions& options, int64_t dim, float* state);

// Throw InvalidArgument that names the field and its value (NaN, infinite, out of range).
void Validate(const OptimizerOptions& options);
void Validate(const OptimizerOptions& options, const StepOptions& step);

}  // namespace embstore
