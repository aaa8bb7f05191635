#include "ssd_index.h"

#include <algorithm>

namespace embstore {

SsdIndex::Entry& SsdIndex::FreePlace(Partition& partition, int64_t key) const {
  const size_t n = partition.places.size();
  size_t at = Home(Hash(key), n);
  while (partition.places[at].row != kNoRow) at = at + 1 == n ? 0 : at + 1;
  partition.places[at].key = key;
  return partition.places[at];
}

void SsdIndex::GrowPartition(Partition& partition) const {
  constexpr size_t kFirstPlaces = 16;
  const size_t n = partition.places.size();
  Partition larger;
  larger.places.resize(std::max(kFirstPlaces, n + n / 4));
  for (const Entry& entry : partition.places) {
    if (entry.row != kNoRow) FreePlace(larger, entry.key) = entry;
  }
  partition.places = std::move(larger.places);
}

SsdIndex::Entry& SsdIndex::Insert(int64_t key) {
  Partition& partition = partitions_[Hash(key) & 0xff];
  if ((partition.used + 1) * 100 > partition.places.size() * 85) GrowPartition(partition);
  ++partition.used;
  ++size_;
  return FreePlace(partition, key);
}

void SsdIndex::Erase(int64_t key) {
  Entry* entry = Find(key);
  if (!entry) return;
  Partition& partition = partitions_[Hash(key) & 0xff];
  std::vector<Entry>& places = partition.places;
  const size_t n = places.size();
  // Later entries move back into the hole unless that would put them before their home.
  auto hole = static_cast<size_t>(entry - places.data());
  for (size_t at = (hole + 1) % n; places[at].row != kNoRow; at = (at + 1) % n) {
    const size_t home = Home(Hash(places[at].key), n);
    if ((at + n - home) % n < (at + n - hole) % n) continue;
    places[hole] = places[at];
    hole = at;
  }
  places[hole] = {};
  --partition.used;
  --size_;
}

}  // namespace embstore
