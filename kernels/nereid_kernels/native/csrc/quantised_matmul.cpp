// y = x times weight transposed, for weights of 8 or 4 bits with a scale for each output feature and group of inputs.
//
// x becomes whole numbers of 16 bits, with a scale for each row and piece of inputs: at most PIECE of them, within a
// group. That is finer than bfloat16 but for what is far smaller than its piece's largest number. Sums of a piece's
// products are then exact in any order; they are scaled, and added piece after piece. So a row's bits depend on no other
// row, nor on how many there are.
//
// Codes stand for numbers from 0 on, and ZERO for 0 itself: with whole numbers q of x, sum((code - ZERO) * q) is
// sum(code * q) - ZERO * sum(q), whose second part the sum begins with.
#include "columns.h"
#include "room.h"

namespace nereid {

// x: [rows, x_stride] of dtype.  codes: [tiles, in / 4 or 8, TILE] of INT8 or INT4, `in` filled up to a multiple of 8:
// see Codes.  scales: [tiles, groups, TILE]: float32, or of INT4 a scale's bfloat16 in the upper half of 4 bytes, and an
// offset's in the lower, which is added to all weights of the group; the last group may be smaller.  group: a multiple
// of 8.
struct QuantisedMatmulArguments {
  const void* x;
  const uint32_t* codes;
  const float* scales;
  Output output;
  int64_t x_stride, in, group;
  Rows rows;
  Dtype dtype, format;
};

namespace {

constexpr int64_t PIECE = 128;  // inputs: sums of their products stay below 2^31
constexpr int64_t UNIT = 8;     // inputs that codes are filled up to

// Codes in words of 4 bytes, one for each column: of inputs 2k and 2k + 1 the fields k of both halves.
template <int BITS>
struct Codes {
  static constexpr int64_t INPUTS = 32 / BITS;  // of a word
  static constexpr int ZERO = 1 << (BITS - 1);

  // Fields k as pairs of whole numbers of 16 bits.
  static Bits pairs(Bits words, int k) { return (words >> (BITS * k)) & (BITS == 8 ? 0x00ff00ffu : 0x000f000fu); }
};

// What a group's codes are multiplied with, and what is added to its weights, for LANES columns.
struct Scales {
  Floats scale, offset;
};

struct Int8 : Codes<8> {
  static constexpr bool HAS_OFFSETS = false;
  static Scales scales(const float* from) { return {load(from), Floats{}}; }
};

struct Int4 : Codes<4> {
  static constexpr bool HAS_OFFSETS = true;
  static Scales scales(const float* from) {
    Bits both = load_as<Bits>(from);
    return {(Floats)(both & 0xffff0000u), (Floats)(both << 16)};
  }
};

struct Piece {
  int64_t number, first, inputs, group;
};

// Rows of x as whole numbers.  first: the row of y that the first of them makes.  x: [rows][stride].  The others:
// [rows][pieces]: scales; the sums of the numbers, and those times the scale.
struct RoundedRows {
  int64_t first, count, stride, num_pieces;
  int16_t* x;
  float* scales;
  int32_t* sums;
  float* scaled_sums;
};

template <class Format>
class QuantisedWeight {
 public:
  explicit QuantisedWeight(const QuantisedMatmulArguments& a)
      : codes_(a.codes), scales_(a.scales), in_(a.in), filled_((a.in + UNIT - 1) / UNIT * UNIT), group_(a.group),
        num_groups_((a.in + a.group - 1) / a.group) {}

  int64_t in() const { return in_; }
  int64_t filled() const { return filled_; }

  // Calls f with each piece in turn.
  template <class F>
  void for_pieces(F f) const {
    int64_t number = 0;
    for (int64_t first = 0, group = 0; first < filled_; group++) {
      int64_t end = std::min((group + 1) * group_, filled_);
      for (; first < end; first += PIECE) f(Piece{number++, first, std::min(PIECE, end - first), group});
      first = end;
    }
  }

  int64_t num_pieces() const {
    int64_t count = 0;
    for_pieces([&](const Piece&) { count++; });
    return count;
  }

  template <int V>
  const uint32_t* codes(Columns<V> columns, const Piece& piece) const {
    return codes_ + (columns.tile * filled_ + piece.first) / Format::INPUTS * TILE + columns.vector * LANES;
  }
  template <int V>
  const float* scales(Columns<V> columns, const Piece& piece) const {
    return scales_ + (columns.tile * num_groups_ + piece.group) * TILE + columns.vector * LANES;
  }

 private:
  const uint32_t* codes_;
  const float* scales_;
  int64_t in_, filled_, group_, num_groups_;
};

// A row's piece as whole numbers; `inputs` is what there is of it in x, and what fills it up is 0. Where a number is not
// finite the scale is NaN, and with it all that the row makes. A piece of next to nothing is 0.
template <class T>
void round_piece(const T* x, int64_t inputs, const Piece& piece, int64_t row, const RoundedRows& rows) {
  constexpr float MOST = 32767.0f, NOTHING = 1e-30f;
  Floats top{}, zeros{};
  for (int64_t i = 0; i < inputs; i += LANES) {
    Floats number = load_within(x, i, inputs);
    top = larger(top, (Floats)((Bits)number & 0x7fffffffu));
    zeros += number * 0.0f;
  }
  float largest = max_of(top);
  bool finite = sum_of(zeros) == 0.0f;
  Floats factor = splat(finite && largest > NOTHING ? MOST / largest : 0.0f);
  Ints sum{};
  int16_t* to = rows.x + row * rows.stride + piece.first;
  for (int64_t i = 0; i < piece.inputs; i += LANES) {
    Floats number = finite ? load_within(x, i, inputs) * factor : Floats{};
    Ints whole = nearest(number);
    sum += whole;
    store_shorts(to + i, whole);
  }
  int32_t total = 0;
  for (int i = 0; i < LANES; i++) total += sum[i];
  int64_t at = row * rows.num_pieces + piece.number;
  rows.scales[at] = finite ? largest / MOST : NAN;
  rows.sums[at] = total;
  rows.scaled_sums[at] = float(total) * rows.scales[at];
}

// Rows of one thread, kept from call to call.
struct Rooms {
  Room<int16_t> x;
  Room<float> scales, scaled_sums;
  Room<int32_t> sums;
};

template <class Weight, class T>
RoundedRows rounded(const Weight& weight, const T* x, int64_t x_stride, Range rows, Rooms& rooms) {
  int64_t count = rows.size(), num_pieces = weight.num_pieces();
  RoundedRows all{rows.begin, count, weight.filled(), num_pieces,
                  rooms.x.of(count * weight.filled() + LANES),  // a piece is stored by whole registers
                  rooms.scales.of(count * num_pieces), rooms.sums.of(count * num_pieces),
                  rooms.scaled_sums.of(count * num_pieces)};
  for (int64_t row = 0; row < count; row++)
    weight.for_pieces([&](const Piece& piece) {
      const T* from = x + (rows.begin + row) * x_stride + piece.first;
      round_piece(from, std::min(piece.inputs, weight.in() - piece.first), piece, row, all);
    });
  return all;
}

// parts[r] += x[r] times V registers of each of `inputs` inputs' codes.  FETCH: has what lies further on fetched.
template <class Format, bool FETCH, int R, int V>
inline void multiply(const uint32_t* codes, const int16_t* x, int64_t x_stride, int64_t inputs, Ints (&parts)[R][V]) {
  constexpr int64_t AHEAD = 4096;  // bytes
  for (int64_t i = 0; i < inputs; i += Format::INPUTS, codes += TILE) {
    for (int v = 0; FETCH && v < V; v++) fetch_line(reinterpret_cast<const char*>(codes + v * LANES) + AHEAD);
    for (int k = 0; k < Format::INPUTS / 2; k++) {
      Bits w[V];
      for (int v = 0; v < V; v++) w[v] = Format::pairs(load_as<Bits>(codes + v * LANES), k);
      for (int r = 0; r < R; r++) {
        uint32_t pair;
        std::memcpy(&pair, x + r * x_stride + i + 2 * k, 4);
        for (int v = 0; v < V; v++) parts[r][v] = add_whole_products(parts[r][v], w[v], pair);
      }
    }
  }
}

// What a piece adds to R rows: calls add(r, v, f), where f makes of a sum in float32 the sum with the piece.
template <class Format, bool FETCH, int R, int V, class Add>
inline void add_piece(
    const QuantisedWeight<Format>& weight, Columns<V> columns, const Piece& piece, const RoundedRows& rows, int64_t row,
    Add add) {
  Ints parts[R][V];
  int64_t at = row * rows.num_pieces + piece.number;
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) parts[r][v] = Ints{} - Format::ZERO * rows.sums[at + r * rows.num_pieces];
  const int16_t* x = rows.x + row * rows.stride + piece.first;
  multiply<Format, FETCH>(weight.codes(columns, piece), x, rows.stride, piece.inputs, parts);
  const float* from = weight.scales(columns, piece);
  if (FETCH) fetch_line(from + 4 * TILE);
  Scales scales[V];
  for (int v = 0; v < V; v++) scales[v] = Format::scales(from + v * LANES);
  for (int r = 0; r < R; r++, at += rows.num_pieces) {
    float x_scale = rows.scales[at], x_sum = rows.scaled_sums[at];
    for (int v = 0; v < V; v++) {
      Floats part = __builtin_convertvector(parts[r][v], Floats) * x_scale;
      add(r, v, [&](Floats sum) {
        sum += part * scales[v].scale;
        return Format::HAS_OFFSETS ? sum + scales[v].offset * x_sum : sum;
      });
    }
  }
}

// At most ROWS rows.
template <class Y, class Format, int V>
void multiply_few(
    const QuantisedWeight<Format>& weight, Columns<V> columns, const RoundedRows& rows, const Output& output) {
  for_groups_of_rows(rows.count, [&](auto count, int64_t row) {
    constexpr int R = count;
    Floats sums[R][V]{};
    weight.for_pieces([&](const Piece& piece) {
      add_piece<Format, true, R>(weight, columns, piece, rows, row, [&](int r, int v, auto added) {
        sums[r][v] = added(sums[r][v]);
      });
    });
    for (int r = 0; r < R; r++) finish<Y, V>(output, sums[r], columns.tile, columns.vector, rows.first + row + r);
  });
}

// A piece of the weight is read from memory once, and multiplied with all rows.
template <class Y, class Format, int V>
void multiply_many(
    const QuantisedWeight<Format>& weight, Columns<V> columns, const RoundedRows& rows, const Output& output) {
  static thread_local Room<float> room;
  float* sums = room.of(rows.count * V * LANES);  // [rows][V][LANES]
  std::fill_n(sums, rows.count * V * LANES, 0.0f);
  weight.for_pieces([&](const Piece& piece) {
    for_groups_of_rows(rows.count, [&](auto count, int64_t row) {
      constexpr int R = count;
      auto add = [&](int r, int v, auto added) {
        float* sum = sums + ((row + r) * V + v) * LANES;
        store(sum, added(load(sum)));
      };
      row ? add_piece<Format, false, R>(weight, columns, piece, rows, row, add)
          : add_piece<Format, true, R>(weight, columns, piece, rows, row, add);
    });
  });
  for (int64_t row = 0; row < rows.count; row++) {
    Floats of_row[V];
    for (int v = 0; v < V; v++) of_row[v] = load(sums + (row * V + v) * LANES);
    finish<Y, V>(output, of_row, columns.tile, columns.vector, rows.first + row);
  }
}

template <class Y, class T, class Format>
void multiply_all(const QuantisedMatmulArguments& a, int64_t num_rows, const Team& team) {
  constexpr int64_t CACHE = 256 << 10;  // bytes of rows that are multiplied at a time
  static thread_local Rooms rooms;
  QuantisedWeight<Format> weight(a);
  int64_t most = std::max<int64_t>(8 * ROWS, CACHE / (weight.filled() * sizeof(int16_t)) / ROWS * ROWS);
  for (int64_t row = 0; row < num_rows; row += most) {
    if (row) team.sync();
    Range range{row, std::min(row + most, num_rows)};
    RoundedRows rows = rounded(weight, static_cast<const T*>(a.x), a.x_stride, range, rooms);
    for_columns(a.output, team, [&](auto columns) {
      rows.count <= ROWS ? multiply_few<Y>(weight, columns, rows, a.output)
                         : multiply_many<Y>(weight, columns, rows, a.output);
    });
  }
}

template <class Format>
void run_as(const QuantisedMatmulArguments& a, const Step& step, const Team& team) {
  int64_t num_rows = step.num_rows(a.rows);
  if (a.dtype == FLOAT32) multiply_all<float, float, Format>(a, num_rows, team);
  else if (a.output.wide) multiply_all<float, bf16, Format>(a, num_rows, team);
  else multiply_all<bf16, bf16, Format>(a, num_rows, team);
}

}  // namespace
}  // namespace nereid

extern "C" void nereid_quantised_matmul(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const QuantisedMatmulArguments*>(arguments);
  a.format == INT8 ? run_as<Int8>(a, step, team) : run_as<Int4>(a, step, team);
}
