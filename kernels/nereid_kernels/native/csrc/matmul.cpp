// y = x times weight transposed, for weights of x's own dtype: a tile is [in / 2][TILE][2] bfloat16, or [in][TILE]
// float32.
#include "amx_matmul.h"

namespace nereid {

// x: [rows, x_stride] of dtype.  weight: packed, [tiles, in, TILE].
struct MatmulArguments {
  const void* x;
  const void* weight;
  Output output;
  int64_t x_stride, in;
  Rows rows;
  Dtype dtype;
};

namespace {

template <class T>
class PlainWeight {
 public:
  using X = T;

  explicit PlainWeight(const MatmulArguments& a) : data_(static_cast<const char*>(a.weight)), in_(a.in) {}

  int64_t in() const { return in_; }
  static int64_t bytes(int64_t inputs) { return inputs * TILE * int64_t(sizeof(T)); }
  const char* at(int64_t tile, int64_t vector, int64_t first) const {
    return data_ + bytes(tile * in_ + first) + vector * int64_t(sizeof(Floats));  // an input, or a pair of them
  }

  template <int R, int V>
  static void multiply(const char* from, const Operand<T>* x, int64_t x_stride, int64_t inputs, Floats (&part)[R][V]) {
    const T* tile = reinterpret_cast<const T*>(from);
    if constexpr (!std::is_same_v<T, Operand<T>>) multiply_widened(tile, x, x_stride, inputs, part);
    else nereid::multiply(tile, x, x_stride, inputs, FetchFurther<V>{from}, part);
  }

  template <int V>
  const Operand<T>* numbers(const char* from, int64_t inputs, Room<Operand<T>>& room) const {
    const T* tile = reinterpret_cast<const T*>(from);
    if constexpr (std::is_same_v<T, Operand<T>>) return tile;
    else return widened<V>(tile, inputs, room.of(inputs * TILE));
  }

 private:
  template <int R, int V>
  static void multiply_widened(
      const bf16* tile, const float* x, int64_t x_stride, int64_t inputs, Floats (&part)[R][V]) {
    FetchFurther<V> fetch{reinterpret_cast<const char*>(tile)};
    for (int64_t i = 0; i < inputs; i += 2, tile += 2 * TILE) {
      fetch(i / 2);
      for (int v = 0; v < V; v++) {
        Pair w = split(load_as<Bits>(tile + 2 * v * LANES));
        for (int r = 0; r < R; r++) {
          part[r][v] += w.even * x[r * x_stride + i];
          part[r][v] += w.odd * x[r * x_stride + i + 1];
        }
      }
    }
  }

  template <int V>
  static const float* widened(const bf16* tile, int64_t inputs, float* to) {
    for (int64_t i = 0; i < inputs; i += 2, tile += 2 * TILE)
      for (int v = 0; v < V; v++) {
        Pair w = split(load_as<Bits>(tile + 2 * v * LANES));
        store(to + i * TILE + v * LANES, w.even);
        store(to + (i + 1) * TILE + v * LANES, w.odd);
      }
    return to;
  }

  const char* data_;
  int64_t in_;
};

template <class X, class Y>
void run(const MatmulArguments& a, const Step& step, const Team& team) {
  const X* x = static_cast<const X*>(a.x);
  multiply_rows<Y>(PlainWeight<X>(a), x, a.x_stride, step.num_rows(a.rows), a.output, team);
}

}  // namespace
}  // namespace nereid

extern "C" void nereid_matmul(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const MatmulArguments*>(arguments);
  if (a.dtype == FLOAT32) run<float, float>(a, step, team);
  else if (a.output.wide) run<bf16, float>(a, step, team);
  else run<bf16, bf16>(a, step, team);
}
