// Frequent keys come to where the search for them starts.
//
// A key whose home group was full when it came, or when its stripe grew, lies in another one, and
// each search for it reads two or three lines instead of one. Training remembers some of the keys
// that it found away; once its batch is done, they go home and those with lower scores make room.
// Frequent keys are found often, so they are home after some batches. Where a key lies shows in no
// result, except that a dump has the rows of a stripe in that order.
//
// Thread safety: threads may call Add together; BringHome needs exclusive access to the index.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "embstore/key_index.h"

namespace embstore {

class AwayKeys {
 public:
  // Some of these stay in mind.
  void Add(const AwayHits& hits);

  // Brings those home that are in mind, and forgets them.
  void BringHome(KeyIndex& index);

 private:
  std::array<int64_t, 256> keys_;
  std::atomic<size_t> count_{0};  // may exceed the room
};

}  // namespace embstore
