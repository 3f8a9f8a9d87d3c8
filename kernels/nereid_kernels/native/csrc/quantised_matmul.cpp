// y = x times weight transposed, for weights of 8 or 4 bits with a scale for each output feature and group of inputs.
//
// Codes are whole numbers, which float32 and bfloat16 hold exactly: products and sums of a piece of a group are made
// with the codes, and the sum is scaled. An offset, which is added to all weights of a group, meets the sum of x there.
#include "amx_matmul.h"

namespace nereid {

// x: [rows, x_stride] of dtype.  codes: INT8: [tiles, in, TILE]; INT4: [tiles, in / 2, TILE], the even input in the
// lower half of a byte, 8 stands for 0.  scales: [tiles, groups, TILE]: float32, or of INT4 a scale's bfloat16 in the
// upper half of 4 bytes, and an offset's in the lower; the last group may be smaller.
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

struct Int8 {
  static constexpr bool HAS_OFFSETS = false;
  static int64_t bytes(int64_t inputs) { return inputs * TILE; }

  // Of inputs 2 * pair and 2 * pair + 1.
  static Pair numbers(const char* codes, int64_t pair, int v) {
    const char* at = codes + 2 * pair * TILE + v * LANES;
    return {to_floats(at), to_floats(at + TILE)};
  }

  static Floats added(Floats sum, Floats part, const float* scales, float) { return sum + part * load(scales); }
  static Pair scaled(Pair numbers, Floats scales) { return {numbers.even * scales, numbers.odd * scales}; }

 private:
  static Floats to_floats(const char* from) { return __builtin_convertvector(widen(load_as<Bytes>(from)), Floats); }
};

struct Int4 {
  static constexpr bool HAS_OFFSETS = true;
  static int64_t bytes(int64_t inputs) { return inputs * TILE / 2; }

  static Pair numbers(const char* codes, int64_t pair, int v) {
    Ints both = widen(load_as<UBytes>(codes + pair * TILE + v * LANES));
    return {to_floats(both), to_floats(both >> 4)};
  }

  static Floats added(Floats sum, Floats part, const float* scales, float x_sum) {
    Bits both = load_as<Bits>(scales);
    return sum + part * (Floats)(both & 0xffff0000u) + x_sum * (Floats)(both << 16);
  }
  static Pair scaled(Pair numbers, Floats scales) {
    Floats scale = (Floats)((Bits)scales & 0xffff0000u), offset = (Floats)((Bits)scales << 16);
    return {numbers.even * scale + offset, numbers.odd * scale + offset};
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

// The same of any numbers, rounded.
inline Bits to_rounded_pairs(Pair numbers) {
#if defined(__AVX512BF16__)
  typedef uint16_t Places __attribute__((vector_size(64)));
  const Places order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512bh halves = _mm512_cvtne2ps_pbh((__m512)numbers.odd, (__m512)numbers.even);
  return (Bits)_mm512_permutexvar_epi16((__m512i)order, (__m512i)halves);
#else
  return widen(to_halves(numbers.even)) | widen(to_halves(numbers.odd)) << 16;
#endif
}

// Two inputs of V registers with R rows.
template <int R, int V>
inline void add_products(const Pair (&w)[V], const float* x, int64_t x_stride, Floats (&part)[R][V]) {
  for (int v = 0; v < V; v++)
    for (int r = 0; r < R; r++) {
      part[r][v] += w[v].even * x[r * x_stride];
      part[r][v] += w[v].odd * x[r * x_stride + 1];
    }
}

template <int R, int V>
inline void add_products(const Pair (&w)[V], const bf16* x, int64_t x_stride, Floats (&part)[R][V]) {
  for (int r = 0; r < R; r++) {
    uint32_t both;
    std::memcpy(&both, x + r * x_stride, 4);
    for (int v = 0; v < V; v++) part[r][v] = add_pair_products(part[r][v], to_pairs(w[v]), both);
  }
}

// A pair of inputs in the order of matmul's tiles: at its place among V registers of each.
inline void store_pair(float* to, int v, Pair numbers) {
  store(to + v * LANES, numbers.even);
  store(to + TILE + v * LANES, numbers.odd);
}

inline void store_pair(bf16* to, int v, Pair numbers) {
  Bits pairs = to_pairs(numbers);
  std::memcpy(to + 2 * v * LANES, &pairs, sizeof pairs);
}

template <class Format, class T>
class QuantisedWeight {
 public:
  using X = T;
  static constexpr bool SCALED = true, HAS_OFFSETS = Format::HAS_OFFSETS, IN_PLACE = false;

  explicit QuantisedWeight(const QuantisedMatmulArguments& a)
      : codes_(reinterpret_cast<const char*>(a.codes)), scales_(a.scales), in_(a.in), group_(a.group) {}

  int64_t in() const { return in_; }
  int64_t group() const { return group_; }
  static int64_t bytes(int64_t inputs) { return Format::bytes(inputs); }
  const char* at(int64_t tile, int64_t vector, int64_t first) const {
    return codes_ + bytes(tile * in_ + first) + vector * LANES;
  }
  const float* scales(int64_t tile, int64_t first) const {
    return scales_ + (tile * ((in_ + group_ - 1) / group_) + first / group_) * TILE;
  }

  static Floats added(Floats sum, Floats part, const float* scales, int v, float x_sum) {
    return Format::added(sum, part, scales + v * LANES, x_sum);
  }

  template <int R, int V>
  static void multiply(
      const char* from, const Operand<T>* x, int64_t x_stride, int64_t inputs, Floats (&part)[R][V]) {
    for (int64_t pair = 0; pair < inputs / 2; pair++) {
      fetch(from, pair);
      Pair w[V];
      for (int v = 0; v < V; v++) w[v] = Format::numbers(from, pair, v);
      add_products(w, x + 2 * pair, x_stride, part);
    }
  }

  template <int V>
  const Operand<T>* numbers(const char* from, int64_t inputs, Room<Operand<T>>& room) const {
    Operand<T>* to = room.of(inputs * TILE);
    for (int64_t pair = 0; pair < inputs / 2; pair++)
      for (int v = 0; v < V; v++) store_pair(to + 2 * pair * TILE, v, Format::numbers(from, pair, v));
    return to;
  }

  template <int V>
  const bf16* bfloat16s(Columns<V> columns, int64_t first, int64_t inputs, Room<bf16>& room) const {
    bf16 *to = room.of(inputs * TILE), *at_pair = to;
    for (int64_t i = first, end; i < first + inputs; i = end) {
      end = std::min(first + inputs, (i / group_ + 1) * group_);
      const float* scales = this->scales(columns.tile, i) + columns.vector * LANES;
      Floats of_group[V];
      for (int v = 0; v < V; v++) of_group[v] = load(scales + v * LANES);
      const char* from = at(columns.tile, columns.vector, i);
      for (int64_t pair = 0; pair < (end - i) / 2; pair++, at_pair += 2 * TILE) {
        fetch(from, pair);
        for (int v = 0; v < V; v++) {
          Bits pairs = to_rounded_pairs(Format::scaled(Format::numbers(from, pair, v), of_group[v]));
          std::memcpy(at_pair + 2 * v * LANES, &pairs, sizeof pairs);
        }
      }
    }
    return to;
  }

 private:
  static constexpr int64_t AHEAD = 2048;  // bytes

  static void fetch(const char* from, int64_t pair) {
    for (int64_t byte = 0; byte < bytes(2); byte += 64) fetch_line(from + bytes(2 * pair) + AHEAD + byte);
  }

  const char* codes_;
  const float* scales_;
  int64_t in_, group_;
};

template <class Format, class X, class Y>
void run(const QuantisedMatmulArguments& a, const Step& step, const Team& team) {
  const X* x = static_cast<const X*>(a.x);
  multiply_rows<Y>(QuantisedWeight<Format, X>(a), x, a.x_stride, step.num_rows(a.rows), a.output, team);
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
