#include "embstore/routing.h"

#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "embstore/parallel.h"
#include "embstore/types.h"

namespace {

using embstore::InvalidArgument;
using embstore::Ownership;
using embstore::Route;

struct Input {
  std::vector<int64_t> keys, offsets{0};
};

// Cells of uneven sizes, with duplicates, negative keys and the ends of int64.
Input RandomInput(int cells, int longest, uint32_t seed) {
  std::mt19937 random(seed);
  const std::vector<int64_t> corners = {INT64_MIN, INT64_MAX, -1, 0, -(int64_t{1} << 40)};
  Input input;
  for (int cell = 0; cell < cells; ++cell) {
    const int n = static_cast<int>(random() % static_cast<uint32_t>(longest + 1));
    for (int i = 0; i < n; ++i) {
      const auto key = static_cast<int64_t>(random() % 50) - 25;
      input.keys.push_back(random() % 10 == 0 ? corners[random() % corners.size()] : key);
    }
    input.offsets.push_back(static_cast<int64_t>(input.keys.size()));
  }
  return input;
}

// What the header promises, by the plainest means.
Route Expected(const Input& input, uint32_t world, Ownership ownership,
               const std::vector<uint8_t>& unique) {
  Route route;
  const size_t cells = input.offsets.size() - 1;
  route.counts.resize(world * cells);
  route.index.resize(input.keys.size());
  for (uint32_t rank = 0; rank < world; ++rank) {
    for (size_t cell = 0; cell < cells; ++cell) {
      std::vector<std::pair<int64_t, int64_t>> sent;  // key, place
      for (auto i = input.offsets[cell]; i < input.offsets[cell + 1]; ++i) {
        const int64_t key = input.keys[static_cast<size_t>(i)];
        if (embstore::Owner(key, world, ownership) != rank) continue;
        int64_t place = -1;
        for (const auto& [other, at] : sent) {
          if (other == key && !unique.empty() && unique[cell]) place = at;
        }
        if (place < 0) {
          place = static_cast<int64_t>(route.keys.size());
          route.keys.push_back(key);
          sent.emplace_back(key, place);
          ++route.counts[rank * cells + cell];
        }
        route.index[static_cast<size_t>(i)] = place;
      }
    }
  }
  return route;
}

TEST(Keys go to their owners in the order of the cells with or without duplicates) {
  uint32_t seed = 0;
  for (const int cells : {0, 1, 7, 300}) {
    for (const int longest : {0, 1, 60}) {
      const Input input = RandomInput(cells, longest, ++seed);
      std::vector<uint8_t> some(static_cast<size_t>(cells));
      for (size_t cell = 0; cell < some.size(); ++cell) some[cell] = cell % 3 != 0;
      for (const uint32_t world : {1u, 2u, 3u, 8u}) {
        for (const auto ownership : {Ownership::kRoundRobin, Ownership::kHashRoundRobin}) {
          for (const auto& unique : {std::vector<uint8_t>{}, some}) {
            const Route expected = Expected(input, world, ownership, unique);
            const Route route =
                embstore::RouteKeys(input.keys, input.offsets, world, ownership, unique);
            CHECK_EQ(route.keys == expected.keys, true);
            CHECK_EQ(route.counts == expected.counts, true);
            CHECK_EQ(route.index == expected.index, true);
          }
        }
      }
    }
  }
}

TEST(Blocks of keys go to one rank each and keys beyond them round robin) {
  for (const uint64_t rows : {uint64_t{1}, uint64_t{7}, uint64_t{12}, uint64_t{97}}) {
    for (const uint32_t world : {1u, 2u, 5u}) {
      const uint64_t block = (rows + world - 1) / world;
      std::vector<int64_t> keys = {INT64_MIN, INT64_MAX, -1};
      for (int64_t key = 0; key < 200; ++key) keys.push_back(key);
      for (const int64_t key : keys) {
        const auto number = static_cast<uint64_t>(key);
        const uint64_t expected = number < rows ? number / block : number % world;
        CHECK_EQ(uint64_t{embstore::Owner(key, world, Ownership::kContinuous, rows)}, expected);
      }
      const std::vector<int64_t> offsets = {0, static_cast<int64_t>(keys.size())};
      const Route route =
          embstore::RouteKeys(keys, offsets, world, Ownership::kContinuous, {}, rows);
      size_t at = 0;
      for (uint32_t rank = 0; rank < world; ++rank) {
        for (int32_t i = 0; i < route.counts[rank]; ++i, ++at) {
          CHECK_EQ(embstore::Owner(route.keys[at], world, Ownership::kContinuous, rows), rank);
        }
      }
      CHECK_EQ(at, keys.size());
    }
  }
}

TEST(Whole cells go to the rank that is named for each) {
  const Input input = RandomInput(7, 60, 11);
  const std::vector<int32_t> ranks = {2, 0, 2, 1, 0, 2, 2};
  const std::vector<uint8_t> unique = {1, 0, 0, 1, 1, 0, 1};
  const Route route =
      embstore::RouteKeys(input.keys, input.offsets, 4, Ownership::kRoundRobin, unique, 0, ranks);
  for (size_t cell = 0; cell < 7; ++cell) {
    const auto begin = input.keys.begin() + input.offsets[cell];
    const auto end = input.keys.begin() + input.offsets[cell + 1];
    const auto size = unique[cell] ? std::set<int64_t>(begin, end).size() : size_t(end - begin);
    for (int32_t rank = 0; rank < 4; ++rank) {
      const auto count = static_cast<size_t>(route.counts[static_cast<size_t>(rank) * 7 + cell]);
      CHECK_EQ(count, rank == ranks[cell] ? size : 0);
    }
  }
  for (size_t i = 0; i < input.keys.size(); ++i) {
    CHECK_EQ(route.keys[static_cast<size_t>(route.index[i])], input.keys[i]);
  }
  for (const int32_t rank : {-1, 4}) {
    const std::vector<int32_t> wrong(7, rank);
    CHECK_THROWS(
        InvalidArgument, "rank_of_cell should be below world (4) but one is",
        embstore::RouteKeys(input.keys, input.offsets, 4, Ownership::kRoundRobin, {}, 0, wrong));
  }
}

TEST(The number of threads does not change a route or a sum) {
  const Input input = RandomInput(40000, 3, 5);
  const std::vector<uint8_t> unique(40000, 1);
  std::vector<Route> routes;
  std::vector<std::vector<float>> sums;
  const int before = embstore::NumThreads();
  for (const int threads : {1, 2, 4}) {
    embstore::SetNumThreads(threads);
    routes.push_back(
        embstore::RouteKeys(input.keys, input.offsets, 3, Ownership::kRoundRobin, unique));
    const Route& route = routes.back();
    std::vector<float> vectors(input.keys.size() * 3);
    for (size_t i = 0; i < vectors.size(); ++i) vectors[i] = 1.0f / static_cast<float>(i + 1);
    sums.emplace_back(route.keys.size() * 3);
    embstore::SumRows(vectors.data(), route.index, 3, static_cast<int64_t>(route.keys.size()),
                      sums.back().data());
  }
  embstore::SetNumThreads(before);
  for (size_t i = 1; i < routes.size(); ++i) {
    CHECK_EQ(routes[i].keys == routes[0].keys && routes[i].index == routes[0].index, true);
    CHECK_EQ(sums[i] == sums[0], true);
  }
}

TEST(Sums are taken in order and rows that nobody names are zero) {
  const std::vector<float> vectors = {1, 2, 10, 20, 100, 200};
  const std::vector<int64_t> index = {2, 0, 2};
  std::vector<float> out(6, -1.0f);
  embstore::SumRows(vectors.data(), index, 2, 3, out.data());
  CHECK_EQ((out == std::vector<float>{10, 20, 0, 0, 101, 202}), true);
}

TEST(Bad arguments are named) {
  const std::vector<int64_t> keys = {1, 2}, offsets = {0, 1}, index = {0, 2};
  float out[2];
  CHECK_THROWS(InvalidArgument, "offsets",
               embstore::RouteKeys(keys, offsets, 2, Ownership::kRoundRobin, {}));
  const std::vector<int64_t> whole = {0, 2};
  CHECK_THROWS(InvalidArgument, "world",
               embstore::RouteKeys(keys, whole, 0, Ownership::kRoundRobin, {}));
  CHECK_THROWS(InvalidArgument, "index[1]", embstore::SumRows(out, index, 1, 2, out));
}

}  // namespace

TEST_MAIN()
