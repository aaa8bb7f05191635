// Ids of strings: id = xxh64(bytes of the string, seed), read as int64.
//
//     "alice" "bob" ""      seed 0      ->     three unrelated int64 numbers
//
// The seed separates fields: the same text in two fields has two ids. xxh64 is a published
// function, so a server in another language computes the same ids.
//
// Thread safety: pure functions of their arguments. Long inputs are divided between the threads of
// the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace embstore {

int64_t IdOf(std::string_view text, uint64_t seed);

// Arrow's layout: string i is data[offsets[i], offsets[i + 1]).
// REQUIRES: offsets.size() == ids.size() + 1. Throws InvalidArgument where offsets descend or leave
// the data.
void IdsOfSlices(std::span<const uint8_t> data, std::span<const int32_t> offsets, uint64_t seed,
                 std::span<int64_t> ids);
void IdsOfSlices(std::span<const uint8_t> data, std::span<const int64_t> offsets, uint64_t seed,
                 std::span<int64_t> ids);

// numpy's "S<width>": string i is data[i * width, (i + 1) * width), without its trailing zeros if
// `padded`. REQUIRES: data.size() == ids.size() * width.
void IdsOfFixedBytes(std::span<const uint8_t> data, size_t width, bool padded, uint64_t seed,
                     std::span<int64_t> ids);

// numpy's "U<width>": code points, padded with zeros; hashed as UTF-8. Throws InvalidArgument that
// names the first string with a code point that UTF-8 does not have.
void IdsOfFixedUnicode(std::span<const uint32_t> data, size_t width, uint64_t seed,
                       std::span<int64_t> ids);

}  // namespace embstore
