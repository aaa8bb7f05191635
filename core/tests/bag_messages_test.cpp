#include "embstore/bag_messages.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "embstore/parallel.h"
#include "embstore/types.h"

namespace {

using embstore::BagBatch;
using embstore::BagOwners;
using embstore::InvalidArgument;
using embstore::Ownership;
using embstore::PackedBags;

struct Batch {
  std::vector<int64_t> keys, offsets{0};
  std::vector<float> weights;
  int64_t features, samples;

  BagBatch view(bool weighted) const {
    return {keys, offsets, weighted ? weights.data() : nullptr, features};
  }
};

// Bags of uneven lengths, some empty, with negative keys and the ends of int64.
Batch RandomBatch(int64_t features, int64_t samples, uint32_t longest, uint32_t seed) {
  std::mt19937 random(seed);
  const std::vector<int64_t> corners = {INT64_MIN, INT64_MAX, -1, 0, int64_t{1} << 40};
  Batch batch;
  batch.features = features;
  batch.samples = samples;
  for (int64_t bag = 0; bag < features * samples; ++bag) {
    for (uint32_t i = random() % (longest + 1); i > 0; --i) {
      const auto key = static_cast<int64_t>(random() % 50) - 25;
      batch.keys.push_back(random() % 10 == 0 ? corners[random() % corners.size()] : key);
      batch.weights.push_back(static_cast<float>(batch.keys.size()));
    }
    batch.offsets.push_back(static_cast<int64_t>(batch.keys.size()));
  }
  return batch;
}

BagOwners By(uint32_t world, std::span<const int32_t> rank_of_feature = {},
             Ownership ownership = Ownership::kRoundRobin, uint64_t rows = 0) {
  return {world, 0, rank_of_feature, ownership, rows};
}

struct Received {
  std::vector<int64_t> offsets{0}, keys;
  std::vector<float> weights;
  bool operator==(const Received&) const = default;
};

// What a rank should get, by the plainest means: by feature, sender and sample.
Received Expected(const std::vector<Batch>& batches, const BagOwners& owners, uint32_t rank) {
  Received out;
  for (int64_t feature = 0; feature < batches[0].features; ++feature) {
    const bool whole = !owners.rank_of_feature.empty();
    if (whole && owners.rank_of_feature[static_cast<size_t>(feature)] != static_cast<int>(rank)) {
      continue;
    }
    for (const Batch& batch : batches) {
      for (int64_t bag = feature * batch.samples; bag < (feature + 1) * batch.samples; ++bag) {
        for (auto i = static_cast<size_t>(batch.offsets[static_cast<size_t>(bag)]);
             i < static_cast<size_t>(batch.offsets[static_cast<size_t>(bag + 1)]); ++i) {
          const uint32_t owner =
              embstore::Owner(batch.keys[i], owners.world, owners.ownership, owners.rows);
          if (!whole && owner != rank) continue;
          out.keys.push_back(batch.keys[i]);
          out.weights.push_back(batch.weights[i]);
        }
        out.offsets.push_back(static_cast<int64_t>(out.keys.size()));
      }
    }
  }
  return out;
}

// The messages for one rank, as an exchange brings them together.
Received Exchanged(const std::vector<Batch>& batches, const BagOwners& owners, uint32_t rank,
                   bool weighted) {
  std::vector<std::vector<std::byte>> messages;
  std::vector<int64_t> keys, samples;
  int64_t features = batches[0].features, all_keys = 0, all_samples = 0;
  if (!owners.rank_of_feature.empty()) {
    features = std::count(owners.rank_of_feature.begin(), owners.rank_of_feature.end(),
                          static_cast<int>(rank));
  }
  for (const Batch& batch : batches) {
    BagOwners of_sender = owners;
    of_sender.self = static_cast<uint32_t>(messages.size());
    const PackedBags packed = embstore::PackBags(batch.view(weighted), of_sender);
    const std::byte* begin = packed.messages.as<std::byte>();
    for (uint32_t r = 0; r < owners.world; ++r) {  // the own message comes last
      const bool before = rank == of_sender.self ? r != rank : r < rank && r != of_sender.self;
      if (before) begin += packed.bytes[r];
    }
    CHECK_EQ(packed.bytes[rank] % 8, 0);
    messages.emplace_back(begin, begin + packed.bytes[rank]);
    keys.push_back(packed.keys[rank]);
    samples.push_back(batch.samples);
    all_keys += keys.back();
    all_samples += batch.samples;
  }
  Received out;
  out.offsets.resize(static_cast<size_t>(features * all_samples + 1));
  out.keys.resize(static_cast<size_t>(all_keys));
  out.weights.resize(static_cast<size_t>(all_keys));
  const std::vector<std::span<const std::byte>> spans(messages.begin(), messages.end());
  embstore::UnpackBags({spans, keys, samples, features}, out.offsets.data(), out.keys.data(),
                       weighted ? out.weights.data() : nullptr);
  return out;
}

TEST(Bags arrive at their owners in the order of the global batch) {
  uint32_t seed = 0;
  for (const uint32_t world : {1u, 2u, 3u, 4u, 7u}) {
    for (const int64_t features : {1, 3, 26}) {
      std::vector<int32_t> by_feature;
      for (int64_t f = 0; f < features; ++f) by_feature.push_back((f * 5 + 1) % int(world));
      std::vector<Batch> batches;
      for (uint32_t sender = 0; sender < world; ++sender) {  // the second one has no samples
        const int64_t samples = sender == 1 ? 0 : 1 + 6 * sender;
        batches.push_back(RandomBatch(features, samples, 1 + seed % 9, seed));
        ++seed;
      }
      for (const BagOwners& owners :
           {By(world), By(world, {}, Ownership::kHashRoundRobin),
            By(world, {}, Ownership::kContinuous, 20), By(world, by_feature)}) {
        for (uint32_t rank = 0; rank < world; ++rank) {
          Received expected = Expected(batches, owners, rank);
          CHECK_EQ(Exchanged(batches, owners, rank, true) == expected, true);
          std::fill(expected.weights.begin(), expected.weights.end(), 0.0f);
          CHECK_EQ(Exchanged(batches, owners, rank, false) == expected, true);
        }
      }
    }
  }
}

TEST(The number of threads does not change a message) {
  const Batch batch = RandomBatch(26, 97, 9, 3);
  const int before = embstore::NumThreads();
  std::vector<std::vector<std::byte>> messages;
  for (const int threads : {1, 2, 4}) {
    embstore::SetNumThreads(threads);
    const PackedBags packed = embstore::PackBags(batch.view(true), By(3));
    int64_t bytes = 0;
    for (const int64_t of_rank : packed.bytes) bytes += of_rank;
    const auto* begin = packed.messages.as<std::byte>();
    messages.emplace_back(begin, begin + bytes);
  }
  embstore::SetNumThreads(before);
  CHECK_EQ(messages[0] == messages[1] && messages[1] == messages[2], true);
}

TEST(Bags that are no bags are refused) {
  const Batch batch = RandomBatch(3, 7, 4, 1);
  const std::vector<int32_t> few = {0, 1}, outside = {0, 2, 1};
  const auto pack = [](const BagBatch& bags, const BagOwners& owners) {
    embstore::PackBags(bags, owners);
  };
  CHECK_THROWS(InvalidArgument, "world should be", pack(batch.view(false), By(0)));
  CHECK_THROWS(InvalidArgument, "rank_of_feature should have 3 elements but has: 2",
               pack(batch.view(false), By(2, few)));
  CHECK_THROWS(InvalidArgument, "rank_of_feature should be below world (2) but one is: 2",
               pack(batch.view(false), By(2, outside)));
  BagOwners elsewhere = By(2);
  elsewhere.self = 2;
  CHECK_THROWS(InvalidArgument, "self should be below world (2) but is: 2",
               pack(batch.view(false), elsewhere));
  BagBatch uneven = batch.view(false);
  uneven.features = 2;
  CHECK_THROWS(InvalidArgument, "bags of 2 features", pack(uneven, By(2)));
  BagBatch short_of_keys = batch.view(false);
  short_of_keys.keys = short_of_keys.keys.subspan(1);
  CHECK_THROWS(InvalidArgument, "offsets should end", pack(short_of_keys, By(2)));

  const PackedBags packed = embstore::PackBags(batch.view(false), By(1));
  const std::span<const std::byte> message(packed.messages.as<std::byte>(),
                                           static_cast<size_t>(packed.bytes[0]));
  std::vector<int64_t> offsets(22), keys(batch.keys.size());
  const auto unpack = [&](std::span<const std::byte> bytes, int64_t samples) {
    const std::vector<int64_t> of_senders = {samples};
    const std::vector<std::span<const std::byte>> messages = {bytes};
    embstore::UnpackBags({messages, packed.keys, of_senders, 3}, offsets.data(), keys.data(),
                         nullptr);
  };
  CHECK_THROWS(InvalidArgument, "the message of rank 0 should have", unpack(message, 5));
  std::vector<std::byte> damaged(message.begin(), message.end());
  int32_t length = 0;
  std::byte* const at = damaged.data() + 8 * packed.keys[0];  // of the first bag
  std::memcpy(&length, at, sizeof(length));
  ++length;
  std::memcpy(at, &length, sizeof(length));
  CHECK_THROWS(InvalidArgument, "bags of rank 0 should have", unpack(damaged, 7));
}

}  // namespace

TEST_MAIN()
