// The product of some rows with one packed tile of a matrix, in registers: what matmul and attention are made of.
//
// A tile has TILE columns: [in][TILE] float32, or [in / 2][TILE][2] bfloat16. Sums are float32, each over `in` in order,
// so that a row's bits depend on no other row, nor on how many there are.
#pragma once

#include <type_traits>

#include "simd.h"

namespace nereid {

using Sums = Floats[VECTORS];

// sums[r] += x[r] times the tile.  x: R rows, x_stride apart. In float32 32 products at a time are summed by themselves,
// since a long sum loses what is added last.
template <int R>
inline void add_product(const float* tile, const float* x, int64_t x_stride, int64_t in, Sums* sums) {
  constexpr int64_t PART = 32;
  for (int64_t first = 0; first < in; first += PART) {
    Sums part[R]{};
    int64_t end = first + PART < in ? first + PART : in;
    for (int64_t i = first; i < end; i++, tile += TILE) {
      for (int v = 0; v < VECTORS; v++) {
        __builtin_prefetch(tile + 12 * TILE + v * LANES);
        Floats w = load(tile + v * LANES);
        for (int r = 0; r < R; r++) part[r][v] += w * x[r * x_stride + i];
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) sums[r][v] += part[r][v];
  }
}

template <int R>
inline void add_product(const bf16* tile, const bf16* x, int64_t x_stride, int64_t in, Sums* sums) {
  for (int64_t i = 0; i < in; i += 2, tile += 2 * TILE) {
    Bits w[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      __builtin_prefetch(tile + 2 * (12 * TILE + v * LANES));
      w[v] = load_as<Bits>(tile + 2 * v * LANES);
    }
    for (int r = 0; r < R; r++) {
      uint32_t pair;
      std::memcpy(&pair, x + r * x_stride + i, 4);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = add_pair_products(sums[r][v], w[v], pair);
    }
  }
}

// Calls f(number of rows as a constant, first row) for rows 0 .. n - 1, ROWS at a time and then the rest.
template <class F>
inline void for_groups_of_rows(int64_t n, F f) {
  int64_t row = 0;
  for (; row + ROWS <= n; row += ROWS) f(std::integral_constant<int, ROWS>{}, row);
  static_assert(ROWS <= 6, "a case for each remainder");
  switch (n - row) {
    case 1: f(std::integral_constant<int, 1>{}, row); break;
    case 2: f(std::integral_constant<int, 2>{}, row); break;
    case 3: f(std::integral_constant<int, 3>{}, row); break;
    case 4: f(std::integral_constant<int, 4>{}, row); break;
    case 5: f(std::integral_constant<int, 5>{}, row); break;
  }
}

}  // namespace nereid
