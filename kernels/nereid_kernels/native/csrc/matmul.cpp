// y = x times weight transposed, for weights packed in tiles: every weight is read from memory once, whatever the
// number of rows.
//
// A tile is TILE columns of y: [in / 2][TILE][2] bfloat16, or [in][TILE] float32, in one piece; the last one is filled
// up with zeros. Each thread has a share of the tiles, and for each of them takes ROWS rows at a time, so that a tile is
// read from memory for the first and from the cache for the others. A row's bits depend on no other row.
#include "epilogue.h"

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

template <class X, class Y>
void run(const MatmulArguments& a, const Step& step, const Team& team) {
  int64_t rows = step.num_rows(a.rows), num_tiles = (a.output.out + TILE - 1) / TILE;
  Range tiles = team.share(num_tiles);
  for (int64_t tile = tiles.begin; tile < tiles.end; tile++) {
    const X* weight = static_cast<const X*>(a.weight) + tile * a.in * TILE;
    for_groups_of_rows(rows, [&](auto count, int64_t row) {
      Sums sums[count]{};
      add_product<count>(weight, static_cast<const X*>(a.x) + row * a.x_stride, a.x_stride, a.in, sums);
      for (int r = 0; r < count; r++) finish<Y>(a.output, sums[r], tile, row + r);
    });
  }
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
