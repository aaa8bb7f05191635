#include "embstore/away_keys.h"

#include <algorithm>
#include <span>

namespace embstore {

void AwayKeys::Add(const AwayHits& hits) {
  if (hits.count == 0) return;
  const auto n = static_cast<size_t>(hits.count);
  size_t at = count_.fetch_add(n, std::memory_order_relaxed);
  for (const int64_t key : std::span(hits.keys, n)) {
    if (at < keys_.size()) keys_[at++] = key;
  }
}

void AwayKeys::BringHome(KeyIndex& index) {
  constexpr size_t kHomeAhead = 12, kAwayAhead = 6;
  const size_t n = std::min(count_.exchange(0, std::memory_order_relaxed), keys_.size());
  std::sort(keys_.begin(), keys_.begin() + n);  // threads added them in any order
  for (size_t i = 0; i < n + kHomeAhead; ++i) {
    if (i < n) index.PrefetchHome(index.Hash(keys_[i]));
    if (const size_t next = i - kAwayAhead; next < n) index.PeekRow(keys_[next]);
    if (const size_t now = i - kHomeAhead; now < n) index.BringHome(index.Hash(keys_[now]));
  }
}

}  // namespace embstore
