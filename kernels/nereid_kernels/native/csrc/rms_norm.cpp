// Root-mean-square norm of rows (Zhang and Sennrich 2019), with or without a sum before it. In float32.
#include "program.h"

namespace nereid {

// x, residual, sum, y: [rows, width] of one dtype, rows contiguous.  residual, sum: null, both, for the norm of x
// alone; else sum = x + residual, rounded, is normed.  weight: [width] float32.
struct RmsNormArguments {
  const void* x;
  const void* residual;
  const float* weight;
  void* sum;
  void* y;
  int64_t width;
  float eps;
  float weight_offset;
  Rows rows;
  Dtype dtype;
};

namespace {

template <class T>
void norm(const RmsNormArguments& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.width;
  T* y = static_cast<T*>(a.y) + row * a.width;
  Floats squares{};
  if (a.residual) {
    const T* residual = static_cast<const T*>(a.residual) + row * a.width;
    T* sum = static_cast<T*>(a.sum) + row * a.width;
    for (int64_t i = 0; i < a.width; i += LANES)
      store_within(sum, i, a.width, load_within(x, i, a.width) + load_within(residual, i, a.width));
    x = sum;
  }
  for (int64_t i = 0; i < a.width; i += LANES) {
    Floats value = load_within(x, i, a.width);
    squares += value * value;
  }
  float factor = 1.0f / std::sqrt(sum_of(squares) / float(a.width) + a.eps);
  for (int64_t i = 0; i < a.width; i += LANES) {
    Floats weight = load_within(a.weight, i, a.width) + splat(a.weight_offset);
    store_within(y, i, a.width, load_within(x, i, a.width) * factor * weight);
  }
}

}  // namespace
}  // namespace nereid

extern "C" void nereid_rms_norm(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const RmsNormArguments*>(arguments);
  team.for_ranges(step.num_rows(a.rows), 4, [&](Range rows) {
    for (int64_t row = rows.begin; row < rows.end; row++) a.dtype == FLOAT32 ? norm<float>(a, row) : norm<bf16>(a, row);
  });
}
