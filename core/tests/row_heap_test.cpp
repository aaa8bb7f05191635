#include "embstore/row_heap.h"

#include <cstdint>
#include <cstring>
#include <set>

#include "check.h"

namespace embstore {
namespace {

TEST(Rows come in order, and free ones come first) {
  RowHeap heap(48, 100);
  for (Row row = 0; row < 10; ++row) CHECK_EQ(heap.Next(row), row);
  heap.Take(10);
  CHECK_EQ(heap.used(), 10);
  CHECK_EQ(heap.bytes(), 480);
  heap.Free(3);
  heap.Free(7);
  CHECK(std::set<Row>({heap.Next(0), heap.Next(1), heap.Next(2)}) == std::set<Row>({3, 7, 10}));
  heap.Take(1);
  CHECK_EQ(heap.used(), 10);
  CHECK_EQ(heap.Next(1), 10);
  heap.Take(2);
  CHECK_EQ(heap.used(), 11);
  CHECK_EQ(heap.Next(0), 11);
}

TEST(Growing keeps bytes, clearing returns memory) {
  RowHeap heap(64, 1000);
  heap.Require(1000, "a test");
  heap.Take(1000);
  for (Row row = 0; row < 1000; ++row) std::memset(heap.at(row), row % 251, 64);
  heap.Grow(1 << 20);
  for (Row row = 0; row < 1000; ++row) {
    CHECK_EQ(static_cast<int>(heap.at(row)[63]), row % 251);
  }
  heap.Clear();
  CHECK_EQ(heap.used(), 0);
  CHECK_EQ(heap.Next(0), 0);
  CHECK_EQ(static_cast<int>(heap.at(5)[0]), 0);
}

TEST(Memory that the machine does not have is refused before it is touched) {
  RowHeap heap(1 << 20, 1 << 20);
  CHECK_THROWS(OutOfMemory, "rows of a test", heap.Require(1 << 20, "rows of a test"));
  heap.Require(1, "one row");
}

}  // namespace
}  // namespace embstore

TEST_MAIN()
