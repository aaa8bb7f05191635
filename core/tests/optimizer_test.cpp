#include "embstore/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "embstore/kernels.h"

namespace embstore {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A row in double: the oracle.
struct OracleRow {
  std::vector<double> w, s0, s1;  // the sum of row-wise Adagrad is s0[0]
  int64_t last_step = 0;
};

// The rules as torch.optim, Keras and OneEmbedding document them, one column at a time.
void OracleStep(const OptimizerOptions& options, const StepOptions& o, std::vector<double> g,
                OracleRow& row) {
  const size_t dim = row.w.size();
  const bool keras = o.eps_placement == EpsPlacement::kKeras;
  if (o.clip_value > 0) {
    for (double& v : g) v = std::clamp(v, -o.clip_value, o.clip_value);
  }
  double squares = 0;
  for (const double v : g) squares += v * v;
  if (o.clip_norm > 0 && std::sqrt(squares) > o.clip_norm) {
    for (double& v : g) v *= o.clip_norm / std::sqrt(squares);
  }
  if (!o.decoupled_weight_decay) {
    for (size_t i = 0; i < dim; ++i) g[i] += o.weight_decay * row.w[i];
  }
  double mean_square = 0;
  for (const double v : g) mean_square += v * v / dim;
  if (options.kind == OptimizerKind::kRowwiseAdagrad) row.s0[0] += mean_square;

  const double lr = o.learning_rate;
  const auto passed = static_cast<double>(o.step - row.last_step);
  row.last_step = o.step;
  const double bc1 = o.bias_correction ? 1 - std::pow(o.beta1, o.step) : 1;
  const double bc2 = o.bias_correction ? 1 - std::pow(o.beta2, o.step) : 1;
  for (size_t i = 0; i < dim; ++i) {
    double& w = row.w[i];
    double unused = 0;
    double& a = row.s0.size() == dim ? row.s0[i] : unused;
    double& b = row.s1.size() == dim ? row.s1[i] : unused;
    const double decay = o.decoupled_weight_decay ? lr * o.weight_decay * w : 0;
    const auto over = [&](double sum) {
      return keras ? std::sqrt(sum + o.eps) : std::sqrt(sum) + o.eps;
    };
    switch (options.kind) {
      case OptimizerKind::kSgd:
        w -= lr * g[i] + decay;
        break;
      case OptimizerKind::kMomentum:
        a = o.step == 1 ? g[i] : o.momentum * a + (1 - o.dampening) * g[i];
        w -= lr * (o.nesterov ? g[i] + o.momentum * a : a) + decay;
        break;
      case OptimizerKind::kAdagrad:
        a += g[i] * g[i];
        w -= lr * g[i] / over(a) + decay;
        break;
      case OptimizerKind::kRowwiseAdagrad:
        w -= lr * g[i] / over(row.s0[0]) + decay;
        break;
      case OptimizerKind::kAdam:
        a = o.beta1 * a + (1 - o.beta1) * g[i];
        b = o.beta2 * b + (1 - o.beta2) * g[i] * g[i];
        w -= (keras ? lr * std::sqrt(bc2) / bc1 * a / (std::sqrt(b) + o.eps)
                    : lr * (a / bc1) / (std::sqrt(b / bc2) + o.eps)) +
             decay;
        break;
      case OptimizerKind::kSmartDecayAdam: {
        // The steps that passed without a gradient, one by one.
        double caught_up = 0;
        for (double k = 1, m = a; k < passed; ++k) caught_up += m *= o.beta1;
        a = std::pow(o.beta1, passed) * a + (1 - o.beta1) * g[i];
        b = std::pow(o.beta2, passed) * b + (1 - o.beta2) * g[i] * g[i];
        w -= lr * (a + caught_up) / (std::sqrt(b) + o.eps) + decay;
        break;
      }
      case OptimizerKind::kAdamax:
        a = o.beta1 * a + (1 - o.beta1) * g[i];
        b = std::max(o.beta2 * b, std::abs(g[i]) + (keras ? 0 : o.eps));
        w -= lr / bc1 * a / (b + (keras ? o.eps : 0)) + decay;
        break;
      case OptimizerKind::kAdadelta: {
        a = o.rho * a + (1 - o.rho) * g[i] * g[i];
        const double delta = std::sqrt(b + o.eps) / std::sqrt(a + o.eps) * g[i];
        b = o.rho * b + (1 - o.rho) * delta * delta;
        w -= lr * delta + decay;
        break;
      }
      case OptimizerKind::kFtrl: {
        const double p = o.ftrl_paper_sign ? -o.learning_rate_power : o.learning_rate_power;
        const double n = a + g[i] * g[i];
        b += g[i] - (std::pow(n, p) - std::pow(a, p)) / lr * w;
        a = n;
        w = std::abs(b) <= o.lambda1
                ? 0
                : (std::copysign(o.lambda1, b) - b) / ((o.beta + std::pow(n, p)) / lr + o.lambda2) -
                      decay;
        break;
      }
    }
  }
}

struct Sample {
  std::string what;
  OptimizerOptions options;
  StepOptions step;
};

// Every optimizer with the variants of its rule.
std::vector<Sample> Samples() {
  using K = OptimizerKind;
  std::vector<Sample> samples = {
      {"sgd", {K::kSgd}, {.learning_rate = 0.1}},
      {"momentum", {K::kMomentum}, {.learning_rate = 0.1, .momentum = 0.9}},
      {"damped", {K::kMomentum}, {.learning_rate = 0.1, .momentum = 0.9, .dampening = 0.3}},
      {"nesterov", {K::kMomentum}, {.learning_rate = 0.1, .momentum = 0.9, .nesterov = true}},
      {"adagrad", {K::kAdagrad}, {.learning_rate = 0.1, .eps = 1e-10}},
      {"adagrad from 0.1", {K::kAdagrad, 0.1f}, {.learning_rate = 0.1}},
      {"rowwise adagrad", {K::kRowwiseAdagrad}, {.learning_rate = 0.1}},
      {"rowwise adagrad from 0.1", {K::kRowwiseAdagrad, 0.1f}, {.learning_rate = 0.1}},
      {"adam", {K::kAdam}, {.learning_rate = 0.01}},
      {"adam, uncorrected", {K::kAdam}, {.learning_rate = 0.01, .bias_correction = false}},
      {"adam, large eps", {K::kAdam}, {.learning_rate = 0.01, .eps = 0.1}},
      {"smart decay adam", {K::kSmartDecayAdam}, {.learning_rate = 0.01, .eps = 1e-3}},
      {"smart decay adam, no beta1",
       {K::kSmartDecayAdam},
       {.learning_rate = 0.01, .eps = 1e-3, .beta1 = 0.0, .beta2 = 0.5}},
      {"adamax", {K::kAdamax}, {.learning_rate = 0.01}},
      {"adamax, large eps", {K::kAdamax}, {.learning_rate = 0.01, .eps = 0.1}},
      {"adadelta", {K::kAdadelta}, {.learning_rate = 1.0, .eps = 1e-6}},
      {"ftrl", {K::kFtrl, 0.1f}, {.learning_rate = 0.05, .lambda1 = 0.02, .lambda2 = 0.1}},
      {"ftrl with beta", {K::kFtrl}, {.learning_rate = 0.05, .beta = 1.0}},
      {"ftrl, other power",
       {K::kFtrl, 0.1f},
       {.learning_rate = 0.05, .learning_rate_power = -0.7, .lambda1 = 0.01}},
      {"ftrl of OneEmbedding",
       {K::kFtrl, 0.1f},
       {.learning_rate = 0.05, .lambda1 = 0.01, .ftrl_paper_sign = false}},
  };
  for (size_t i = 0, count = samples.size(); i < count; ++i) {
    Sample keras = samples[i], coupled = samples[i], decoupled = samples[i], clipped = samples[i];
    keras.what += ", keras";
    keras.step.eps_placement = EpsPlacement::kKeras;
    coupled.what += ", weight decay";
    coupled.step.weight_decay = 0.05;
    decoupled.what += ", decoupled weight decay";
    decoupled.step.weight_decay = 0.05;
    decoupled.step.decoupled_weight_decay = true;
    clipped.what += ", clipped";
    clipped.step.clip_value = 0.5;
    clipped.step.clip_norm = 0.75;
    samples.insert(samples.end(), {keras, coupled, decoupled, clipped});
  }
  return samples;
}

// Deterministic numbers in [-1, 1) without a library.
double Noise(uint64_t i) {
  i = (i + 1) * 0x9E3779B97F4A7C15ULL;
  i = (i ^ (i >> 30)) * 0xBF58476D1CE4E5B9ULL;
  return static_cast<double>(static_cast<int64_t>(i ^ (i >> 27)) >> 11) * 0x1p-52;
}

// The steps in which the row has a gradient.
constexpr int64_t kSteps[] = {1, 2, 3, 7, 8, 20};

// Runs a row for the first of them; the row lies as [embedding | state] at slot 1 of 3.
std::vector<float> RunEngine(const Kernels& kernels, const Sample& sample, int64_t dim,
                             std::span<const int64_t> steps) {
  const int64_t width = dim + StateWidth(sample.options, dim);
  std::vector<float> rows(3 * width, 77.0f), g(dim), scratch(dim);
  for (int64_t i = 0; i < dim; ++i) rows[width + i] = static_cast<float>(Noise(i));
  InitState(sample.options, dim, rows.data() + width + dim);
  const RowsView view{reinterpret_cast<std::byte*>(rows.data()), width * 4, dim, DType::kFloat32,
                      dim * 4};
  StepOptions step = sample.step;
  for (size_t n = 0; n < steps.size(); ++n) {
    step.step = steps[n];
    for (int64_t i = 0; i < dim; ++i) g[i] = static_cast<float>(Noise(1000 * (n + 1) + i));
    const Occurrence occurrence{1, 0};
    kernels.update(view, sample.options, step, &occurrence, 1, {.base = g.data(), .stride = dim},
                   scratch.data());
  }
  for (int64_t i = 0; i < width; ++i) {
    CHECK_EQ(rows[i], 77.0f);
    CHECK_EQ(rows[2 * width + i], 77.0f);
  }
  return {rows.begin() + width, rows.begin() + 2 * width};
}

// Of a row of SmartDecayAdam.
int64_t LastStep(std::span<const float> row) {
  int64_t step;
  std::memcpy(&step, row.data() + row.size() - 2, sizeof(step));
  return step;
}

TEST(Every optimizer equals its rule in double to float32 rounding) {
  for (const Sample& sample : Samples()) {
    Validate(sample.options, sample.step);
    for (const int64_t dim : {1, 7, 8, 32, 97}) {
      const std::vector<StateSpec> states = States(sample.options, dim);
      std::vector<float> first(StateWidth(sample.options, dim));
      InitState(sample.options, dim, first.data());
      OracleRow row;
      for (int64_t i = 0; i < dim; ++i) row.w.push_back(static_cast<float>(Noise(i)));
      if (states.size() > 0) row.s0.assign(states[0].width, first[0]);
      if (states.size() > 1) row.s1.assign(states[1].width, first[dim]);
      StepOptions step = sample.step;
      for (size_t n = 0; n < std::size(kSteps); ++n) {
        step.step = kSteps[n];
        std::vector<double> g(dim);
        for (int64_t i = 0; i < dim; ++i) g[i] = static_cast<float>(Noise(1000 * (n + 1) + i));
        OracleStep(sample.options, step, g, row);
      }
      std::vector<double> expected = row.w;
      expected.insert(expected.end(), row.s0.begin(), row.s0.end());
      expected.insert(expected.end(), row.s1.begin(), row.s1.end());
      for (const Kernels* kernels : AvailableKernels()) {
        std::vector<float> actual = RunEngine(*kernels, sample, dim, kSteps);
        if (sample.options.kind == OptimizerKind::kSmartDecayAdam) {
          CHECK_EQ(LastStep(actual), kSteps[std::size(kSteps) - 1]);
          actual.resize(3 * dim);
        }
        CHECK_EQ(actual.size(), expected.size());
        const int before = check::Failures();
        for (size_t i = 0; i < actual.size(); ++i) {
          CHECK_NEAR(actual[i], expected[i], 4e-6 * (1 + std::abs(expected[i])));
        }
        if (check::Failures() != before) {
          check::Fail(__FILE__, __LINE__, sample.what + " of dim " + std::to_string(dim));
        }
      }
    }
  }
}

TEST(All instruction sets give the same bits for every optimizer) {
  for (const Sample& sample : Samples()) {
    for (const int64_t dim : {1, 7, 32, 97, 1023}) {
      const std::vector<float> plain = RunEngine(*AvailableKernels().back(), sample, dim, kSteps);
      for (const Kernels* kernels : AvailableKernels()) {
        CHECK(RunEngine(*kernels, sample, dim, kSteps) == plain);
      }
    }
  }
}

TEST(Clipping by norm survives squares that overflow float32) {
  Sample sample{"", {OptimizerKind::kSgd}, {.learning_rate = 1.0, .clip_norm = 3.0}};
  for (const Kernels* kernels : AvailableKernels()) {
    std::vector<float> w(9, 0.0f), g(9, 1e30f), scratch(9);
    const RowsView view{reinterpret_cast<std::byte*>(w.data()), 36, 9, DType::kFloat32, 36};
    const Occurrence occurrence{0, 0};
    kernels->update(view, sample.options, sample.step, &occurrence, 1,
                    {.base = g.data(), .stride = 9}, scratch.data());
    for (const float v : w) CHECK_NEAR(v, -1.0, 1e-6);
    CHECK(g == std::vector<float>(9, 1e30f));
  }
}

TEST(A Ftrl row that has only seen zeros stays finite) {
  const Sample sample{"", {OptimizerKind::kFtrl}, {.learning_rate = 0.1}};
  for (const Kernels* kernels : AvailableKernels()) {
    std::vector<float> row(27, 0.0f), g(9, 0.0f), scratch(9);
    const RowsView view{reinterpret_cast<std::byte*>(row.data()), 108, 9, DType::kFloat32, 36};
    const Occurrence occurrence{0, 0};
    kernels->update(view, sample.options, sample.step, &occurrence, 1,
                    {.base = g.data(), .stride = 9}, scratch.data());
    for (const float v : row) CHECK_EQ(v, 0.0f);
  }
}

TEST(A row of SmartDecayAdam knows how many steps passed however many there were before) {
  const Sample sample{"", {OptimizerKind::kSmartDecayAdam}, {.learning_rate = 0.1}};
  constexpr int64_t kLate = int64_t{1} << 40;
  for (const int64_t dim : {1, 2, 7, 8}) {
    const auto same = [&](std::vector<int64_t> steps, std::vector<int64_t> others) {
      std::vector<float> a = RunEngine(*AvailableKernels().front(), sample, dim, steps);
      std::vector<float> b = RunEngine(*AvailableKernels().front(), sample, dim, others);
      CHECK_EQ(LastStep(a), steps.back());
      a.resize(a.size() - 2);
      b.resize(b.size() - 2);
      return a == b;
    };
    CHECK(same({kLate + 1, kLate + 2, kLate + 5}, {1, 2, 5}));
    CHECK(!same({1, 2, 5}, {1, 2, 4}));
    // Steps that are counted from 1 again: the row takes each as the next one.
    CHECK(same({5, 9, 3}, {5, 9, 10}));
    CHECK(same({5, 9, 9}, {5, 9, 10}));
  }
}

TEST(Names and kinds map to each other) {
#define EMBSTORE_CHECK(kind, name)                           \
  CHECK_EQ(Name(OptimizerKind::k##kind), std::string(name)); \
  CHECK_EQ(OptimizerFromName(name), OptimizerKind::k##kind);
  EMBSTORE_OPTIMIZERS(EMBSTORE_CHECK)
#undef EMBSTORE_CHECK
  CHECK_THROWS(InvalidArgument, "sgd, momentum, adagrad", OptimizerFromName("adm"));
  CHECK_THROWS(InvalidArgument, "but is: adm", OptimizerFromName("adm"));
  CHECK_THROWS(InvalidArgument, "but is: 99", Name(static_cast<OptimizerKind>(99)));
}

TEST(States list what follows the embedding) {
  const std::vector<StateSpec> adam = States({OptimizerKind::kAdam}, 7);
  CHECK_EQ(adam.size(), 2u);
  CHECK_EQ(adam[0].name, "exp_avg");
  CHECK_EQ(adam[1].name, "exp_avg_sq");
  CHECK_EQ(adam[1].width, 7);
  CHECK_EQ(States({OptimizerKind::kRowwiseAdagrad}, 97)[0].width, 1);
  CHECK_EQ(StateWidth({OptimizerKind::kSgd}, 97), 0);
  CHECK_EQ(StateWidth({OptimizerKind::kRowwiseAdagrad}, 97), 1);
  CHECK_EQ(StateWidth({OptimizerKind::kFtrl}, 97), 194);
  // The width of OneEmbedding: columns padded to eight bytes, then eight for the step.
  CHECK_EQ(States({OptimizerKind::kSmartDecayAdam}, 7)[2].name, "last_step");
  CHECK_EQ(StateWidth({OptimizerKind::kSmartDecayAdam}, 8), 18);
  CHECK_EQ(StateWidth({OptimizerKind::kSmartDecayAdam}, 7), 17);
}

TEST(A new Ftrl row starts its accumulator and not its linear term) {
  std::vector<float> state(6, -1.0f);
  InitState({OptimizerKind::kFtrl, 0.1f}, 3, state.data());
  CHECK(state == std::vector<float>({0.1f, 0.1f, 0.1f, 0.0f, 0.0f, 0.0f}));
}

TEST(Wrong options are refused by name and value) {
  using K = OptimizerKind;
  struct ErrorInput {
    K kind;
    StepOptions step;
    std::string message;
  };
  const ErrorInput inputs[] = {
      {K::kSgd, {.learning_rate = kNan}, "learning_rate should be finite but is: nan"},
      {K::kSgd, {.learning_rate = -0.5}, "learning_rate should be at least 0 but is: -0.5"},
      {K::kSgd, {.weight_decay = -1}, "weight_decay should be at least 0 but is: -1"},
      {K::kSgd, {.clip_value = kNan}, "clip_value should be finite but is: nan"},
      {K::kSgd, {.clip_norm = -2}, "clip_norm should be at least 0 but is: -2"},
      {K::kAdam, {.eps = -1e-8}, "eps should be at least 0 but is: -1e-08"},
      {K::kAdam, {.eps_placement = static_cast<EpsPlacement>(9)}, "kTorch or kKeras but is: 9"},
      {K::kAdam, {.beta1 = 1.0}, "beta1 should be in [0, 1) but is: 1"},
      {K::kSmartDecayAdam, {.beta1 = 1.0}, "beta1 should be in [0, 1) but is: 1"},
      {K::kAdamax, {.beta2 = -0.1}, "beta2 should be in [0, 1) but is: -0.1"},
      {K::kAdam, {.step = 0}, "step should be at least 1 but is: 0"},
      {K::kMomentum, {.momentum = -1}, "momentum should be at least 0 but is: -1"},
      {K::kMomentum, {.dampening = kNan}, "dampening should be finite but is: nan"},
      {K::kMomentum, {.dampening = 0.5, .nesterov = true}, "dampening should be 0 with nesterov"},
      {K::kAdadelta, {.rho = 1.5}, "rho should be in [0, 1] but is: 1.5"},
      {K::kFtrl, {.learning_rate = 0}, "learning_rate should be above 0 for ftrl but is: 0"},
      {K::kFtrl, {.learning_rate_power = kNan}, "learning_rate_power should be finite"},
      {K::kFtrl, {.lambda1 = -1}, "lambda1 should be at least 0 but is: -1"},
      {K::kFtrl, {.lambda2 = -1}, "lambda2 should be at least 0 but is: -1"},
      {K::kFtrl, {.beta = -1}, "beta should be at least 0 but is: -1"},
  };
  for (const ErrorInput& input : inputs) {
    CHECK_THROWS(InvalidArgument, input.message,
                 Validate(OptimizerOptions{input.kind}, input.step));
  }
  CHECK_THROWS(InvalidArgument, "initial_accumulator should be at least 0 but is: -1",
               Validate(OptimizerOptions{K::kAdagrad, -1.0f}));
  CHECK_THROWS(InvalidArgument, "but is: 99", Validate(OptimizerOptions{static_cast<K>(99)}));
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
