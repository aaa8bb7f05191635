// Binding of Table, of step options, and of rows as numpy arrays.
#include "embstore/table.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "embstore/gradient.h"
#include "embstore/snapshot.h"
#include "module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace embstore {
namespace {

// A numpy array that takes over the contents of a vector.
template <typename T, typename... Shape>
nb::ndarray<nb::numpy, T> ToNumpy(std::vector<T>&& values, Shape... shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(kept->data(), {static_cast<size_t>(shape)...}, owner);
}

// (keys, values, states, scores); values and states are empty unless they were requested.
nb::tuple ToArrays(RowBlock&& block, int64_t dim, int64_t width) {
  const auto n = block.keys.size();
  const auto value_rows = dim ? block.values.size() / static_cast<size_t>(dim) : 0;
  const auto state_rows = !block.states.empty() ? n : value_rows * (width == 0);
  return nb::make_tuple(
      ToNumpy(std::move(block.keys), n), ToNumpy(std::move(block.values), value_rows, dim),
      ToNumpy(std::move(block.states), state_rows, width), ToNumpy(std::move(block.scores), n));
}

nb::tuple ToTuple(MissSampler::Sample&& sample) {
  const size_t bins = sample.distances.size(), keys = sample.counts.size();
  return nb::make_tuple(sample.rate, sample.uses, sample.first_uses, sample.evicted,
                        sample.returned, ToNumpy(std::move(sample.distances), bins),
                        ToNumpy(std::move(sample.counts), keys));
}

std::shared_ptr<Table> MakeTable(
    const std::string& name, int64_t dim, int dtype, int64_t init_capacity, int64_t max_capacity,
    int64_t bucket_capacity, double max_load_factor, const std::string& optimizer,
    double initial_accumulator, int initializer, const std::vector<double>& initializer_values,
    int score_strategy, bool evict_least_used, uint64_t seed, int eviction_log,
    int64_t eviction_log_capacity, int64_t admission_threshold, bool admit_by_frequency,
    int64_t half_life, int64_t shared_rows, int shared_by, bool start_from_shared, uint64_t ttl,
    std::shared_ptr<Store> store) {
  TableOptions options;
  options.name = name;
  options.dim = dim;
  options.dtype = static_cast<DType>(dtype);
  options.index = {init_capacity, max_capacity, bucket_capacity, max_load_factor};
  options.optimizer.kind = OptimizerFromName(optimizer);
  options.optimizer.initial_accumulator = static_cast<float>(initial_accumulator);
  options.initializer = InitializerFrom(initializer, initializer_values);
  options.score_strategy = static_cast<ScoreStrategy>(score_strategy);
  options.evict_least_used = evict_least_used;
  options.seed = seed;
  options.eviction_log = static_cast<EvictionLog>(eviction_log);
  options.eviction_log_capacity = eviction_log_capacity;
  options.admission_threshold = admission_threshold;
  options.admit_by_frequency = admit_by_frequency;
  options.half_life = half_life;
  options.shared_rows = shared_rows;
  options.shared_by = static_cast<Ownership>(shared_by);
  options.start_from_shared = start_from_shared;
  options.ttl = ttl;
  options.store = std::move(store);
  return Table::Create(options);
}

// Its destructor waits for the table's lock, whose holder may need the GIL.
struct PySnapshot {
  PySnapshot(std::shared_ptr<Table> table, bool changes)
      : snapshot(
            std::make_unique<Snapshot>(std::move(table), Snapshot::kMemoryBytes,
                                       changes ? Snapshot::Of::kChanges : Snapshot::Of::kTable)) {}
  ~PySnapshot() {
    nb::gil_scoped_release unlocked;
    snapshot.reset();
  }
  std::unique_ptr<Snapshot> snapshot;
};

std::span<const int64_t> Keys(uintptr_t address, int64_t n) {
  return {Address<const int64_t>(address), static_cast<size_t>(n)};
}

}  // namespace

void BindTable(nb::module_& m) {
  nb::class_<StepOptions>(m, "StepOptions")
      .def(nb::init<>())
      .def_rw("learning_rate", &StepOptions::learning_rate)
      .def_rw("weight_decay", &StepOptions::weight_decay)
      .def_rw("decoupled_weight_decay", &StepOptions::decoupled_weight_decay)
      .def_rw("gradient_scale", &StepOptions::gradient_scale)
      .def_rw("clip_value", &StepOptions::clip_value)
      .def_rw("clip_norm", &StepOptions::clip_norm)
      .def_rw("eps", &StepOptions::eps)
      .def_prop_rw(
          "eps_placement",
          [](const StepOptions& step) { return static_cast<int>(step.eps_placement); },
          [](StepOptions& step, int placement) {
            step.eps_placement = static_cast<EpsPlacement>(placement);
          })
      .def_rw("beta1", &StepOptions::beta1)
      .def_rw("beta2", &StepOptions::beta2)
      .def_rw("bias_correction", &StepOptions::bias_correction)
      .def_rw("step", &StepOptions::step)
      .def_rw("momentum", &StepOptions::momentum)
      .def_rw("dampening", &StepOptions::dampening)
      .def_rw("nesterov", &StepOptions::nesterov)
      .def_rw("velocity", &StepOptions::velocity)
      .def_rw("rho", &StepOptions::rho)
      .def_rw("learning_rate_power", &StepOptions::learning_rate_power)
      .def_rw("lambda1", &StepOptions::lambda1)
      .def_rw("lambda2", &StepOptions::lambda2)
      .def_rw("beta", &StepOptions::beta)
      .def_rw("l2_shrinkage", &StepOptions::l2_shrinkage)
      .def_rw("ftrl_paper_sign", &StepOptions::ftrl_paper_sign);

  m.def("optimizer_states", [](const std::string& optimizer, int64_t dim) {
    OptimizerOptions options;
    options.kind = OptimizerFromName(optimizer);
    std::vector<std::tuple<std::string, int64_t>> states;
    for (const StateSpec& state : States(options, dim))
      states.emplace_back(state.name, state.width);
    return states;
  });

  m.def(
      "initial_values",
      [](int kind, const std::vector<double>& values, uint64_t seed, const std::string& stream,
         uintptr_t keys, int64_t n, int64_t dim, uintptr_t out) {
        const Initializer initializer(InitializerFrom(kind, values), seed, stream);
        for (int64_t i = 0; i < n; ++i) {
          initializer.Fill(Address<const int64_t>(keys)[i],
                           {Address<float>(out) + i * dim, static_cast<size_t>(dim)});
        }
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("stored_row_bytes", [](int64_t dim, int dtype, const std::string& optimizer) {
    OptimizerOptions options;
    options.kind = OptimizerFromName(optimizer);
    return StoredRowBytes(dim, static_cast<DType>(dtype), options);
  });

  m.def(
      "full_table_bytes",
      [](int64_t dim, int dtype, const std::string& optimizer, int64_t max_capacity,
         int64_t bucket_capacity, double max_load_factor, bool evict_least_used,
         int64_t admission_threshold, bool admit_by_frequency, int64_t shared_rows) {
        TableOptions options;
        options.dim = dim;
        options.dtype = static_cast<DType>(dtype);
        options.optimizer.kind = OptimizerFromName(optimizer);
        options.index.max_capacity = max_capacity;
        options.index.bucket_capacity = bucket_capacity;
        options.index.max_load_factor = max_load_factor;
        options.evict_least_used = evict_least_used;
        options.admission_threshold = admission_threshold;
        options.admit_by_frequency = admit_by_frequency;
        options.shared_rows = shared_rows;
        return Table::FullBytes(options);
      },
      "dim"_a, "dtype"_a, "optimizer"_a, "max_capacity"_a, "bucket_capacity"_a, "max_load_factor"_a,
      "evict_least_used"_a, "admission_threshold"_a, "admit_by_frequency"_a, "shared_rows"_a);

  nb::class_<TableStats>(m, "TableStats")
      .def_ro("size", &TableStats::size)
      .def_ro("capacity", &TableStats::capacity)
      .def_ro("max_capacity", &TableStats::max_capacity)
      .def_ro("hits", &TableStats::hits)
      .def_ro("inserts", &TableStats::inserts)
      .def_ro("evictions", &TableStats::evictions)
      .def_ro("refusals", &TableStats::refusals)
      .def_ro("log_dropped", &TableStats::log_dropped)
      .def_ro("unadmitted", &TableStats::unadmitted)
      .def_ro("bytes", &TableStats::bytes)
      .def_ro("fetches", &TableStats::fetches)
      .def_ro("write_backs", &TableStats::write_backs)
      .def_ro("expired", &TableStats::expired)
      .def_ro("dropped_gradients", &TableStats::dropped_gradients);

  nb::class_<MissSampler>(m, "MissSampler", "What a table of another size would miss; see advise.")
      .def(nb::init<int64_t>(), "window"_a)
      .def("use",
           [](MissSampler& sampler, uintptr_t address, int64_t n) {
             const std::span<const int64_t> keys = Keys(address, n);
             std::vector<uint32_t> chosen;
             sampler.Select(keys, 0, chosen);
             std::vector<int64_t> sampled;
             for (const uint32_t i : chosen) sampled.push_back(keys[i]);
             sampler.Use(sampled, n);
           })
      .def("evict",
           [](MissSampler& sampler, uintptr_t address, int64_t n) {
             for (const int64_t key : Keys(address, n)) sampler.Evict(key);
           })
      .def("sample", [](const MissSampler& sampler) { return ToTuple(sampler.sample()); });

  nb::class_<Table::Cursor>(m, "Cursor").def(nb::init<>()).def_ro("next", &Table::Cursor::next);

  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Table>(m, "Table")
      .def(nb::new_(&MakeTable), Unlocked(), "name"_a, "dim"_a, "dtype"_a, "init_capacity"_a,
           "max_capacity"_a, "bucket_capacity"_a, "max_load_factor"_a, "optimizer"_a,
           "initial_accumulator"_a, "initializer"_a, "initializer_values"_a, "score_strategy"_a,
           "evict_least_used"_a, "seed"_a, "eviction_log"_a, "eviction_log_capacity"_a,
           "admission_threshold"_a, "admit_by_frequency"_a, "half_life"_a, "shared_rows"_a,
           "shared_by"_a, "start_from_shared"_a, "ttl"_a, "store"_a.none())
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("state_width", &Table::state_width)
      .def_prop_ro("row_bytes", &Table::row_bytes)
      .def("stats", &Table::stats, Unlocked())
      .def("size", &Table::size, Unlocked())
      .def("capacity", &Table::capacity, Unlocked())
      .def("current_score", &Table::current_score, Unlocked())
      .def("set_custom_score", &Table::set_custom_score, Unlocked(), "score"_a)
      .def("set_step", &Table::set_step, Unlocked(), "step"_a)
      .def("raise_clock", &Table::RaiseClock, Unlocked(), "score"_a)
      .def("set_seed", &Table::set_seed, Unlocked(), "seed"_a)
      .def(
          "contains",
          [](const Table& table, uintptr_t keys, int64_t n, uintptr_t found) {
            table.Contains(Keys(keys, n), Address<uint8_t>(found));
          },
          Unlocked())
      .def(
          "read",
          [](const Table& table, uintptr_t keys, int64_t n, uintptr_t values, uintptr_t states,
             uintptr_t scores, uintptr_t found) {
            table.Read(Keys(keys, n), Address<float>(values), Address<float>(states),
                       Address<uint64_t>(scores), Address<uint8_t>(found));
          },
          Unlocked())
      .def(
          "assign",
          [](Table& table, uintptr_t keys, int64_t n, uintptr_t values, uintptr_t states,
             uintptr_t scores) {
            return table.Assign(Keys(keys, n), Address<const float>(values),
                                Address<const float>(states), Address<const uint64_t>(scores));
          },
          Unlocked())
      .def(
          "set_uses",
          [](Table& table, uintptr_t keys, int64_t n, uintptr_t uses) {
            table.SetUses(Keys(keys, n), Address<const uint32_t>(uses));
          },
          Unlocked())
      .def(
          "initial_values",
          [](const Table& table, uintptr_t keys, int64_t n, uintptr_t values) {
            for (int64_t i = 0; i < n; ++i) {
              table.InitialVector(Address<const int64_t>(keys)[i],
                                  Address<float>(values) + i * table.dim());
            }
          },
          Unlocked())
      .def(
          "erase",
          [](Table& table, uintptr_t keys, int64_t n) { return table.Erase(Keys(keys, n)); },
          Unlocked())
      .def(
          "apply_gradients_to_shared",
          [](Table& table, uintptr_t numbers, int64_t n, uintptr_t gradients,
             const StepOptions& step) {
            VectorsView view;
            view.base = Address<void>(gradients);
            view.stride = table.dim();
            ApplyGradientsToShared(table, Keys(numbers, n), view, step);
          },
          Unlocked())
      .def("samples_misses", &Table::samples_misses, Unlocked())
      .def("sample_misses", &Table::SampleMisses, Unlocked(), "on"_a)
      .def("age_miss_sample", &Table::AgeMissSample, Unlocked(), "factor"_a)
      .def("miss_sample",
           [](const Table& table) {
             MissSampler::Sample sample;
             {
               nb::gil_scoped_release unlocked;
               sample = table.MissSample();
             }
             return ToTuple(std::move(sample));
           })
      .def("expire", &Table::Expire, Unlocked(), "min_score"_a)
      .def("clear", &Table::Clear, Unlocked())
      .def("set_max_capacity", &Table::SetMaxCapacity, Unlocked(), "rows"_a)
      .def("reserve", &Table::Reserve, Unlocked(), "rows"_a)
      .def("export",
           [](const Table& table, Table::Cursor& cursor, int64_t max_rows, uint64_t min_score,
              bool with_values, bool with_states) {
             RowBlock block;
             {
               nb::gil_scoped_release unlocked;
               block = table.Export(cursor, max_rows, min_score, with_values, with_states);
             }
             return ToArrays(std::move(block), table.dim(), table.state_width());
           })
      .def("track_changes", &Table::TrackChanges, Unlocked(), "on"_a)
      .def("shared_rows",
           [](const Table& table) {
             RowBlock block;
             {
               nb::gil_scoped_release unlocked;
               block = table.SharedRows();
             }
             return ToArrays(std::move(block), table.dim(), table.state_width());
           })
      .def(
          "assign_shared",
          [](Table& table, uintptr_t numbers, int64_t n, uintptr_t values, uintptr_t states) {
            table.AssignShared(Keys(numbers, n), Address<const float>(values),
                               Address<const float>(states));
          },
          Unlocked())
      .def("admission_counters",
           [](Table& table) {
             std::vector<uint16_t> counters;
             {
               nb::gil_scoped_release unlocked;
               counters = table.AdmissionCounters();
             }
             const size_t n = counters.size();
             return ToNumpy(std::move(counters), n);
           })
      .def("require_counters",
           [](const Table& table, uintptr_t words, int64_t n, bool changes) {
             table.RequireCounters({Address<const uint16_t>(words), static_cast<size_t>(n)},
                                   changes);
           })
      .def(
          "restore_admission_counters",
          [](Table& table, uintptr_t counters, int64_t n) {
            return table.RestoreAdmissionCounters(
                {Address<const uint16_t>(counters), static_cast<size_t>(n)});
          },
          Unlocked())
      .def("take_counter_changes",
           [](Table& table) {
             std::vector<uint16_t> changes;
             {
               nb::gil_scoped_release unlocked;
               changes = table.TakeCounterChanges();
             }
             const size_t n = changes.size();
             return ToNumpy(std::move(changes), n);
           })
      .def(
          "return_counter_changes",
          [](Table& table, uintptr_t taken, int64_t n) {
            table.ReturnCounterChanges({Address<const uint16_t>(taken), static_cast<size_t>(n)});
          },
          Unlocked())
      .def(
          "apply_counter_changes",
          [](Table& table, uintptr_t changes, int64_t n) {
            return table.ApplyCounterChanges(
                {Address<const uint16_t>(changes), static_cast<size_t>(n)});
          },
          Unlocked())
      .def("drain_evictions",
           [](Table& table) {
             RowBlock block;
             {
               nb::gil_scoped_release unlocked;
               block = table.DrainEvictions();
             }
             return ToArrays(std::move(block), table.dim(), table.state_width());
           })
      .def(
          "set_optimizer",
          [](Table& table, const std::string& name, double initial_accumulator) {
            OptimizerOptions options;
            options.kind = OptimizerFromName(name);
            options.initial_accumulator = static_cast<float>(initial_accumulator);
            table.SetOptimizer(options);
          },
          Unlocked(), "optimizer"_a, "initial_accumulator"_a)
      .def(
          "prefetch",
          [](Table& table, uintptr_t keys, int64_t n) { return table.Prefetch(Keys(keys, n)); },
          Unlocked())
      .def("flush", &Table::Flush, Unlocked())
      .def("snapshot", &Table::SaveCheckpoint, Unlocked(), "name"_a)
      .def("load_snapshot", &Table::LoadCheckpoint, Unlocked(), "name"_a)
      .def(
          "resident",
          [](const Table& table, uintptr_t keys, int64_t n, uintptr_t found) {
            table.Resident(Keys(keys, n), Address<uint8_t>(found));
          },
          Unlocked())
      .def(
          "set_eviction_log",
          [](Table& table, int log) { table.set_eviction_log(static_cast<EvictionLog>(log)); },
          Unlocked())
      .def("close", &Table::Close, Unlocked());

  nb::class_<PySnapshot>(m, "Snapshot",
                         "A consistent view of a table at one moment, read while it is trained.")
      .def(nb::init<std::shared_ptr<Table>, bool>(), Unlocked(), "table"_a, "changes"_a = false)
      .def_prop_ro(
          "rows", [](PySnapshot& self) { return self.snapshot->rows(); }, Unlocked())
      .def_prop_ro("shared",
                   [](const PySnapshot& self) {
                     const Table& table = self.snapshot->table();
                     return ToArrays(RowBlock(self.snapshot->shared()), table.dim(),
                                     table.state_width());
                   })
      .def(
          "removed",
          [](PySnapshot& self) {
            std::vector<int64_t> keys;
            {
              nb::gil_scoped_release unlocked;
              keys = self.snapshot->removed();
            }
            const auto n = keys.size();
            return ToNumpy(std::move(keys), n);
          },
          "Of changes: the keys that were gone, sorted.")
      .def(
          "detach", [](PySnapshot& self) { self.snapshot->Detach(); }, Unlocked(),
          "Ends reading, and lets go of the table.")
      .def(
          "restore", [](PySnapshot& self) { self.snapshot->Restore(); }, Unlocked(),
          "Puts back the changes that it took.")
      .def(
          "read",
          [](PySnapshot& self, int64_t max_rows, uintptr_t keys, uintptr_t values, uintptr_t states,
             uintptr_t scores, uint64_t min_score, uintptr_t uses) {
            return self.snapshot->Read(max_rows, min_score, Address<int64_t>(keys),
                                       Address<float>(values), Address<float>(states),
                                       Address<uint64_t>(scores), Address<uint32_t>(uses));
          },
          Unlocked(), "max_rows"_a, "keys"_a, "values"_a, "states"_a, "scores"_a, "min_score"_a = 0,
          "uses"_a = 0);
}

}  // namespace embstore
