// Products of bfloat16 in a processor's tile registers (AMX): sixteen rows times sixteen columns at once.
//
// A column's products with 32 inputs are summed by themselves, those of even inputs and those of odd ones, and then
// added to its sum. So a row's bits depend on no other row, nor on how many there are, nor on which registers hold it.
// One to three rows are multiplied by vectors in that very order: where two threads share a core's tile registers, a
// product that waits for its columns holds up what is read behind it.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>
#include <utility>

#include "simd.h"

namespace nereid::amx {

constexpr int64_t INPUTS = 32;             // of a tile register
constexpr int64_t HEIGHT = 16;             // rows of one
constexpr int64_t MOST_ROWS = 2 * HEIGHT;  // that are multiplied together
constexpr int FEW_ROWS = 3;                // that are multiplied by vectors

// Some rows, and their sums with the columns of a tile.  x: [rows, x_stride].  sums: [rows, sums_stride].
struct Rows {
  const bf16* x;
  int64_t x_stride, count;
  float* sums;
  int64_t sums_stride;

  Rows from(int64_t row, int64_t column, int64_t most) const {
    return {x + row * x_stride, x_stride, std::min(most, count - row), sums + row * sums_stride + column, sums_stride};
  }
};

// The tile registers of a thread while it lives: 0 .. 3 hold sums, of G groups of rows and V registers of columns; those
// from 4 on the rows, and behind them the columns.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (height_) asm volatile("tilerelease");
  }

  // rows.sums = (+=, where `add`) rows.x times `vectors` registers, an even number, of each of `in` inputs.
  // tile: [in / 2][TILE][2]; NEAR: it lies in the nearest cache.  in: a multiple of INPUTS.  fetch(step): has memory fetched that is wanted later; a step is
  // one of the columns' registers with INPUTS inputs.
  template <bool NEAR, class Fetch>
  void multiply(const Rows& rows, const bf16* tile, int vectors, int64_t in, bool add, Fetch fetch) {
    for (int64_t row = 0; row < rows.count; row += MOST_ROWS) {
      Rows some = rows.from(row, 0, MOST_ROWS);
      shape(some.count);
      if (vectors == 4 && some.count <= HEIGHT) {
        run<NEAR, 1, 4>(some, tile, in, add, fetch);
        continue;
      }
      for (int v = 0; v < vectors; v += 2) {
        Rows part = some.from(0, v * LANES, MOST_ROWS);
        const bf16* columns = tile + 2 * v * LANES;
        some.count <= HEIGHT ? run<NEAR, 1, 2>(part, columns, in, add, fetch) : run<NEAR, 2, 2>(part, columns, in, add, fetch);
      }
    }
  }

 private:
  template <int T>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void clear() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int SUM, int X, int W>
  static void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(X), "i"(W));
  }

  // Calls f with each of 0 .. N - 1 as a constant.
  template <int N, class F>
  static void each(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) {
      (f(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, N>{});
  }

  template <int G, int V, class F>
  static void each_sum(const Rows& rows, F f) {
    each<G>([&](auto g) {
      each<V>([&](auto v) { f(std::integral_constant<int, g * V + v>{}, rows.from(g * HEIGHT, v * LANES, HEIGHT).sums); });
    });
  }

  template <bool NEAR, int G, int V, class Fetch>
  static void run(const Rows& rows, const bf16* tile, int64_t in, bool add, Fetch& fetch) {
    static_assert(G * V <= 4 && G <= 2);
    each_sum<G, V>(rows, [&](auto sum, float* from) {
      if (add) load<sum>(from, 4 * rows.sums_stride);
      else clear<sum>();
    });
    for (int64_t i = 0; i < in; i += INPUTS, tile += INPUTS * TILE) {
      each<G>([&](auto g) { load<4 + g>(rows.x + g * HEIGHT * rows.x_stride + i, 2 * rows.x_stride); });
      each<V>([&](auto v) {
        constexpr int W = 4 + G + v % (4 - G);
        fetch(i / INPUTS * V + v);
        load<W>(tile + 2 * v * LANES, 4 * TILE);
        if (!NEAR && G == 2) fetch_columns(tile + INPUTS * TILE + 2 * v * LANES);
        each<G>([&](auto g) { add_products<g * V + v, 4 + g, W>(); });
      });
    }
    each_sum<G, V>(rows, [&](auto sum, float* to) { store<sum>(to, 4 * rows.sums_stride); });
  }

  // Those of the next inputs: where two threads share a core, no product is made while its columns are on their way.
  static void fetch_columns(const bf16* tile) {
    for (int64_t pair = 0; pair < INPUTS / 2; pair++) fetch_line(tile + 2 * pair * TILE);
  }

  // What ldtilecfg reads.
  struct alignas(64) Shapes {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };

  // For so many rows: one group of at most HEIGHT, or a full one and what is left.
  void shape(int64_t height) {
    if (height == height_) return;
    height_ = height;
    Shapes shapes;
    auto set = [&](int number, int64_t rows) { shapes.bytes[number] = 64, shapes.rows[number] = uint8_t(rows); };
    for (int number = 0; number < 8; number++) set(number, HEIGHT);
    bool one = height <= HEIGHT;
    for (int sum = 0; sum < 4; sum++) set(sum, one ? height : sum < 2 ? HEIGHT : height - HEIGHT);
    set(4, one ? height : HEIGHT);
    if (!one) set(5, height - HEIGHT);
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }

  int64_t height_ = 0;
};

// While it lives, vectors take numbers below the smallest normal one for 0, as tile registers do.
class FlushToZero {
 public:
  FlushToZero() { _mm_setcsr(before_ | 0x8040); }
  FlushToZero(const FlushToZero&) = delete;
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_ = _mm_getcsr();
};

// sums[r] += x[r] times V registers of each of `in` inputs, a multiple of INPUTS.  x: R rows, x_stride apart.
// pair_at(number, v): of a register's columns.  fetch(step): has memory fetched that is wanted later; a step is a pair.
template <int R, int V, class PairAt, class Fetch>
inline void add_by_vectors(
    PairAt pair_at, const bf16* x, int64_t x_stride, int64_t in, Fetch fetch, Floats (&sums)[R][V]) {
  static_assert(R <= FEW_ROWS);
  for (int64_t first = 0; first < in; first += INPUTS) {
    Floats even[R][V]{}, odd[R][V]{};
    for (int64_t i = first; i < first + INPUTS; i += 2) {
      fetch(i / 2);
      Pair w[V];
      for (int v = 0; v < V; v++) w[v] = pair_at(i / 2, v);
      for (int r = 0; r < R; r++) {
        uint32_t both;
        std::memcpy(&both, x + r * x_stride + i, 4);
        Pair of_row = split(both - Bits{});
        for (int v = 0; v < V; v++) {
          even[r][v] += w[v].even * of_row.even;
          odd[r][v] += w[v].odd * of_row.odd;
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] += even[r][v] + odd[r][v];
  }
}

// Calls f with the number of rows, at most FEW_ROWS, as a constant.
template <class F>
inline void with_few(int64_t rows, F f) {
  static_assert(FEW_ROWS == 3, "a case for each number");
  if (rows == 1) f(std::integral_constant<int, 1>{});
  else if (rows == 2) f(std::integral_constant<int, 2>{});
  else f(std::integral_constant<int, 3>{});
}

}  // namespace nereid::amx

#endif
