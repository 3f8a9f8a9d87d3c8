// y = x times weight transposed, for weights packed in tiles of TILE output features, each in one piece, the last one
// filled up with zeros: every weight is read from memory once for all rows of a block.
//
// Inputs are taken in pieces of at most PART, whose products are summed by themselves, and added up in order. So a row's
// bits depend on no other row, nor on how many there are, nor on which thread computes them. Few rows are multiplied with
// a piece as it lies in memory. For more, a piece becomes numbers once, in the nearest cache, and while they are
// multiplied with them the next piece is fetched from memory.
//
// A weight is a class with:
//   X                        of x, float or bf16
//   in()                     inputs of a row
//   bytes(inputs)            of so many inputs of a tile
//   at(tile, vector, first)  where those of input `first` begin, for the tile's registers from `vector` on
//   multiply(from, x, x_stride, inputs, part)   as tile_product's, with a piece as it lies in memory
//   numbers<V>(from, inputs, room)              a piece as numbers: [inputs][TILE], or in pairs, V registers of each
#pragma once

#include "columns.h"
#include "room.h"

namespace nereid {

// Rows of x as what is multiplied.  first: the row of y that the first of them makes.
template <class T>
struct Block {
  const T* x;
  int64_t stride, first, count;
};

struct Piece {
  const char* from;
  int64_t first, inputs;
};

// What lies AHEAD bytes further on in a tile that is read as it lies there.
template <int V>
struct FetchFurther {
  static constexpr int64_t AHEAD = 3072;  // the processor by itself does not look that far
  const char* from;
  void operator()(int64_t step) const {
    for (int v = 0; v < V; v++) fetch_line(from + AHEAD + 4 * (step * TILE + v * LANES));
  }
};

// Some of the next piece's lines a step, while this one's numbers are multiplied with a group of rows.
template <class T>
struct FetchNext {
  static constexpr int64_t BYTES = 64 * 4 / sizeof(T);  // of a step: of a float32 input, or two of bfloat16
  const char* from;
  static int64_t bytes(int64_t inputs) { return 64 * inputs; }
  void operator()(int64_t step) const {
    for (int64_t line = 0; line < BYTES; line += 64) fetch_line_to_second(from + BYTES * step + line);
  }
};

template <class Weight, int V, class F>
inline void for_pieces(const Weight& weight, Columns<V> columns, F f) {
  for (int64_t first = 0; first < weight.in(); first += PART)
    f(Piece{weight.at(columns.tile, columns.vector, first), first, std::min(PART, weight.in() - first)});
}

// At most ROWS rows.
template <class Y, class Weight, int V>
void multiply_few(
    const Weight& weight, Columns<V> columns, const Block<Operand<typename Weight::X>>& block, const Output& output) {
  for_groups_of_rows(block.count, [&](auto count, int64_t row) {
    constexpr int R = count;
    Floats sums[R][V]{};
    for_pieces(weight, columns, [&](const Piece& piece) {
      Floats part[R][V]{};
      Weight::multiply(piece.from, block.x + row * block.stride + piece.first, block.stride, piece.inputs, part);
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] += part[r][v];
    });
    for (int r = 0; r < R; r++) finish<Y, V>(output, sums[r], columns.tile, columns.vector, block.first + row + r);
  });
}

template <class Y, class Weight, int V>
void multiply_many(
    const Weight& weight, Columns<V> columns, const Block<Operand<typename Weight::X>>& block, const Output& output) {
  using T = Operand<typename Weight::X>;
  static thread_local Room<T> numbers_room;
  static thread_local Room<float> sums_room;
  float* sums = sums_room.of(block.count * V * LANES);  // [rows][V][LANES]
  std::fill_n(sums, block.count * V * LANES, 0.0f);
  for_pieces(weight, columns, [&](const Piece& piece) {
    const T* numbers = weight.template numbers<V>(piece.from, piece.inputs, numbers_room);
    const char *ahead = piece.from + weight.bytes(piece.inputs), *end = ahead + weight.bytes(piece.inputs);
    for_groups_of_rows(block.count, [&](auto count, int64_t row) {
      constexpr int R = count;
      Floats part[R][V]{};
      FetchNext<T> fetch{ahead};
      multiply(numbers, block.x + row * block.stride + piece.first, block.stride, piece.inputs, fetch, part);
      if (ahead + fetch.bytes(piece.inputs) < end) ahead += fetch.bytes(piece.inputs);
      float* at = sums + row * V * LANES;
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++, at += LANES) store(at, load(at) + part[r][v]);
    });
  });
  for (int64_t row = 0; row < block.count; row++) {
    Floats of_row[V];
    for (int v = 0; v < V; v++) of_row[v] = load(sums + (row * V + v) * LANES);
    finish<Y, V>(output, of_row, columns.tile, columns.vector, block.first + row);
  }
}

// Rows of x as they are, or as wider numbers in `room`.
template <class T>
inline Block<T> operands(const T* x, int64_t x_stride, int64_t, Range rows, Room<T>&) {
  return {x + rows.begin * x_stride, x_stride, rows.begin, rows.end - rows.begin};
}

inline Block<float> operands(const bf16* x, int64_t x_stride, int64_t in, Range rows, Room<float>& room) {
  int64_t stride = (in + LANES - 1) / LANES * LANES, count = rows.end - rows.begin;
  float* wide = room.of(count * stride);
  for (int64_t row = 0; row < count; row++)
    for (int64_t i = 0; i < in; i += LANES)
      store(wide + row * stride + i, load_within(x + (rows.begin + row) * x_stride, i, in));
  return {wide, stride, rows.begin, count};
}

// x: [rows, x_stride].
template <class Y, class Weight>
void multiply_all(
    const Weight& weight, const typename Weight::X* x, int64_t x_stride, int64_t rows, const Output& output,
    const Team& team) {
  using T = Operand<typename Weight::X>;
  constexpr int64_t CACHE = 512 << 10, LEAST = 8 * ROWS;  // bytes of a block; rows that are worth a piece's conversion
  static thread_local Room<T> room;
  int64_t most = std::max<int64_t>(LEAST, CACHE / (weight.in() * sizeof(T)) / ROWS * ROWS);
  for (int64_t row = 0; row < rows; row += most) {
    if (row) team.sync();
    Block<T> block = operands(x, x_stride, weight.in(), Range{row, std::min(row + most, rows)}, room);
    for_columns(output, team, [&](auto columns) {
      block.count <= ROWS ? multiply_few<Y>(weight, columns, block, output)
                          : multiply_many<Y>(weight, columns, block, output);
    });
  }
}

}  // namespace nereid
