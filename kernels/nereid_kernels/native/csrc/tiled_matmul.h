// y = x times weight transposed, for weights packed in tiles of TILE output features, each in one piece, the last one
// filled up with zeros: every weight is read from memory once for all rows of a block.
//
// Inputs are taken in pieces of at most PART, whose products are summed by themselves, scaled where the weight has
// scales, and added up in order. So a row's bits depend on no other row, nor on how many there are, nor on which thread
// computes them. Few rows are multiplied with a piece as it lies in memory. For more, a piece becomes numbers once, in
// the nearest cache, and while they are multiplied with them the next piece is fetched from memory.
//
// A weight is a class with:
//   X                        of x, float or bf16
//   SCALED                   whether it has scales
//   HAS_OFFSETS              whether a weight is a number times its scale and an offset: x's own sums are wanted then
//   in(), group()            inputs of a row, and of a scale
//   bytes(inputs)            of so many inputs of a tile
//   at(tile, vector, first)  where those of input `first` begin, for the tile's registers from `vector` on
//   scales(tile, first)      of the group that input `first` is in, one for each of the tile's columns
//   added(sum, part, scales, v, x_sum)          sum and a piece's part, scaled by register v of `scales`
//   multiply(from, x, x_stride, inputs, part)   as tile_product's, with a piece as it lies in memory
//   numbers<V>(from, inputs, room)              a piece as numbers: [inputs][TILE], or in pairs, V registers of each
#pragma once

#include "epilogue.h"
#include "room.h"

namespace nereid {

// Rows of x as what is multiplied.  first: the row of y that the first of them makes.  sums: [rows][pieces], of each
// piece's inputs of x, where the weight has offsets.
template <class T>
struct Block {
  const T* x;
  int64_t stride, first, count;
  const float* sums = nullptr;
  int64_t num_pieces = 0;

  float sum(int64_t row, int64_t piece) const { return sums ? sums[row * num_pieces + piece] : 0.0f; }
};

// V registers of a tile, from register `vector` on.
template <int V>
struct Columns {
  int64_t tile, vector;
};

struct Piece {
  const char* from;
  const float* scales;
  int64_t number, first, inputs;
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

// Calls f(number, first input, inputs, first input of its group) for each piece.
template <class Weight, class F>
inline void for_cuts(const Weight& weight, F f) {
  int64_t number = 0;
  for (int64_t group = 0; group < weight.in(); group += weight.group()) {
    int64_t end = std::min(group + weight.group(), weight.in());
    for (int64_t first = group; first < end; first += PART) f(number++, first, std::min(PART, end - first), group);
  }
}

template <class Weight, int V, class F>
inline void for_pieces(const Weight& weight, Columns<V> columns, F f) {
  for_cuts(weight, [&](int64_t number, int64_t first, int64_t inputs, int64_t group) {
    const float* scales = Weight::SCALED ? weight.scales(columns.tile, group) + columns.vector * LANES : nullptr;
    f(Piece{weight.at(columns.tile, columns.vector, first), scales, number, first, inputs});
  });
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
      for (int v = 0; v < V; v++) {
        if (Weight::SCALED) fetch_line(piece.scales + v * LANES + 4 * TILE);
        for (int r = 0; r < R; r++)
          sums[r][v] = Weight::added(sums[r][v], part[r][v], piece.scales, v, block.sum(row + r, piece.number));
      }
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
      for (int r = 0; r < R; r++) {
        float x_sum = block.sum(row + r, piece.number);
        for (int v = 0; v < V; v++, at += LANES)
          store(at, Weight::added(load(at), part[r][v], piece.scales, v, x_sum));
      }
    });
  });
  for (int64_t row = 0; row < block.count; row++) {
    Floats of_row[V];
    for (int v = 0; v < V; v++) of_row[v] = load(sums + (row * V + v) * LANES);
    finish<Y, V>(output, of_row, columns.tile, columns.vector, block.first + row);
  }
}

// Calls f with the columns that one thread gets: threads share out halves of tiles, so that none has to do much more than
// the others; but whole ones of a gated weight, whose gates and what they gate lie in the two halves.
template <class F>
void for_columns(const Output& output, const Team& team, F f) {
  int64_t num_tiles = (output.out + TILE - 1) / TILE;
  if (output.epilogue == GATED_SILU)
    return team.for_ranges(num_tiles, 1, [&](Range range) { f(Columns<VECTORS>{range.begin, 0}); });
  team.for_ranges(num_tiles * 2, 2, [&](Range range) {
    range.size() == 2 ? f(Columns<VECTORS>{range.begin / 2, 0})
                      : f(Columns<VECTORS / 2>{range.begin / 2, range.begin % 2 * (VECTORS / 2)});
  });
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

// [rows][pieces]: the sums of each piece's inputs, in their order by registers.
template <class Weight, class T>
const float* sums_of_pieces(const Weight& weight, const Block<T>& block, Room<float>& room) {
  float *sums = room.of(block.count * block.num_pieces), *to = sums;
  for (int64_t row = 0; row < block.count; row++)
    for_cuts(weight, [&](int64_t, int64_t first, int64_t inputs, int64_t) {
      const T* x = block.x + row * block.stride + first;
      Floats sum{};
      for (int64_t i = 0; i < inputs; i += LANES) sum += load_within(x, i, inputs);
      *to++ = sum_of(sum);
    });
  return sums;
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
    if constexpr (Weight::HAS_OFFSETS) {
      static thread_local Room<float> sums_room;
      for_cuts(weight, [&](int64_t number, auto...) { block.num_pieces = number + 1; });
      block.sums = sums_of_pieces(weight, block, sums_room);
    }
    for_columns(output, team, [&](auto columns) {
      block.count <= ROWS ? multiply_few<Y>(weight, columns, block, output)
                          : multiply_many<Y>(weight, columns, block, output);
    });
  }
}

}  // namespace nereid
