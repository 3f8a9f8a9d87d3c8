// y = x times weight transposed, for weights of 8 or 4 bits with a scale for each output feature and group of inputs.
//
// Codes are whole numbers, which bfloat16 holds exactly: products and sums of a group are made with the codes, and the
// sum is scaled. For few rows codes become numbers in registers; for more, a tile's do so once, in the cache. Both make
// the same sums in the same order.
#include "epilogue.h"
#include "room.h"

namespace nereid {

// x: [rows, x_stride] of dtype.  codes: INT8: [tiles, in, TILE]; INT4: [tiles, in / 2, TILE], the even input in the
// lower half of a byte, 8 stands for 0.  scales: [tiles, groups, TILE] float32; the last group may be smaller.
struct QuantisedMatmulArguments {
  const void* x;
  const uint8_t* codes;
  const float* scales;
  Output output;
  int64_t x_stride, in, group;
  Rows rows;
  Dtype dtype, format;
};

namespace {

struct Pair {
  Floats even, odd;
};

struct Int8 {
  static int64_t bytes(int64_t inputs) { return inputs * TILE; }

  // Of inputs 2 * pair and 2 * pair + 1, for the lanes of one register.
  static Pair numbers(const uint8_t* codes, int64_t pair, int v) {
    const uint8_t* at = codes + 2 * pair * TILE + v * LANES;
    return {to_floats(at), to_floats(at + TILE)};
  }

 private:
  static Floats to_floats(const uint8_t* from) {
    return __builtin_convertvector(widen(load_as<Bytes>(from)), Floats);
  }
};

struct Int4 {
  static int64_t bytes(int64_t inputs) { return inputs * TILE / 2; }

  static Pair numbers(const uint8_t* codes, int64_t pair, int v) {
    Ints both = widen(load_as<UBytes>(codes + pair * TILE + v * LANES));
    return {to_floats(both), to_floats(both >> 4)};
  }

 private:
  // Of the lowest four bits.
  static Floats to_floats(Ints code) {
#if defined(__AVX512F__)
    const Floats numbers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    return __builtin_shuffle(numbers, code);
#else
    return __builtin_convertvector((code & 15) - 8, Floats);
#endif
  }
};

// As a pair of bfloat16 in each lane: whole numbers of up to 8 bits lose nothing.
inline Bits to_pairs(Pair numbers) { return ((Bits)numbers.even >> 16) | ((Bits)numbers.odd & 0xffff0000u); }

template <class Format, int R>
inline void add_group(const uint8_t* codes, const bf16* x, int64_t x_stride, int64_t inputs, Sums* sums) {
  for (int64_t pair = 0; pair < inputs / 2; pair++) {
    Bits w[VECTORS];
    __builtin_prefetch(codes + Format::bytes(2 * pair + 32));
    for (int v = 0; v < VECTORS; v++) w[v] = to_pairs(Format::numbers(codes, pair, v));
    for (int r = 0; r < R; r++) {
      uint32_t both;
      std::memcpy(&both, x + r * x_stride + 2 * pair, 4);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = add_pair_products(sums[r][v], w[v], both);
    }
  }
}

// A whole tile's codes as numbers, in the order of matmul's tiles.
template <class Format>
void decode(const uint8_t* codes, int64_t in, bf16* to) {
  for (int64_t pair = 0; pair < in / 2; pair++)
    for (int v = 0; v < VECTORS; v++, to += 2 * LANES) {
      Bits pairs = to_pairs(Format::numbers(codes, pair, v));
      std::memcpy(to, &pairs, sizeof pairs);
    }
}

template <class Format>
void decode(const uint8_t* codes, int64_t in, float* to) {
  for (int64_t pair = 0; pair < in / 2; pair++, to += 2 * TILE)
    for (int v = 0; v < VECTORS; v++) {
      Pair numbers = Format::numbers(codes, pair, v);
      store(to + v * LANES, numbers.even);
      store(to + TILE + v * LANES, numbers.odd);
    }
}

// Calls add(first input of a group, inputs, sums of the group) for each group, and adds up what is scaled.
template <int R, class Add>
inline void add_scaled(const QuantisedMatmulArguments& a, const float* scales, Sums* sums, Add add) {
  for (int64_t first = 0; first < a.in; first += a.group, scales += TILE) {
    Sums part[R]{};
    add(first, first + a.group < a.in ? a.group : a.in - first, part);
    for (int v = 0; v < VECTORS; v++) {
      Floats scale = load(scales + v * LANES);
      for (int r = 0; r < R; r++) sums[r][v] += part[r][v] * scale;
    }
  }
}

template <class Format, class X, class Y>
void tile_of_rows(const QuantisedMatmulArguments& a, int64_t tile, int64_t rows, X* decoded) {
  const uint8_t* codes = a.codes + tile * Format::bytes(a.in);
  const float* scales = a.scales + tile * ((a.in + a.group - 1) / a.group) * TILE;
  if (decoded) decode<Format>(codes, a.in, decoded);
  for_groups_of_rows(rows, [&](auto count, int64_t row) {
    const X* x = static_cast<const X*>(a.x) + row * a.x_stride;
    Sums sums[count]{};
    add_scaled<count>(a, scales, sums, [&](int64_t first, int64_t inputs, Sums* part) {
      if constexpr (std::is_same_v<X, bf16>) {
        if (!decoded) return add_group<Format, count>(codes + Format::bytes(first), x + first, a.x_stride, inputs, part);
      }
      add_product<count>(decoded + first * TILE, x + first, a.x_stride, inputs, part);
    });
    for (int r = 0; r < count; r++) finish<Y>(a.output, sums[r], tile, row + r);
  });
}

template <class Format, class X, class Y>
void run(const QuantisedMatmulArguments& a, const Step& step, const Team& team) {
  static thread_local Room<X> room;
  int64_t rows = step.num_rows(a.rows);
  bool decodes = std::is_same_v<X, float> || rows > ROWS;
  Range tiles = team.share((a.output.out + TILE - 1) / TILE);
  for (int64_t tile = tiles.begin; tile < tiles.end; tile++)
    tile_of_rows<Format, X, Y>(a, tile, rows, decodes ? room.of(a.in * TILE) : nullptr);
}

template <class Format>
void run_as(const QuantisedMatmulArguments& a, const Step& step, const Team& team) {
  if (a.dtype == FLOAT32) run<Format, float, float>(a, step, team);
  else if (a.output.wide) run<Format, bf16, float>(a, step, team);
  else run<Format, bf16, bf16>(a, step, team);
}

}  // namespace
}  // namespace nereid

extern "C" void nereid_quantised_matmul(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const QuantisedMatmulArguments*>(arguments);
  a.format == INT8 ? run_as<Int8>(a, step, team) : run_as<Int4>(a, step, team);
}
