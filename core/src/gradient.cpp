#include "embstore/gradient.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <string>

#include "embstore/lookup.h"
#include "embstore/parallel.h"
#include "grouping.h"
#include "importance.h"

namespace embstore {
namespace {

// What the kernels need of a pooled batch: the bag and the factor of every occurrence.
struct Bags {
  RecycledBuffer bag_of, scale;
  bool scaled = false;

  Bags(const GradientRequest& request) {
    const auto n = static_cast<size_t>(request.slots->size());
    bag_of = RecycledBuffer(n * sizeof(uint32_t));
    scaled = request.weights || request.pooling == Pooling::kMean;
    if (scaled) scale = RecycledBuffer(n * sizeof(float));
    const auto bags = static_cast<int64_t>(request.offsets.size()) - 1;
    constexpr int64_t kBagsPerTask = 2048;
    ParallelFor((bags + kBagsPerTask - 1) / kBagsPerTask, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kBagsPerTask, bags);
      for (int64_t bag = task * kBagsPerTask; bag < end; ++bag) Expand(request, bag);
    });
  }

  void Expand(const GradientRequest& request, int64_t bag) const {
    const int64_t begin = request.offsets[static_cast<size_t>(bag)];
    const int64_t end = request.offsets[static_cast<size_t>(bag + 1)];
    std::fill(bag_of.as<uint32_t>() + begin, bag_of.as<uint32_t>() + end,
              static_cast<uint32_t>(bag));
    if (!scaled) return;
    const bool mean = request.pooling == Pooling::kMean;
    const float length = static_cast<float>(end - begin);
    for (int64_t i = begin; i < end; ++i) {
      const float weight = request.weights ? request.weights[i] : 1.0f;
      scale.as<float>()[i] = mean ? weight / length : weight;
    }
  }
};

// The vector number of every occurrence, for a batch that is not pooled but stored in runs.
RecycledBuffer VectorNumbers(const GradientRequest& request) {
  RecycledBuffer numbers(static_cast<size_t>(request.slots->size()) * sizeof(uint32_t));
  for (size_t run = 0; run + 1 < request.offsets.size(); ++run) {
    const int64_t begin = request.offsets[run], end = request.offsets[run + 1];
    std::iota(numbers.as<uint32_t>() + begin, numbers.as<uint32_t>() + end,
              static_cast<uint32_t>(request.gradients.positions[run] / request.gradients.stride));
  }
  return numbers;
}

// A request in progress.
struct Work {
  const GradientRequest* request;
  std::unique_ptr<Bags> bags;
  RecycledBuffer numbers;
  VectorsView gradients;
  std::unique_ptr<Grouping> grouping;

  // `threads` share its sort.
  Work(const GradientRequest& from, int threads) : request(&from), gradients(from.gradients) {
    if (from.pooling != Pooling::kNone) {
      bags = std::make_unique<Bags>(from);
      gradients.bag_of = bags->bag_of.as<uint32_t>();
      gradients.scale = bags->scaled ? bags->scale.as<float>() : nullptr;
    } else if (gradients.positions != nullptr) {
      numbers = VectorNumbers(from);
      gradients.bag_of = numbers.as<uint32_t>();
      gradients.positions = nullptr;
    }
    grouping = std::make_unique<Grouping>(from.slots->rows(), from.slots->size(),
                                          from.slots->table().row_limit(), threads);
  }
};

void GroupAll(std::vector<Work>& works) {
  std::vector<Grouping*> batches;
  for (Work& work : works) batches.push_back(work.grouping.get());
  Grouping::SortAll(batches);
}

void ValidateRequest(const GradientRequest& request) {
  Validate(request.slots->table().options().optimizer, request.step);
  ValidateLayout(request.pooling, request.offsets, request.slots->size(), request.gradients);
}

// Returns the tables, in the order in which they are locked.
std::vector<Table*> ValidateRequests(std::span<const GradientRequest> requests) {
  std::vector<Table*> tables;
  for (const GradientRequest& request : requests) {
    ValidateRequest(request);
    tables.push_back(&request.slots->table());
  }
  std::sort(tables.begin(), tables.end());
  if (std::adjacent_find(tables.begin(), tables.end()) != tables.end()) {
    throw InvalidArgument("requests should name each table once");
  }
  return tables;
}

// Fills in the rows of a list; returns how many keys were not there.
int64_t FindForUpdate(Table& table, std::span<const int64_t> keys, SlotList& list,
                      bool renew_scores) {
  const auto n = static_cast<int64_t>(keys.size());
  int64_t missing = 0;
  if (table.store() || renew_scores) {
    std::unique_lock guard(table.lock());
    table.RequireOpen();
    if (table.store()) table.BringUp(keys, list.rows());
    if (renew_scores) {
      const BatchScore score = table.NextBatchScore(n);
      table.FindAll(keys, list.rows(), score);
      table.NoteAnnounced(list, score);
    }
    // Counted now: another thread may erase keys later, which rewrites the list.
    missing = std::count(list.rows(), list.rows() + n, kMissingRow);
  } else {
    std::shared_lock guard(table.lock());
    table.RequireOpen();
    table.FindAll(keys, list.rows(), {ScoreUpdate::kKeep, 0});
    missing = std::count(list.rows(), list.rows() + n, kMissingRow);
  }
  if (missing > 0 && table.has_shared_rows()) {
    std::shared_lock guard(table.lock());
    for (int64_t i = 0; i < n; ++i) {
      Row& row = list.rows()[i];
      if (row == kMissingRow) row = table.SharedRow(keys[static_cast<size_t>(i)]);
    }
  }
  return missing;
}

}  // namespace

void ApplyGradients(std::span<const GradientRequest> requests) {
  const std::vector<Table*> tables = ValidateRequests(requests);
  std::vector<std::unique_lock<RwLock>> guards;
  for (Table* table : tables) guards.emplace_back(table->lock());
  for (Table* table : tables) table->RequireOpen();

  std::vector<Work> works;
  works.reserve(requests.size());
  // Several tables are sorted side by side.
  const auto tables_at_once = std::min<size_t>(std::max<size_t>(requests.size(), 1), 1024);
  const int threads = (NumThreads() - 1) / static_cast<int>(tables_at_once) + 1;
  for (const GradientRequest& request : requests) works.emplace_back(request, threads);
  GroupAll(works);
  std::vector<std::pair<Work*, int64_t>> tasks;
  for (Work& work : works) {
    for (int64_t partition = 0; partition < work.grouping->partitions(); ++partition) {
      tasks.emplace_back(&work, partition);
    }
  }
  std::vector<std::vector<SharedGradient>> of_shared_rows(tasks.size());
  ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t task) {
    const auto& [work, partition] = tasks[static_cast<size_t>(task)];
    const std::span<const Occurrence> sorted = work->grouping->Partition(partition);
    if (sorted.empty()) return;
    Table& table = work->request->slots->table();
    table.BeforeUpdate(*work->request->slots, sorted);
    thread_local std::vector<float> scratch;
    scratch.resize(std::max(scratch.size(), static_cast<size_t>(table.dim())));
    ActiveKernels().update(table.rows(), table.options().optimizer, work->request->step,
                           sorted.data(), static_cast<int64_t>(sorted.size()), work->gradients,
                           scratch.data());
    if (table.scores_gradients() && !work->request->by_number) {
      of_shared_rows[static_cast<size_t>(task)] =
          AddImportance(*work->request->slots, sorted, work->gradients);
    }
  });
  // Rows are in the order of tasks, and the occurrences of a row in the order of the batch,
  // whatever the number of threads.
  for (size_t task = 0; task < tasks.size(); ++task) {
    const SlotList& slots = *tasks[task].first->request->slots;
    for (const SharedGradient& gradient : of_shared_rows[task]) {
      slots.table().AddToSketch(slots.keys()[gradient.index], gradient.norm);
    }
  }
}

ReducedGradients ReduceGradients(const GradientRequest& request) {
  ValidateRequest(request);
  Table& table = request.slots->table();
  std::shared_lock guard(table.lock());
  table.RequireOpen();
  std::vector<Work> works;
  works.emplace_back(request, NumThreads());
  GroupAll(works);
  const Grouping& grouping = *works[0].grouping;
  const int64_t partitions = grouping.partitions(), dim = table.dim();
  std::vector<std::span<const Occurrence>> sorted(static_cast<size_t>(partitions));
  std::vector<int64_t> begins(static_cast<size_t>(partitions + 1), 0);
  ParallelFor(partitions, [&](int64_t p) {
    auto& items = sorted[static_cast<size_t>(p)] = grouping.Partition(p);
    int64_t groups = 0;
    for (size_t i = 0; i < items.size(); ++i) groups += i == 0 || items[i].row != items[i - 1].row;
    begins[static_cast<size_t>(p + 1)] = groups;
  });
  for (size_t p = 1; p < begins.size(); ++p) begins[p] += begins[p - 1];
  ReducedGradients result;
  result.keys.resize(static_cast<size_t>(begins.back()));
  result.sums.resize(static_cast<size_t>(begins.back() * dim));
  ParallelFor(partitions, [&](int64_t p) {
    const std::span<const Occurrence> items = sorted[static_cast<size_t>(p)];
    int64_t at = begins[static_cast<size_t>(p)];
    ActiveKernels().reduce(dim, items.data(), static_cast<int64_t>(items.size()),
                           works[0].gradients, result.sums.data() + at * dim);
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0 && items[i].row == items[i - 1].row) continue;
      result.keys[static_cast<size_t>(at++)] = request.slots->keys()[items[i].index];
    }
  });
  for (const std::span<const Occurrence>& items : sorted) {
    for (size_t i = 0; i < items.size() && table.IsShared(static_cast<Row>(items[i].row)); ++i) {
      if (i == 0 || items[i].row != items[i - 1].row) result.shared.push_back(items[i].row);
    }
  }
  return result;
}

void WeightGradients(const GradientRequest& request, float* out) {
  ValidateRequest(request);
  Table& table = request.slots->table();
  std::shared_lock guard(table.lock());
  table.RequireOpen();
  const Bags bags(request);
  VectorsView gradients = request.gradients;
  gradients.bag_of = bags.bag_of.as<uint32_t>();
  const int64_t n = request.slots->size();
  constexpr int64_t kPerTask = 4096;
  ParallelFor((n + kPerTask - 1) / kPerTask, [&](int64_t task) {
    ActiveKernels().dot(table.rows(), request.slots->rows(), nullptr, task * kPerTask,
                        std::min((task + 1) * kPerTask, n), gradients, out);
  });
  if (request.pooling != Pooling::kMean) return;
  for (size_t bag = 0; bag + 1 < request.offsets.size(); ++bag) {
    const int64_t begin = request.offsets[bag], end = request.offsets[bag + 1];
    for (int64_t i = begin; i < end; ++i) out[i] /= static_cast<float>(end - begin);
  }
}

int64_t ApplyGradientsByKey(std::span<const KeyGradients> requests, bool renew_scores) {
  std::vector<std::unique_ptr<SlotList>> lists;
  std::vector<GradientRequest> found;
  for (const KeyGradients& request : requests) {
    RequireBatchSize(request.keys.size());
    lists.push_back(std::make_unique<SlotList>(request.table, request.keys));
    GradientRequest& by_slot = found.emplace_back();
    by_slot.slots = lists.back().get();
    by_slot.pooling = request.offsets.empty() ? Pooling::kNone : Pooling::kSum;
    by_slot.offsets = request.offsets;
    by_slot.gradients = request.gradients;
    by_slot.step = request.step;
  }
  ValidateRequests(found);
  int64_t missing = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    missing += FindForUpdate(*requests[i].table, requests[i].keys, *lists[i], renew_scores);
  }
  // Between the two locks the lists pin their rows, and forget those that are taken.
  ApplyGradients(found);
  return missing;
}

int64_t ApplyGradientsByKey(Table& table, std::span<const int64_t> keys,
                            const VectorsView& gradients, const StepOptions& step,
                            bool renew_scores) {
  const KeyGradients request{table.shared_from_this(), keys, {}, gradients, step};
  return ApplyGradientsByKey({&request, 1}, renew_scores);
}

void ApplyGradientsToShared(Table& table, std::span<const int64_t> numbers,
                            const VectorsView& gradients, const StepOptions& step) {
  RequireBatchSize(numbers.size());
  const SlotList list(table.shared_from_this(), numbers);
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < 0 || numbers[i] >= table.options().shared_rows) {
      throw InvalidArgument("numbers should be below shared_rows (" +
                            std::to_string(table.options().shared_rows) +
                            ") but one is: " + std::to_string(numbers[i]));
    }
    list.rows()[i] = static_cast<Row>(numbers[i]);
  }
  GradientRequest request;
  request.slots = &list;
  request.gradients = gradients;
  request.step = step;
  request.by_number = true;
  ApplyGradients({&request, 1});
}

}  // namespace embstore
