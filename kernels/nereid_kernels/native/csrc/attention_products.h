// The two products of attention with a tile of keys and values: by vectors, or in tile registers.
//
// Each is a class with what the model computes in as T, and what that is multiplied as as Number. head_dim: see Cache.
#pragma once

#include "amx.h"
#include "attention_pieces.h"
#include "kv_tiles.h"

namespace nereid {

template <class Model>
class VectorProducts {
 public:
  using T = Model;
  using Number = Operand<T>;

  explicit VectorProducts(const Cache& cache) : head_dim_(cache.head_dim) {}

  // scores: [rows][TILE].  query: [rows][head_dim].
  void multiply_keys(KVTiles<T, Number>& tiles, const Number* query, int64_t num_rows, float* scores) {
    const Number* keys = tiles.keys();
    for_groups_of_rows(num_rows, [&](auto count, int64_t row) {
      constexpr int R = count;
      Sums sums[R]{};
      add_product<R>(keys, query + row * head_dim_, head_dim_, head_dim_, FetchRows{}, sums);
      std::memcpy(scores + row * TILE, sums, sizeof sums);
    });
  }

  // Adds the rows' weights times values to their sums.  weights: [rows][TILE].
  void add_values(KVTiles<T, Number>& tiles, const Number* weights, int64_t num_rows, float* sums) {
    if (num_rows <= ROWS) {  // each value is used in one product: a tile of them would not pay
      const T* const* rows = tiles.value_rows();
      add_by_tiles(tiles, num_rows, sums, TILE, [&](int64_t tile, int64_t row, FetchRows fetch, auto& some) {
        add_rows(rows, tile * TILE, head_dim_, weights + row * TILE, fetch, some);
      });
    } else {
      const Number* values = tiles.values();
      int64_t steps = steps_of<Number>(TILE);
      add_by_tiles(tiles, num_rows, sums, steps, [&](int64_t tile, int64_t row, FetchRows fetch, auto& some) {
        add_product(values + tile * TILE * TILE, weights + row * TILE, TILE, TILE, fetch, some);
      });
    }
  }

 private:
  // add(tile of the head's width, first row, fetch, sums of some rows).  steps: those of `fetch`.
  template <class Add>
  void add_by_tiles(KVTiles<T, Number>& tiles, int64_t num_rows, float* sums, int64_t steps, Add add) {
    for (int64_t tile = 0; tile < tiles.head_tiles(); tile++)
      for_groups_of_rows(num_rows, [&](auto count, int64_t row) {
        constexpr int R = count;
        float* to = sums + row * head_dim_;
        Sums some[R];
        for (int r = 0; r < R; r++)
          for (int v = 0; v < VECTORS; v++)
            some[r][v] = load_within(to + r * head_dim_, tile * TILE + v * LANES, head_dim_);
        add(tile, row, tile || row ? FetchRows{} : tiles.fetch_values(steps), some);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < VECTORS; v++)
            store_within(to + r * head_dim_, tile * TILE + v * LANES, head_dim_, some[r][v]);
      });
  }

  int64_t head_dim_;
};

#if defined(__AMX_BF16__)
namespace amx {

// head_dim: a multiple of INPUTS.
class Products {
 public:
  using T = bf16;
  using Number = bf16;

  explicit Products(const Cache& cache) : head_dim_(cache.head_dim) {}

  void multiply_keys(KVTiles<T, Number>& tiles, const bf16* query, int64_t num_rows, float* scores) {
    const bf16* keys = tiles.keys();
    if (num_rows > FEW_ROWS) {
      Rows rows{query, head_dim_, num_rows, scores, TILE};
      return registers_.multiply<true>(rows, keys, VECTORS, head_dim_, false, [](int64_t) {});
    }
    with_few(num_rows, [&](auto count) {
      Floats sums[count][VECTORS]{};
      auto pair_at = [&](int64_t pair, int v) { return split(load_as<Bits>(keys + 2 * (pair * TILE + v * LANES))); };
      add_by_vectors(pair_at, query, head_dim_, head_dim_, [](int64_t) {}, sums);
      std::memcpy(scores, sums, sizeof sums);
    });
  }

  void add_values(KVTiles<T, Number>& tiles, const bf16* weights, int64_t num_rows, float* sums) {
    num_rows > FEW_ROWS ? add_in_registers(tiles, weights, num_rows, sums)
                        : with_few(num_rows, [&](auto count) { add_few<count>(tiles, weights, sums); });
  }

 private:
  void add_in_registers(KVTiles<T, Number>& tiles, const bf16* weights, int64_t num_rows, float* sums) {
    const bf16* values = tiles.values();
    constexpr int64_t STEPS = 4;
    FetchRows fetch = tiles.fetch_values(STEPS);
    int64_t done = 0;
    auto fetch_next = [&](int64_t) { if (done < STEPS) fetch(done++); };
    for (int64_t tile = 0; tile < tiles.head_tiles(); tile++) {
      Rows rows{weights, TILE, num_rows, sums + tile * TILE, head_dim_};
      registers_.multiply<true>(rows, values + tile * TILE * TILE, vectors_of(tile), TILE, true, fetch_next);
    }
  }

  // Values are multiplied where they lie: each is used in one product.
  template <int R>
  void add_few(KVTiles<T, Number>& tiles, const bf16* weights, float* sums) {
    const bf16* const* values = tiles.value_rows();
    for (int64_t tile = 0; tile < tiles.head_tiles(); tile++) {
      FetchRows fetch = tile ? FetchRows{} : tiles.fetch_values(TILE / 2);
      vectors_of(tile) == VECTORS ? add_columns<R, VECTORS>(values, weights, tile * TILE, fetch, sums)
                                  : add_columns<R, VECTORS / 2>(values, weights, tile * TILE, fetch, sums);
    }
  }

  template <int R, int V>
  [[gnu::noinline]] void add_columns(
      const bf16* const* values, const bf16* weights, int64_t column, FetchRows fetch, float* to) {
    Floats sums[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sums[r][v] = load(to + r * head_dim_ + column + v * LANES);
    auto pair_at = [&](int64_t pair, int v) {
      int64_t at = column + v * LANES;
      return Pair{load(values[2 * pair] + at), load(values[2 * pair + 1] + at)};
    };
    add_by_vectors(pair_at, weights, TILE, TILE, fetch, sums);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) store(to + r * head_dim_ + column + v * LANES, sums[r][v]);
  }

  // Registers of a tile that the head's width fills: all, or half of them.
  int vectors_of(int64_t tile) const { return int(std::min<int64_t>(TILE, head_dim_ - tile * TILE) / LANES); }

  int64_t head_dim_;
  TileRegisters registers_;
  FlushToZero flush_;
};

}  // namespace amx
#endif

}  // namespace nereid
