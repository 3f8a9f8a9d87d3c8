// y = x times weight transposed for rows of bfloat16, in tile registers: what tiled_matmul.h does by vectors.
//
// A weight is bfloat16 as it lies in memory; for the rest see tiled_matmul.h.
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

template <int V, class Weight>
inline const bf16* tile_of(const Weight& weight, Columns<V> columns) {
  return reinterpret_cast<const bf16*>(weight.at(columns.tile, columns.vector, 0));
}

// At most FEW_ROWS rows.
template <class Y, class Weight, int V>
void multiply_by_vectors(const Weight& weight, Columns<V> columns, const Block<bf16>& block, const Output& output) {
  with_few(block.count, [&](auto count) {
    constexpr int R = count;
    Floats sums[R][V]{};
    const bf16* tile = tile_of(weight, columns);
    auto pair_at = [&](int64_t pair, int v) { return split(load_as<Bits>(tile + 2 * (pair * TILE + v * LANES))); };
    nereid::FetchFurther<V> fetch{reinterpret_cast<const char*>(tile)};
    add_by_vectors(pair_at, block.x, block.stride, weight.in(), fetch, sums);
    for (int r = 0; r < R; r++) finish<Y, V>(output, sums[r], columns.tile, columns.vector, block.first + r);
  });
}

// At most HEIGHT rows.
template <class Y, class Weight, int V>
void multiply_few(
    const Weight& weight, Columns<V> columns, const Block<bf16>& block, const Output& output, TileRegisters& registers) {
  Floats sums[HEIGHT][V];
  const bf16* tile = tile_of(weight, columns);
  Rows rows{block.x, block.stride, block.count, reinterpret_cast<float*>(sums), V * LANES};
  FetchFurther<V> fetch{reinterpret_cast<const char*>(tile)};
  registers.multiply<false>(rows, tile, V, weight.in(), false, fetch);
  for (int64_t row = 0; row < block.count; row++)
    finish<Y, V>(output, sums[row], columns.tile, columns.vector, block.first + row);
}

// While columns are multiplied, those behind them are fetched, some lines a step.
template <class Y, class Weight, int V>
void multiply_many(
    const Weight& weight, Columns<V> columns, const Block<bf16>& block, const Output& output, TileRegisters& registers) {
  Floats sums[MOST_ROWS][V];
  const bf16* tile = tile_of(weight, columns);
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
// that none waits for a slower one.
template <class Y, class Weight>
void multiply_all(
    const Weight& weight, const bf16* x, int64_t x_stride, int64_t rows, const Output& output, const Team& team) {
  constexpr int64_t MANY = 8 * MOST_ROWS, UNIT = 4 * MOST_ROWS;
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
