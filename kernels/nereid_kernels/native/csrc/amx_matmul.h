// y = x times weight transposed for rows of bfloat16, in tile registers: what tiled_matmul.h does by vectors.
//
// All weights are multiplied as bfloat16, quantised ones after they have met their scales: columns become such numbers
// once for many rows, and some inputs at a time, in the nearest cache, for few.
//
// A weight has, besides what tiled_matmul.h names:
//   IN_PLACE                                     whether it is bfloat16 as it lies in memory
//   bfloat16s<V>(columns, first, inputs, room)   those inputs of V registers as such: [inputs / 2][TILE][2]
#pragma once

#include "amx.h"
#include "tiled_matmul.h"

#if defined(__AMX_BF16__)
namespace nereid::amx {

// What lies AHEAD bytes further on in columns that are read as they lie in memory.
template <int V>
struct FetchFurther {
  static constexpr int64_t AHEAD = 8192, LINES = INPUTS / 2;  // of a step
  const char* from;
  void operator()(int64_t step) const {
    for (int64_t line = step * LINES; line < (step + 1) * LINES; line++)
      fetch_line(from + AHEAD + 4 * (line / V * TILE + line % V * LANES));
  }
};

// Calls multiply(some inputs' columns, first, how many, fetch) for all inputs.
template <class Fetch, int V, class Weight, class F>
inline void for_strips(const Weight& weight, Columns<V> columns, F multiply) {
  static thread_local Room<bf16> room;
  constexpr int64_t STRIP = 4 * INPUTS;
  if constexpr (Weight::IN_PLACE) {
    const bf16* tile = weight.bfloat16s(columns, 0, weight.in(), room);
    return multiply(tile, 0, weight.in(), Fetch{reinterpret_cast<const char*>(tile)});
  }
  for (int64_t first = 0; first < weight.in(); first += STRIP) {
    int64_t inputs = std::min(STRIP, weight.in() - first);
    multiply(weight.bfloat16s(columns, first, inputs, room), first, inputs, [](int64_t) {});
  }
}

// At most FEW_ROWS rows.
template <class Y, class Weight, int V>
void multiply_by_vectors(const Weight& weight, Columns<V> columns, const Block<bf16>& block, const Output& output) {
  with_few(block.count, [&](auto count) {
    constexpr int R = count;
    Floats sums[R][V]{};
    for_strips<nereid::FetchFurther<V>>(weight, columns, [&](const bf16* tile, int64_t first, int64_t inputs, auto fetch) {
      auto pair_at = [&](int64_t pair, int v) { return split(load_as<Bits>(tile + 2 * (pair * TILE + v * LANES))); };
      add_by_vectors(pair_at, block.x + first, block.stride, inputs, fetch, sums);
    });
    for (int r = 0; r < R; r++) finish<Y, V>(output, sums[r], columns.tile, columns.vector, block.first + r);
  });
}

// At most HEIGHT rows.
template <class Y, class Weight, int V>
void multiply_few(
    const Weight& weight, Columns<V> columns, const Block<bf16>& block, const Output& output, TileRegisters& registers) {
  Floats sums[HEIGHT][V];
  for_strips<FetchFurther<V>>(weight, columns, [&](const bf16* tile, int64_t first, int64_t inputs, auto fetch) {
    Rows rows{block.x + first, block.stride, block.count, reinterpret_cast<float*>(sums), V * LANES};
    registers.multiply<false>(rows, tile, V, inputs, first > 0, fetch);
  });
  for (int64_t row = 0; row < block.count; row++)
    finish<Y, V>(output, sums[row], columns.tile, columns.vector, block.first + row);
}

// While columns are multiplied, those behind them are fetched, some lines a step.
template <class Y, class Weight, int V>
void multiply_many(
    const Weight& weight, Columns<V> columns, const Block<bf16>& block, const Output& output, TileRegisters& registers) {
  static thread_local Room<bf16> room;
  Floats sums[MOST_ROWS][V];
  const bf16* tile = weight.bfloat16s(columns, 0, weight.in(), room);
  int64_t num_steps = (block.count + MOST_ROWS - 1) / MOST_ROWS * V * (weight.in() / INPUTS);
  int64_t lines = weight.bytes(weight.in()) / 64, lines_a_step = (lines + num_steps - 1) / num_steps;
  const char* ahead = weight.at(columns.tile + 1, 0, 0);
  const char* end = ahead + weight.bytes(weight.in());
  auto fetch_next = [&](int64_t) {
    for (int64_t line = 0; line < lines_a_step && ahead < end; line++, ahead += 64) fetch_line_to_second(ahead);
  };
  for (int64_t row = 0; row < block.count; row += MOST_ROWS) {
    int64_t count = std::min(MOST_ROWS, block.count - row);
    Rows rows{block.x + row * block.stride, block.stride, count, reinterpret_cast<float*>(sums), V * LANES};
    registers.multiply<false>(rows, tile, V, weight.in(), false, fetch_next);
    for (int64_t r = 0; r < count; r++)
      finish<Y, V>(output, sums[r], columns.tile, columns.vector, block.first + row + r);
  }
}

// Rows that threads share out by columns, which each of them then reads once.
template <class Y, class Weight>
void multiply_block(
    const Weight& weight, const Block<bf16>& block, const Output& output, const Team& team, TileRegisters& registers) {
  for_columns(output, team, [&](auto columns) {
    if (block.count <= FEW_ROWS) multiply_by_vectors<Y>(weight, columns, block, output);
    else if (block.count <= HEIGHT) multiply_few<Y>(weight, columns, block, output, registers);
    else multiply_many<Y>(weight, columns, block, output, registers);
  });
}

// x: [rows, x_stride].  weight.in(): a multiple of INPUTS. Of many rows, threads take a tile's columns and UNIT rows, so
// that none waits for a slower one; quantised columns are worth their conversion for more rows.
template <class Y, class Weight>
void multiply_all(
    const Weight& weight, const bf16* x, int64_t x_stride, int64_t rows, const Output& output, const Team& team) {
  constexpr int64_t MANY = 8 * MOST_ROWS, UNIT = Weight::IN_PLACE ? 4 * MOST_ROWS : 16 * MOST_ROWS;
  TileRegisters registers;
  FlushToZero flush;
  if (rows < MANY) return multiply_block<Y>(weight, {x, x_stride, 0, rows}, output, team, registers);
  int64_t num_tiles = (output.out + TILE - 1) / TILE, num_blocks = (rows + UNIT - 1) / UNIT;
  for (int64_t number = team.take(); number < num_tiles * num_blocks; number = team.take()) {
    int64_t row = number % num_blocks * UNIT;
    Block<bf16> block{x + row * x_stride, x_stride, row, std::min(UNIT, rows - row)};
    multiply_many<Y>(weight, Columns<VECTORS>{number / num_blocks, 0}, block, output, registers);
  }
}

}  // namespace nereid::amx
#endif

namespace nereid {

// In tile registers where the processor has them and the weight's inputs fill them, else by vectors.
// x: [rows, x_stride].
template <class Y, class Weight>
void multiply_rows(
    const Weight& weight, const typename Weight::X* x, int64_t x_stride, int64_t rows, const Output& output,
    const Team& team) {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<typename Weight::X, bf16>)
    if (weight.in() % amx::INPUTS == 0) return amx::multiply_all<Y>(weight, x, x_stride, rows, output, team);
#endif
  multiply_all<Y>(weight, x, x_stride, rows, output, team);
}

}  // namespace nereid
