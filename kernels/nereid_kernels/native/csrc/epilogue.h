// How a product's sums leave the registers: bias, gated activation, rounding to the dtype of the next operation.
#pragma once

#include "program.h"
#include "tile_product.h"

namespace nereid {

enum Epilogue : int32_t { NONE = 0, GATED_SILU = 1 };

// y: [rows, y_stride] of x's dtype, or float32 where wide.  bias: [out] float32 or null.  GATED_SILU: of each tile, the
// first half of the columns are gates, the others what they gate: y = silu(gate) * other, half as wide.
struct Output {
  void* y;
  const float* bias;
  int64_t y_stride, out;
  Epilogue epilogue;
  int32_t wide;
};

inline Floats silu(Floats x) { return quotient(x, splat(1.0f) + exp_within(clamped(-x, -87.0f, 87.0f))); }

// The sums of one row, in V registers of a tile from its register `first` on; all of it where the epilogue is gated.
template <class Y, int V>
void finish(const Output& output, const Floats* sums, int64_t tile, int64_t first, int64_t row) {
  Y* y = static_cast<Y*>(output.y) + row * output.y_stride;
  bool whole = (tile + 1) * TILE <= output.out;
  auto put = [&](int64_t column, int64_t width, Floats x) {
    whole ? store(y + column, x) : store_within(y, column, width, x);
  };
  if constexpr (V == VECTORS) {
    if (output.epilogue == GATED_SILU) {
      constexpr int HALF = VECTORS / 2;
      for (int v = 0; v < HALF; v++)
        put(tile * TILE / 2 + v * LANES, output.out / 2, silu(sums[v]) * sums[v + HALF]);
      return;
    }
  }
  for (int v = 0; v < V; v++) {
    int64_t column = tile * TILE + (first + v) * LANES;
    Floats sum = sums[v];
    if (output.bias) sum += load_within(output.bias, column, output.out);
    put(column, output.out, sum);
  }
}

}  // namespace nereid
