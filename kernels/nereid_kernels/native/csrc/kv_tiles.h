// Keys and values of TILE slots, read from their blocks into tiles that products are made of.
#pragma once

#include "attention_pieces.h"
#include "cache.h"
#include "room.h"
#include "tile_product.h"

namespace nereid {

// For one thread.  T: what the model computes in.  Tiles are of what that is multiplied as, and keep what they hold until
// the next ones are read.
template <class T>
class KVTiles {
 public:
  using Number = Operand<T>;

  explicit KVTiles(const Cache& cache)
      : cache_(cache), head_dim_(cache.head_dim), head_tiles_((head_dim_ + TILE - 1) / TILE) {}

  // Tiles of values: the head's width, filled up.
  int64_t head_tiles() const { return head_tiles_; }

  // Find the slots of TILE keys from `first` on, and have the processor fetch the beginning of each block's rows: a block
  // lies on pages of its own, up to which it does not look ahead by itself.
  void fetch(const int32_t* table, int64_t kv_head, int64_t first, const Sight& sight) {
    int64_t size = cache_.format == SAME ? int64_t(sizeof(T)) : 1;
    int64_t index = first / cache_.block_size, place = first % cache_.block_size;
    for (int64_t slot = 0; slot < TILE; index++, place = 0) {
      int64_t count = std::min(cache_.block_size - place, TILE - slot);
      int64_t at = sight.any(first + slot, count) ? element(cache_, table[index], kv_head, place) : -1;
      for (int64_t byte = 0; at >= 0 && byte < std::min(FETCHED, count * head_dim_ * size); byte += 64) {
        __builtin_prefetch(cache_.k + at * size + byte);
        __builtin_prefetch(cache_.v + at * size + byte);
      }
      for (int64_t i = 0; i < count; i++)
        fetched_[slot + i] = sight.any(first + slot + i, 1) ? at + i * head_dim_ : -1;
      slot += count;
    }
  }

  // From here on `keys` and `values` read what was fetched last.
  void turn_to_fetched() { std::memcpy(slots_, fetched_, sizeof slots_); }

  // [head_dim][TILE], or in pairs.
  const Number* keys() {
    Number* keys = rooms_.keys.of(head_dim_ * TILE);
    T* decoded = rooms_.decoded.of(LANES * head_dim_);
    const T* rows[LANES];
    for (int64_t slot = 0; slot < TILE; slot += LANES) {
      for (int i = 0; i < LANES; i++)
        rows[i] = row_or_zeros(cache_.k, cache_.k_scale, slot + i, decoded + i * head_dim_);
      turn_columns(rows, keys, slot);
    }
    return keys;
  }

  // [head tile][TILE slots][TILE], or in pairs of slots.
  const Number* values() {
    Number* values = rooms_.values.of(head_tiles_ * TILE * TILE);
    T* decoded = rooms_.decoded.of(2 * head_dim_);
    for (int64_t slot = 0; slot < TILE; slot += 2) {
      const T* even = row_or_zeros(cache_.v, cache_.v_scale, slot, decoded);
      const T* odd = row_or_zeros(cache_.v, cache_.v_scale, slot + 1, decoded + head_dim_);
      for (int64_t tile = 0; tile < head_tiles_; tile++)
        put_values(even + tile * TILE, odd + tile * TILE, std::min<int64_t>(TILE, head_dim_ - tile * TILE),
                   values + tile * TILE * TILE + slot * TILE);
    }
    return values;
  }

 private:
  static constexpr int64_t FETCHED = 256;  // bytes of a block's rows

  const T* row_or_zeros(const char* data, const float* scales, int64_t slot, T* decoded) {
    if (slots_[slot] >= 0) return read_row(cache_, data, scales, slots_[slot], decoded);
    std::fill(decoded, decoded + head_dim_, T{});
    return decoded;
  }

  // A register's worth of a row, in units of 4 bytes: numbers, or pairs of bfloat16.
  static constexpr int64_t PER_UNIT = 4 / sizeof(Number);
  static Bits units_at(const T* row) {
    if constexpr (std::is_same_v<T, Number>) return load_as<Bits>(row);
    else return (Bits)load(row);
  }
  static uint32_t unit_at(const T* row) {
    uint32_t unit;
    if constexpr (std::is_same_v<T, Number>) {
      std::memcpy(&unit, row, 4);
    } else {
      float number = to_float(*row);
      std::memcpy(&unit, &number, 4);
    }
    return unit;
  }

  // LANES rows to LANES columns of the tile of keys.
  void turn_columns(const T* const* rows, Number* keys, int64_t slot) const {
    int64_t units = head_dim_ / PER_UNIT, unit = 0;
    uint32_t* to = reinterpret_cast<uint32_t*>(keys);
    for (; unit + LANES <= units; unit += LANES) {
      Bits block[LANES];
      for (int i = 0; i < LANES; i++) block[i] = units_at(rows[i] + unit * PER_UNIT);
      transpose(block);
      for (int i = 0; i < LANES; i++) std::memcpy(to + (unit + i) * TILE + slot, &block[i], sizeof(Bits));
    }
    for (; unit < units; unit++)
      for (int i = 0; i < LANES; i++) to[unit * TILE + slot + i] = unit_at(rows[i] + unit * PER_UNIT);
  }

  static void put_values(const T* even, const T* odd, int64_t width, float* to) {
    for (int64_t i = 0; i < TILE; i += LANES) {
      store(to + i, load_within(even, i, width));
      store(to + TILE + i, load_within(odd, i, width));
    }
  }

  static void put_values(const bf16* even, const bf16* odd, int64_t width, bf16* to) {
    for (int64_t i = 0; i < TILE; i += LANES, to += 2 * LANES) {
      int count = int(std::clamp<int64_t>(width - i, 0, LANES));
      Halves low = halves_of(even + i, count), high = halves_of(odd + i, count);
      Bits pairs = widen(low) | (widen(high) << 16);
      std::memcpy(to, &pairs, sizeof pairs);
    }
  }

  static Halves halves_of(const bf16* from, int count) {
    if (count == LANES) return load_as<Halves>(from);
    Halves some{};
    if (count) std::memcpy(&some, from, count * sizeof(bf16));
    return some;
  }

  const Cache& cache_;
  int64_t head_dim_, head_tiles_;
  // Where a tile's slots lie in the cache: elements from the layer's start; -1 where no row sees one. It may be another's
  // by now, or not a number.
  int64_t slots_[TILE], fetched_[TILE];
  // Kept from call to call, by thread: nothing is allocated in a step once they are large enough.
  struct Rooms {
    Room<Number> keys, values;
    Room<T> decoded;
  };
  static Rooms& rooms() {
    static thread_local Rooms kept;
    return kept;
  }
  Rooms& rooms_ = rooms();
};

}  // namespace nereid
