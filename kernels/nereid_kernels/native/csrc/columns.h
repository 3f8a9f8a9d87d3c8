// How threads share out a product's columns.
#pragma once

#include "epilogue.h"

namespace nereid {

// V registers of a tile, from register `vector` on.
template <int V>
struct Columns {
  int64_t tile, vector;
};

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

}  // namespace nereid
