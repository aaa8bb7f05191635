#include "embstore/lookup.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "embstore/parallel.h"

namespace embstore {
namespace {

constexpr int64_t kKeysPerTask = 2048;

// Larger outputs of a call have left the caches before a model reads them.
constexpr int64_t kCachedOutputBytes = (int64_t{32} << 20) - 1;

// A share of one request: bags [first, last) if pooled, else keys [first, last).
struct Share {
  int64_t first, last;
  std::vector<uint32_t> missing = {};  // occurrences without a row, ascending
  std::vector<uint32_t> sampled = {};  // occurrences for the MissSampler, ascending
};

// A request in progress.
struct Work {
  const LookupRequest* request;
  Row* numbers;              // of its occurrences
  SlotList* list = nullptr;  // of a training batch: gets the keys, and `numbers` are its rows
  BatchScore score;
  bool found = false;  // `numbers` are known
  std::vector<Share> shares;
  std::vector<uint32_t> missing;  // of all shares
  std::vector<uint32_t> waiting;  // in training: those that are not to be stored yet
  std::vector<float> extra;       // vectors of keys that are not stored
  int64_t refused = 0;
  bool around_caches = false;

  Work(const LookupRequest* from, Row* to) : request(from), numbers(to) {}
  Work(const LookupRequest* from, SlotList* to) : request(from), numbers(to->rows()), list(to) {}

  // Whether a missing key may read something other than zero in evaluation.
  bool has_more() const {
    return request->table->store() != nullptr || request->table->has_shared_rows();
  }
  // Of a training batch, where misses are sampled.
  MissSampler* miss_sampler() const {
    return score.update == ScoreUpdate::kKeep ? nullptr : request->table->miss_sampler();
  }
  bool pooled() const { return request->pooling != Pooling::kNone; }
  const float* extra_rows() const { return extra.empty() ? nullptr : extra.data(); }

  void Split() {
    const auto n = static_cast<int64_t>(request->keys.size());
    if (!pooled()) {
      for (int64_t i = 0; i < n; i += kKeysPerTask) {
        shares.push_back({i, std::min(i + kKeysPerTask, n)});
      }
      return;
    }
    // Divides bags by their number of keys; empty bags count a little, since they are zeroed.
    const auto bags = static_cast<int64_t>(request->offsets.size()) - 1;
    for (int64_t first = 0, last; first < bags; first = last) {
      for (last = first + 1; last < bags && request->offsets[static_cast<size_t>(last)] -
                                                    request->offsets[static_cast<size_t>(first)] +
                                                    (last - first) / 4 <
                                                kKeysPerTask;) {
        ++last;
      }
      shares.push_back({first, last});
    }
  }

  // All rows of a share first, then all vectors: one loop waits for the index, the other for row
  // memory, and each keeps as many cache misses in flight as the machine allows. Vectors of missing
  // keys are written again once they have a row.
  void Answer(Share& share) {
    int64_t begin = share.first, end = share.last;
    if (pooled()) {
      begin = request->offsets[static_cast<size_t>(begin)];
      end = request->offsets[static_cast<size_t>(end)];
    }
    const auto n = static_cast<size_t>(end - begin);
    const auto keys = request->keys.subspan(static_cast<size_t>(begin), n);
    if (list) std::copy(keys.begin(), keys.end(), list->keys() + begin);
    const int64_t missing_here =
        found ? std::count(numbers + begin, numbers + end, kMissingRow)
              : request->table->FindHere(keys, numbers + begin, score, shares.size() == 1);
    share.missing.reserve(static_cast<size_t>(missing_here));
    for (int64_t i = begin; std::ssize(share.missing) < missing_here; ++i) {
      if (numbers[i] == kMissingRow) share.missing.push_back(static_cast<uint32_t>(i));
    }
    if (const MissSampler* sampler = miss_sampler()) {
      sampler->Select(keys, begin, share.sampled);
    }
    const RowsView rows = request->table->rows();
    if (pooled()) {
      PoolBags(rows, share.first, share.last);
    } else {
      Gather(rows, begin, end);
    }
  }

  // After Split, before Answer.
  void FindDivided() {
    found = shares.size() > 1 && request->table->FindsDivided(score);
    if (found) request->table->FindAll(request->keys, numbers, score);
  }

  void Gather(const RowsView& rows, int64_t begin, int64_t end) const {
    const VectorsView& out = request->out;
    const auto gather = [&](int64_t from, int64_t until, int64_t position) {
      auto* to =
          static_cast<std::byte*>(out.base) + position * static_cast<int64_t>(SizeOf(out.dtype));
      ActiveKernels().gather(rows, numbers + from, until - from, extra_rows(), to, out.dtype,
                             out.stride, around_caches);
    };
    if (out.positions == nullptr) {
      gather(begin, end, begin * out.stride);
      return;
    }
    const std::span<const int64_t> offsets = request->offsets;
    auto run = std::upper_bound(offsets.begin(), offsets.end(), begin) - offsets.begin() - 1;
    for (int64_t from = begin; from < end; ++run) {
      const int64_t until = std::min(end, offsets[static_cast<size_t>(run + 1)]);
      if (until <= from) continue;  // an empty run
      gather(from, until,
             out.positions[run] + (from - offsets[static_cast<size_t>(run)]) * out.stride);
      from = until;
    }
  }

  void PoolBags(const RowsView& rows, int64_t first, int64_t last) const {
    ActiveKernels().pool(rows, numbers, extra_rows(), request->offsets.data(), request->weights,
                         request->pooling == Pooling::kMean, first, last, request->out);
  }

  void AnswerAgain(const Share& share) const {
    const RowsView rows = request->table->rows();
    if (!pooled()) {
      // In runs, since a gather prefetches the rows of its run.
      const std::vector<uint32_t>& missing_here = share.missing;
      for (size_t j = 0, end = 0; j < missing_here.size(); j = end) {
        for (end = j + 1; end < missing_here.size();) {
          if (missing_here[end] != missing_here[end - 1] + 1) break;
          ++end;
        }
        Gather(rows, missing_here[j], missing_here[end - 1] + int64_t{1});
      }
      return;
    }
    int64_t done = -1;
    for (uint32_t i : share.missing) {
      if (static_cast<int64_t>(i) < done) continue;
      const auto after = std::upper_bound(request->offsets.begin() + share.first,
                                          request->offsets.begin() + share.last, int64_t{i});
      const int64_t bag = after - request->offsets.begin() - 1;
      PoolBags(rows, bag, bag + 1);
      done = request->offsets[static_cast<size_t>(bag + 1)];
    }
  }

  void SampleMisses() const {
    MissSampler* const sampler = miss_sampler();
    if (!sampler) return;
    std::vector<int64_t> keys;
    for (const Share& share : shares) {
      for (const uint32_t i : share.sampled) keys.push_back(request->keys[i]);
    }
    sampler->Use(keys, std::ssize(request->keys));
  }

  void CollectMissing() {
    for (const Share& share : shares) {
      missing.insert(missing.end(), share.missing.begin(), share.missing.end());
    }
  }

  // The initial vector of this occurrence's key.
  void InitialVector(uint32_t occurrence, float* vector) const {
    const auto dim = static_cast<size_t>(request->table->dim());
    if (request->initial) {
      std::copy_n(request->initial + occurrence * dim, dim, vector);
    } else {
      request->table->InitialVector(request->keys[occurrence], vector);
    }
  }

  // Training: shared rows, or else initial values, for keys that are not to be stored yet.
  void UseInitialValues() {
    if (request->table->has_shared_rows()) {
      request->table->UseShared(request->keys.data(), numbers, missing);  // refused keys
      request->table->UseShared(request->keys.data(), numbers, waiting);
      waiting.clear();
      return;
    }
    const auto dim = static_cast<size_t>(request->table->dim());
    extra.resize(waiting.size() * dim);
    for (size_t j = 0; j < waiting.size(); ++j) {
      InitialVector(waiting[j], extra.data() + j * dim);
      numbers[waiting[j]] = ExtraRow(static_cast<int64_t>(j));
    }
  }

  // Evaluation: vectors from the store below, else shared rows, else initial values if requested.
  // The rest reads zero, as Answer wrote it.
  void UseOtherVectors(bool initial) {
    const Table& table = *request->table;
    const auto dim = static_cast<size_t>(table.dim());
    const FetchedRows below = table.Fetch(request->keys.data(), missing);
    extra.resize(missing.size() * dim);
    for (size_t j = 0; j < missing.size(); ++j) {
      const int64_t key = request->keys[missing[j]];
      float* vector = extra.data() + j * dim;
      if (const std::byte* row = below.Find(key).data) {
        ActiveKernels().load_vector(row, table.dim(), table.options().dtype, vector);
      } else if (const Row shared = table.SharedRow(key); shared != kMissingRow) {
        numbers[missing[j]] = shared;
        continue;
      } else if (initial) {
        InitialVector(missing[j], vector);
      } else {
        continue;
      }
      numbers[missing[j]] = ExtraRow(static_cast<int64_t>(j));
    }
  }
};

void Validate(std::span<const LookupRequest> requests) {
  std::vector<const Table*> tables;
  for (const LookupRequest& request : requests) {
    RequireBatchSize(request.keys.size());
    ValidateLayout(request.pooling, request.offsets, static_cast<int64_t>(request.keys.size()),
                   request.out);
    tables.push_back(request.table.get());
  }
  std::sort(tables.begin(), tables.end());
  const auto twice = std::adjacent_find(tables.begin(), tables.end());
  if (twice != tables.end()) {
    throw InvalidArgument("requests should name each table once but '" + (*twice)->options().name +
                          "' is there twice");
  }
}

// Locks all tables in the order of their addresses, so that two calls cannot deadlock.
template <typename Guard>
std::vector<Guard> LockAll(std::span<const LookupRequest> requests) {
  std::vector<const Table*> tables;
  for (const LookupRequest& request : requests) tables.push_back(request.table.get());
  std::sort(tables.begin(), tables.end());
  std::vector<Guard> guards;
  for (const Table* table : tables) guards.emplace_back(table->lock());
  for (const Table* table : tables) table->RequireOpen();
  return guards;
}

void InsertAll(std::vector<Work>& works) {
  std::vector<Work*> busy;
  for (Work& work : works) {
    if (!work.missing.empty()) busy.push_back(&work);
  }
  const auto insert = [](Work& work) {
    work.refused =
        work.request->table->InsertMissing(work.request->keys.data(), work.numbers, work.missing,
                                           work.score, work.request->initial, work.waiting);
  };
  // Many tables run in parallel; few run one by one, each on several threads.
  if (static_cast<int>(busy.size()) >= NumThreads()) {
    ParallelFor(static_cast<int64_t>(busy.size()),
                [&](int64_t i) { insert(*busy[static_cast<size_t>(i)]); });
  } else {
    for (Work* work : busy) insert(*work);
  }
}

int64_t OutputBytes(const std::vector<Work>& works) {
  int64_t bytes = 0;
  for (const Work& work : works) {
    if (work.pooled()) continue;
    bytes += std::ssize(work.request->keys) * work.request->table->dim() *
             static_cast<int64_t>(SizeOf(work.request->out.dtype));
  }
  return bytes;
}

void Run(std::vector<Work>& works, Access access) {
  std::vector<std::pair<Work*, Share*>> tasks;
  const bool around_caches = OutputBytes(works) > kCachedOutputBytes;
  for (Work& work : works) {
    work.around_caches = around_caches;
    work.Split();
    work.FindDivided();
    for (Share& share : work.shares) tasks.emplace_back(&work, &share);
  }
  ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t task) {
    auto& [work, share] = tasks[static_cast<size_t>(task)];
    work->Answer(*share);
  });
  bool again = false;
  for (Work& work : works) {
    work.CollectMissing();
    work.SampleMisses();
    if (access == Access::kReadInitial || (access == Access::kReadZero && work.has_more())) {
      work.UseOtherVectors(access == Access::kReadInitial);
    }
    if (access == Access::kTrain) {
      work.request->table->CountHits(
          static_cast<int64_t>(work.request->keys.size() - work.missing.size()));
    }
    // The zeros are already written.
    again |= !work.missing.empty() && (access != Access::kReadZero || work.has_more());
    if (access == Access::kTrain) {
      work.waiting = work.request->table->Admit(work.request->keys.data(), work.missing,
                                                work.request->admitted);
    }
  }
  if (!again) return;
  if (access == Access::kTrain) {
    InsertAll(works);
    for (Work& work : works) work.UseInitialValues();
  }
  ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t task) {
    auto& [work, share] = tasks[static_cast<size_t>(task)];
    if (!share->missing.empty()) work->AnswerAgain(*share);
  });
  // `extra` ends with this call, so no row number may refer to it: the backward pass skips these.
  for (Work& work : works) {
    for (const uint32_t i : work.waiting) work.numbers[i] = kMissingRow;
  }
}

}  // namespace

void ValidateOffsets(std::span<const int64_t> offsets, int64_t n) {
  if (offsets.empty()) throw InvalidArgument("offsets should have at least one element but has: 0");
  if (offsets.front() != 0) {
    throw InvalidArgument("offsets should begin with 0 but offsets[0] is: " +
                          std::to_string(offsets.front()));
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      throw InvalidArgument("offsets should not descend but offsets[" + std::to_string(i) +
                            "] is: " + std::to_string(offsets[i]) + " after " +
                            std::to_string(offsets[i - 1]));
    }
  }
  if (offsets.back() != n) {
    throw InvalidArgument("offsets should end with the number of keys (" + std::to_string(n) +
                          ") but ends with: " + std::to_string(offsets.back()));
  }
}

void ValidateLayout(Pooling pooling, std::span<const int64_t> offsets, int64_t n,
                    const VectorsView& vectors) {
  if (pooling != Pooling::kNone || vectors.positions != nullptr) ValidateOffsets(offsets, n);
  if (pooling != Pooling::kNone || vectors.positions == nullptr) return;
  for (size_t run = 0; run + 1 < offsets.size(); ++run) {
    if (vectors.positions[run] < 0 || vectors.positions[run] % vectors.stride != 0) {
      throw InvalidArgument("positions should be multiples of the stride (" +
                            std::to_string(vectors.stride) + ") but positions[" +
                            std::to_string(run) +
                            "] is: " + std::to_string(vectors.positions[run]));
    }
  }
}

std::vector<LookupResult> LookUp(std::span<const LookupRequest> requests, Access access) {
  Validate(requests);
  std::vector<LookupResult> results(requests.size());
  std::vector<Work> works;
  if (access != Access::kTrain) {
    const auto guards = LockAll<std::shared_lock<RwLock>>(requests);
    std::vector<RecycledBuffer> buffers;
    for (const LookupRequest& request : requests) {
      buffers.emplace_back(request.keys.size() * sizeof(Row));
      works.emplace_back(&request, buffers.back().as<Row>());
    }
    Run(works, access);
    return results;
  }
  const auto guards = LockAll<std::unique_lock<RwLock>>(requests);
  for (const LookupRequest& request : requests) request.table->RequireScore();
  std::vector<BatchScore> scores;
  for (const LookupRequest& request : requests) {
    scores.push_back(request.table->NextBatchScore(std::ssize(request.keys)));
    request.table->ExpireOld(scores.back().score);
  }
  // After the guards: where a call fails, its unfinished lists go before anybody else can see them.
  std::vector<std::unique_ptr<SlotList>> lists;
  for (size_t i = 0; i < requests.size(); ++i) {
    lists.push_back(std::make_unique<SlotList>(requests[i].table, std::ssize(requests[i].keys)));
    works.emplace_back(&requests[i], lists.back().get()).score = scores[i];
    requests[i].table->NoteAnnounced(*lists.back(), scores[i]);  // before the lock is released
  }
  Run(works, access);
  for (const LookupRequest& request : requests) request.table->BringHome();
  for (size_t i = 0; i < works.size(); ++i) {
    results[i] = {std::move(lists[i]), works[i].refused};
  }
  return results;
}

}  // namespace embstore
