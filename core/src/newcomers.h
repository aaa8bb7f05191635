// The missing keys of a batch while they are inserted into a table.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "embstore/memory.h"
#include "embstore/table.h"

namespace embstore {

// The distinct missing keys, and what happens to them.
struct Table::Newcomers {
  struct Newcomer {
    int64_t key;
    uint64_t hash, score;
    uint32_t number;  // in the order of first occurrences
    Row row;          // once it is placed
  };
  struct Fate {
    Evicted evicted;  // slot == kNoSlot: none
    bool aside;       // its stripe has no room for it
  };
  struct SketchUse {
    uint64_t hash;
    uint32_t number;
  };

  std::vector<uint32_t> first;    // first occurrences, ascending
  std::vector<uint32_t> number;   // which of them missing[i] is
  std::vector<uint32_t> fetched;  // by number: which of the fetched rows; empty if there are none
  int64_t plain = 0;              // the first ones get free rows

  // In the order in which they are placed: about that of their hashes, so that the index is read in
  // order, and threads write to different cache lines.
  std::vector<Newcomer> placed;
  std::unique_ptr<Fate[]> fates;  // Place sets them
  std::vector<uint32_t> place;    // where in `placed` a number is
  int order_bits = 0;             // so many leading bits of the hashes are sorted

  RecycledBuffer scratch;      // a vector for each task of FillRows
  RecycledBuffer sketch_uses;  // two a newcomer

  int64_t size() const { return std::ssize(first); }
  const Newcomer& at(size_t number) const { return placed[place[number]]; }
  Newcomer& at(size_t number) { return placed[place[number]]; }
  FetchedRow FetchedRowOf(uint32_t of, const FetchedRows& below) const {
    return fetched.empty() ? FetchedRow{} : below.at(fetched[of]);
  }
};

}  // namespace embstore
