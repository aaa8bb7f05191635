#include "importance.h"

#include <cmath>

namespace embstore {
namespace {

double Norm(const float* vector, int64_t dim) {
  double squares = 0.0;
  for (int64_t i = 0; i < dim; ++i) squares += static_cast<double>(vector[i]) * vector[i];
  return std::sqrt(squares);
}

}  // namespace

std::vector<SharedGradient> AddImportance(const SlotList& slots, std::span<const Occurrence> sorted,
                                          const VectorsView& gradients) {
  Table& table = slots.table();
  const int64_t dim = table.dim();
  std::vector<SharedGradient> shared;
  std::vector<float> sum(static_cast<size_t>(dim));
  const auto norm_of = [&](size_t begin, size_t end) {
    ActiveKernels().reduce(dim, &sorted[begin], static_cast<int64_t>(end - begin), gradients,
                           sum.data());
    return Norm(sum.data(), dim);
  };
  for (size_t i = 0, end = 0; i < sorted.size(); i = end) {
    for (end = i + 1; end < sorted.size() && sorted[end].row == sorted[i].row;) ++end;
    if (table.IsShared(static_cast<Row>(sorted[i].row))) {
      for (size_t j = i; j < end; ++j) shared.push_back({sorted[j].index, norm_of(j, j + 1)});
    } else {
      table.AddToScore(slots.keys()[sorted[i].index], norm_of(i, end));
    }
  }
  return shared;
}

}  // namespace embstore
