#include "embstore/bag_messages.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "embstore/lookup.h"
#include "embstore/parallel.h"
#include "embstore/routing.h"
#include "embstore/types.h"

namespace embstore {
namespace {

// The parts of a message.
struct Parts {
  int64_t* keys;
  float* weights;
  int32_t* lengths;

  Parts(std::byte* message, int64_t n, bool weighted)
      : keys(reinterpret_cast<int64_t*>(message)),
        weights(reinterpret_cast<float*>(keys + n)),
        lengths(reinterpret_cast<int32_t*>(weights + (weighted ? n : 0))) {}
};

struct Packing {
  const BagBatch& bags;
  const BagOwners& owners;
  int64_t samples;
  RecycledBuffer ranks = {};             // the owner of each key, where keys decide
  std::vector<int64_t> counts = {};      // features x world: keys
  std::vector<Parts> parts = {};         // of each message
  std::vector<int64_t> key_begins = {};  // features x world: in the message

  bool whole() const { return !owners.rank_of_feature.empty(); }
  int64_t begin(int64_t feature) const {
    return bags.offsets[static_cast<size_t>(feature * samples)];
  }
  int64_t* of(std::vector<int64_t>& table, int64_t feature) const {
    return table.data() + feature * owners.world;
  }

  void Count(int64_t feature) {
    const int64_t first = begin(feature), n = begin(feature + 1) - first;
    int64_t* const count = of(counts, feature);
    if (whole()) {
      count[owners.rank_of_feature[static_cast<size_t>(feature)]] = n;
      return;
    }
    OwnerRank* const rank = ranks.as<OwnerRank>() + first;
    FindOwners(bags.keys.subspan(static_cast<size_t>(first), static_cast<size_t>(n)), owners.world,
               owners.ownership, owners.rows, rank);
    // Four of each, so that an increment does not wait for the one before.
    constexpr int64_t kLanes = 4;
    std::vector<uint32_t> lanes(kLanes * owners.world);
    for (int64_t i = 0; i < n; ++i) ++lanes[rank[i] * kLanes + i % kLanes];
    for (size_t i = 0; i < lanes.size(); ++i) count[i / kLanes] += lanes[i];
  }

  // `number`: of the feature among those of its message.
  void Write(int64_t feature, int64_t number) {
    if (whole()) {
      const auto rank = static_cast<size_t>(owners.rank_of_feature[static_cast<size_t>(feature)]);
      WriteWhole(feature, number, parts[rank], of(key_begins, feature)[rank]);
      return;
    }
    std::vector<int64_t> next(of(key_begins, feature), of(key_begins, feature) + owners.world);
    std::vector<int64_t> before = next;
    const OwnerRank* const rank = ranks.as<OwnerRank>();
    for (int64_t bag = feature * samples; bag < (feature + 1) * samples; ++bag) {
      const int64_t end = bags.offsets[static_cast<size_t>(bag + 1)];
      for (int64_t i = bags.offsets[static_cast<size_t>(bag)]; i < end; ++i) {
        const int64_t at = next[rank[i]]++;
        const Parts& to = parts[rank[i]];
        to.keys[at] = bags.keys[static_cast<size_t>(i)];
        if (bags.weights) to.weights[at] = bags.weights[i];
      }
      for (uint32_t r = 0; r < owners.world; ++r) {
        parts[r].lengths[bag] = static_cast<int32_t>(next[r] - before[r]);
        before[r] = next[r];
      }
    }
  }

  void WriteWhole(int64_t feature, int64_t number, const Parts& to, int64_t at) const {
    const int64_t first = begin(feature), n = begin(feature + 1) - first;
    std::copy_n(bags.keys.data() + first, n, to.keys + at);
    if (bags.weights) std::copy_n(bags.weights + first, n, to.weights + at);
    const int64_t* const offsets = bags.offsets.data() + feature * samples;
    int32_t* const lengths = to.lengths + number * samples;
    for (int64_t i = 0; i < samples; ++i) {
      lengths[i] = static_cast<int32_t>(offsets[i + 1] - offsets[i]);
    }
  }
};

void Validate(const BagBatch& bags, const BagOwners& owners) {
  RequireWorld(owners.world);
  if (owners.self >= owners.world) {
    throw InvalidArgument("self should be below world (" + std::to_string(owners.world) +
                          ") but is: " + std::to_string(owners.self));
  }
  RequireBatchSize(bags.keys.size());
  ValidateOffsets(bags.offsets, static_cast<int64_t>(bags.keys.size()));
  const auto count = static_cast<int64_t>(bags.offsets.size()) - 1;
  if (bags.features < 1 || count % bags.features != 0) {
    throw InvalidArgument("offsets should divide the keys into bags of " +
                          std::to_string(bags.features) +
                          " features but has bags: " + std::to_string(count));
  }
  RequireRanks(owners.rank_of_feature, bags.features, owners.world, "rank_of_feature");
}

}  // namespace

int64_t BagMessageBytes(int64_t keys, int64_t features, int64_t samples, bool weighted) {
  const int64_t lengths = 4 * features * samples;
  return keys * (weighted ? 12 : 8) + lengths + (lengths + (weighted ? 4 * keys : 0)) % 8;
}

PackedBags PackBags(const BagBatch& bags, const BagOwners& owners) {
  Validate(bags, owners);
  const auto world = static_cast<size_t>(owners.world);
  const auto features = static_cast<size_t>(bags.features);
  Packing packing{bags, owners, (std::ssize(bags.offsets) - 1) / bags.features};
  packing.counts.assign(features * world, 0);
  if (!packing.whole()) packing.ranks = RecycledBuffer(bags.keys.size() * sizeof(OwnerRank));
  ParallelFor(bags.features, [&](int64_t feature) { packing.Count(feature); });

  PackedBags packed;
  packed.keys.assign(world, 0);
  packing.key_begins.resize(features * world);
  std::vector<int64_t> numbers(features), features_of(world, packing.whole() ? 0 : bags.features);
  for (size_t feature = 0; feature < features; ++feature) {
    if (packing.whole()) {
      numbers[feature] = features_of[static_cast<size_t>(owners.rank_of_feature[feature])]++;
    }
    for (size_t rank = 0; rank < world; ++rank) {
      packing.key_begins[feature * world + rank] = packed.keys[rank];
      packed.keys[rank] += packing.counts[feature * world + rank];
    }
  }
  const bool weighted = bags.weights != nullptr;
  int64_t total = 0;
  for (size_t rank = 0; rank < world; ++rank) {
    packed.bytes.push_back(
        BagMessageBytes(packed.keys[rank], features_of[rank], packing.samples, weighted));
    total += packed.bytes[rank];
  }
  packed.messages = RecycledBuffer(static_cast<size_t>(total));
  auto* message = packed.messages.as<std::byte>();
  std::byte* const own = message + total - packed.bytes[owners.self];
  for (size_t rank = 0; rank < world; ++rank) {
    std::byte* const begin = rank == owners.self ? own : message;
    packing.parts.emplace_back(begin, packed.keys[rank], weighted);
    if (packed.bytes[rank] > 0) {
      std::memset(begin + packed.bytes[rank] - 4, 0, 4);  // the padding, if there is any
    }
    if (rank != owners.self) message += packed.bytes[rank];
  }
  ParallelFor(bags.features, [&](int64_t feature) {
    packing.Write(feature, numbers[static_cast<size_t>(feature)]);
  });
  return packed;
}

void UnpackBags(const ArrivedBags& arrived, int64_t* offsets, int64_t* keys, float* weights) {
  const auto senders = arrived.keys.size();
  const bool weighted = weights != nullptr;
  std::vector<Parts> parts;
  int64_t all_samples = 0;
  for (size_t sender = 0; sender < senders; ++sender) {
    const std::span<const std::byte> message = arrived.messages[sender];
    const int64_t bytes =
        BagMessageBytes(arrived.keys[sender], arrived.features, arrived.samples[sender], weighted);
    if (bytes != std::ssize(message)) {
      throw InvalidArgument("the message of rank " + std::to_string(sender) + " should have " +
                            std::to_string(bytes) +
                            " bytes but has: " + std::to_string(message.size()));
    }
    // Only read: the messages stay as they are.
    parts.emplace_back(const_cast<std::byte*>(message.data()), arrived.keys[sender], weighted);
    all_samples += arrived.samples[sender];
  }
  const auto features = static_cast<size_t>(arrived.features);
  // features x senders: the keys of a feature, then where they begin in their message.
  std::vector<int64_t> begins(features * senders);
  ParallelFor(arrived.features, [&](int64_t feature) {
    for (size_t sender = 0; sender < senders; ++sender) {
      const int64_t samples = arrived.samples[sender];
      const int32_t* const lengths = parts[sender].lengths + feature * samples;
      int64_t sum = 0;
      for (int64_t i = 0; i < samples; ++i) sum += lengths[i];
      begins[static_cast<size_t>(feature) * senders + sender] = sum;
    }
  });
  std::vector<int64_t> next(senders, 0), outs(features + 1, 0);
  for (size_t feature = 0; feature < features; ++feature) {
    outs[feature + 1] = outs[feature];
    for (size_t sender = 0; sender < senders; ++sender) {
      int64_t& begin = begins[feature * senders + sender];
      outs[feature + 1] += begin;
      next[sender] += begin;
      begin = next[sender] - begin;
    }
  }
  for (size_t sender = 0; sender < senders; ++sender) {
    if (next[sender] != arrived.keys[sender]) {
      throw InvalidArgument("bags of rank " + std::to_string(sender) + " should have " +
                            std::to_string(arrived.keys[sender]) +
                            " keys but have: " + std::to_string(next[sender]));
    }
  }
  offsets[0] = 0;
  ParallelFor(arrived.features, [&](int64_t feature) {
    int64_t* offset = offsets + feature * all_samples;
    int64_t at = outs[static_cast<size_t>(feature)];
    for (size_t sender = 0; sender < senders; ++sender) {
      const int64_t samples = arrived.samples[sender], first = at;
      const int32_t* const lengths = parts[sender].lengths + feature * samples;
      for (int64_t i = 0; i < samples; ++i) *++offset = at += lengths[i];
      const int64_t begin = begins[static_cast<size_t>(feature) * senders + sender];
      std::copy_n(parts[sender].keys + begin, at - first, keys + first);
      if (weighted) std::copy_n(parts[sender].weights + begin, at - first, weights + first);
    }
  });
}

}  // namespace embstore
