#include "embstore/optimizer.h"

#include <array>
#include <cstddef>

#include "argument_check.h"

namespace embstore {

namespace {

#include "optimizers.inc"

// Calls visit(rule) with a null pointer to the struct of the kind: only its statics are used.
template <class Visitor>
auto VisitRule(OptimizerKind kind, Visitor&& visit) {
  switch (kind) {
#define EMBSTORE_CASE(kind, name) \
  case OptimizerKind::k##kind:    \
    return visit(static_cast<kind*>(nullptr));
    EMBSTORE_OPTIMIZERS(EMBSTORE_CASE)
#undef EMBSTORE_CASE
  }
  throw InvalidArgument("kind should be a known optimizer but is: " +
                        std::to_string(static_cast<int>(kind)));
}

void CheckDecayRate(std::string_view name, double value) {
  CheckFinite(name, value);
  CheckArgument(0.0 <= value && value < 1.0, name, "in [0, 1)", value);
}

}  // namespace

std::string_view Name(OptimizerKind kind) {
  switch (kind) {
#define EMBSTORE_CASE(kind, name) \
  case OptimizerKind::k##kind:    \
    return name;
    EMBSTORE_OPTIMIZERS(EMBSTORE_CASE)
#undef EMBSTORE_CASE
  }
  throw InvalidArgument("kind should be a known optimizer but is: " +
                        std::to_string(static_cast<int>(kind)));
}

OptimizerKind OptimizerFromName(std::string_view name) {
  std::string known;
#define EMBSTORE_COMPARE(kind, kind_name)               \
  if (name == kind_name) return OptimizerKind::k##kind; \
  known += (known.empty() ? "" : ", ") + std::string(kind_name);
  EMBSTORE_OPTIMIZERS(EMBSTORE_COMPARE)
#undef EMBSTORE_COMPARE
  throw InvalidArgument("optimizer should be one of " + known + " but is: " + std::string(name));
}

std::vector<StateSpec> States(const OptimizerOptions& options, int64_t dim) {
  return VisitRule(options.kind, [&](auto* rule) {
    using Rule = std::remove_pointer_t<decltype(rule)>;
    std::vector<StateSpec> states;
    for (size_t i = 0; i < Rule::kStates.size(); ++i) {
      states.push_back({Rule::kStates[i], WidthOfState<Rule>(i, dim)});
    }
    return states;
  });
}

int64_t StateWidth(const OptimizerOptions& options, int64_t dim) {
  return VisitRule(options.kind, [&](auto* rule) {
    return WidthOfStates<std::remove_pointer_t<decltype(rule)>>(dim);
  });
}

void InitState(const OptimizerOptions& options, int64_t dim, float* state) {
  VisitRule(options.kind, [&](auto* rule) {
    using Rule = std::remove_pointer_t<decltype(rule)>;
    for (size_t i = 0; i < Rule::kStates.size(); ++i) {
      state = std::fill_n(state, WidthOfState<Rule>(i, dim), Rule::FirstValue(options, i));
    }
  });
}

void Validate(const OptimizerOptions& options) {
  Name(options.kind);
  CheckNotNegative("initial_accumulator", options.initial_accumulator);
}

void Validate(const OptimizerOptions& options, const StepOptions& step) {
  Validate(options);
  const OptimizerKind kind = options.kind;
  CheckNotNegative("learning_rate", step.learning_rate);
  CheckNotNegative("weight_decay", step.weight_decay);
  CheckFinite("gradient_scale", step.gradient_scale);
  CheckNotNegative("clip_value", step.clip_value);
  CheckNotNegative("clip_norm", step.clip_norm);
  CheckNotNegative("eps", step.eps);
  CheckArgument(
      step.eps_placement == EpsPlacement::kTorch || step.eps_placement == EpsPlacement::kKeras,
      "eps_placement", "kTorch or kKeras", static_cast<int>(step.eps_placement));
  CheckArgument(step.step >= 1, "step", "at least 1", step.step);
  switch (kind) {
    case OptimizerKind::kAdam:
    case OptimizerKind::kSmartDecayAdam:
    case OptimizerKind::kAdamax:
      CheckDecayRate("beta1", step.beta1);
      CheckDecayRate("beta2", step.beta2);
      break;
    case OptimizerKind::kMomentum:
      CheckNotNegative("momentum", step.momentum);
      CheckFinite("dampening", step.dampening);
      CheckArgument(!step.nesterov || step.dampening == 0.0, "dampening", "0 with nesterov",
                    step.dampening);
      CheckArgument(!step.velocity || step.dampening == 0.0, "dampening", "0 with velocity",
                    step.dampening);
      break;
    case OptimizerKind::kAdadelta:
      CheckFinite("rho", step.rho);
      CheckArgument(0.0 <= step.rho && step.rho <= 1.0, "rho", "in [0, 1]", step.rho);
      break;
    case OptimizerKind::kFtrl:
      // The rule divides by it.
      CheckArgument(step.learning_rate > 0.0, "learning_rate", "above 0 for ftrl",
                    step.learning_rate);
      CheckFinite("learning_rate_power", step.learning_rate_power);
      CheckNotNegative("lambda1", step.lambda1);
      CheckNotNegative("lambda2", step.lambda2);
      CheckNotNegative("beta", step.beta);
      CheckNotNegative("l2_shrinkage", step.l2_shrinkage);
      break;
    case OptimizerKind::kSgd:
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kRowwiseAdagrad:
      break;
  }
}

}  // namespace embstore
