// The product of some rows with one packed tile of a matrix, in registers: what matmul and attention are made of.
//
// A tile has TILE columns: [in][TILE] float32, or [in / 2][TILE][2] bfloat16. Products are summed in float32, in order
// of `in`, so that a row's bits depend on no other row, nor on how many there are.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace nereid {

using Sums = Floats[VECTORS];

constexpr int64_t PART = 64;  // inputs whose products are summed by themselves: a long sum loses what is added last

// part[r] += x[r] times V registers of each of `in` inputs.  x: R rows, x_stride apart.  fetch(step): has memory
// fetched that is wanted later; a step is an input of float32, a pair of bfloat16: 4 * TILE bytes of the tile.
template <int R, int V, class Fetch>
inline void multiply(
    const float* tile, const float* x, int64_t x_stride, int64_t in, Fetch fetch, Floats (&part)[R][V]) {
  for (int64_t i = 0; i < in; i++, tile += TILE) {
    fetch(i);
    for (int v = 0; v < V; v++) {
      Floats w = load(tile + v * LANES);
      for (int r = 0; r < R; r++) part[r][v] += w * x[r * x_stride + i];
    }
  }
}

template <int R, int V, class Fetch>
inline void multiply(
    const bf16* tile, const bf16* x, int64_t x_stride, int64_t in, Fetch fetch, Floats (&part)[R][V]) {
  for (int64_t i = 0; i < in; i += 2, tile += 2 * TILE) {
    fetch(i / 2);
    Bits w[V];
    for (int v = 0; v < V; v++) w[v] = load_as<Bits>(tile + 2 * v * LANES);
    for (int r = 0; r < R; r++) {
      uint32_t pair;
      std::memcpy(&pair, x + r * x_stride + i, 4);
      for (int v = 0; v < V; v++) part[r][v] = add_pair_products(part[r][v], w[v], pair);
    }
  }
}

// Steps of a product over `in` inputs, as its `fetch` counts them: at most those of a part.
template <class T>
inline int64_t steps_of(int64_t in) {
  return std::max<int64_t>(1, std::min(PART, in) * int64_t(sizeof(T)) / 4);
}

// sums[r] += x[r] times the whole tile, which lies in the cache. A function of its own, as others of this kind:
// inlined, the compiler runs out of registers.
template <int R, class T, class Fetch>
[[gnu::noinline]] void add_product(
    const T* tile, const T* x, int64_t x_stride, int64_t in, Fetch fetch, Floats (&sums)[R][VECTORS]) {
  for (int64_t first = 0; first < in; first += PART) {
    Floats part[R][VECTORS]{};
    const T* from = tile + first * TILE;
    multiply(from, x + first, x_stride, std::min(PART, in - first), fetch, part);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < VECTORS; v++) sums[r][v] += part[r][v];
  }
}

// Two rows of a tile that is not one, as what is multiplied: V registers from `column` on, zeros from `width` on.
template <class T>
struct RowPair {
  Floats even[VECTORS], odd[VECTORS];

  RowPair(const T* first, const T* second, int64_t column, int64_t width) {
    bool whole = column + TILE <= width;
    for (int v = 0; v < VECTORS; v++) {
      int64_t at = column + v * LANES;
      even[v] = whole ? load(first + at) : load_within(first, at, width);
      odd[v] = whole ? load(second + at) : load_within(second, at, width);
    }
  }

  // part[r] += x[r][0] times the first, x[r][1] times the second.
  template <int R>
  void multiply(const float* x, int64_t x_stride, Floats (&part)[R][VECTORS]) const {
    for (int v = 0; v < VECTORS; v++)
      for (int r = 0; r < R; r++) {
        part[r][v] += even[v] * x[r * x_stride];
        part[r][v] += odd[v] * x[r * x_stride + 1];
      }
  }

  template <int R>
  void multiply(const bf16* x, int64_t x_stride, Floats (&part)[R][VECTORS]) const {
    for (int r = 0; r < R; r++) {
      uint32_t pair;
      std::memcpy(&pair, x + r * x_stride, 4);
      for (int v = 0; v < VECTORS; v++)
        part[r][v] = add_pair_products(part[r][v], ((Bits)even[v] >> 16) | (Bits)odd[v], pair);
    }
  }
};

// As add_product with TILE rows that lie anywhere in place of a tile's inputs: sums[r] += x[r] times columns of those,
// from `column` on, of which there are `width` in all.  x: [R][TILE].  fetch: a step is a row.
template <int R, class T, class Fetch>
[[gnu::noinline]] void add_rows(
    const T* const* rows, int64_t column, int64_t width, const Operand<T>* x, Fetch fetch,
    Floats (&sums)[R][VECTORS]) {
  Floats part[R][VECTORS]{};
  for (int64_t i = 0; i < TILE; i += 2) {
    fetch(i);
    fetch(i + 1);
    RowPair<T>(rows[i], rows[i + 1], column, width).multiply(x + i, TILE, part);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] += part[r][v];
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
