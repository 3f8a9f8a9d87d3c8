// Keys and values of TILE slots, read from their blocks into tiles that products are made of.
#pragma once

#include "attention_pieces.h"
#include "cache.h"
#include "room.h"
#include "tile_product.h"

namespace nereid {

// Has a tile's rows fetched, some at each step of a product. A block lies on pages of its own, up to which the
// processor does not look ahead by itself; and all at once would wait for the memory. Into the second cache: with the
// tile that is multiplied, they are more than the nearest one holds.
struct FetchRows {
  static constexpr int64_t UNSEEN = -1;

  const char* data = nullptr;
  const int64_t* slots = nullptr;  // elements from data on
  int64_t size = 0, row_bytes = 0, per_step = 0;

  // NOTE: of a slot that nobody sees, what lies before `data` is asked for: that costs less than to ask which are.
  void line(int64_t slot, int64_t byte) const {
    if (byte < row_bytes) fetch_line_to_second(data + slots[slot] * size + byte);
  }

  void operator()(int64_t step) const {
    for (int64_t slot = step * per_step; slot < std::min<int64_t>((step + 1) * per_step, TILE); slot++)
      for (int64_t byte = 0; byte < row_bytes; byte += 64) line(slot, byte);
  }
};

// For one thread.  T: what the model computes in.  Number: what that is multiplied as, of which tiles are. They keep what
// they hold until the next ones are read.
template <class T, class Number>
class KVTiles {
 public:
  explicit KVTiles(const Cache& cache)
      : cache_(cache), head_dim_(cache.head_dim), head_tiles_((head_dim_ + TILE - 1) / TILE) {}

  // Tiles of values: the head's width, filled up.
  int64_t head_tiles() const { return head_tiles_; }

  // Find the slots of TILE keys from `first` on; those of no key where that is not below `end`.
  void find(const int32_t* table, int64_t kv_head, int64_t first, int64_t end, const Sight& sight) {
    if (first >= end) return void(std::fill_n(found_, TILE, UNSEEN));
    int64_t index = first / cache_.block_size, place = first % cache_.block_size;
    for (int64_t slot = 0; slot < TILE; index++, place = 0) {
      int64_t count = std::min(cache_.block_size - place, TILE - slot);
      int64_t at = sight.any(first + slot, count) ? element(cache_, table[index], kv_head, place) : UNSEEN;
      for (int64_t i = 0; i < count; i++) found_[slot + i] = at + i * head_dim_;
      for (int64_t i = sight.each(first + slot, count) ? count : 0; i < count; i++)
        if (!sight.any(first + slot + i, 1)) found_[slot + i] = UNSEEN;
      slot += count;
    }
  }

  // Have what was found last fetched: at once, or its values in so many steps. Its keys are while `keys` reads others.
  void fetch_all() const {
    fetch(cache_.k, 1)(0);
    fetch(cache_.v, 1)(0);
  }
  FetchRows fetch_values(int64_t steps) const { return fetch(cache_.v, steps); }

  // From here on `keys` and `values` read what was found last.
  void turn_to_found() { std::memcpy(slots_, found_, sizeof slots_); }

  // [head_dim][TILE], or in pairs.
  const Number* keys() {
    FetchRows next = fetch(cache_.k, TILE);
    Number* keys = rooms_.keys.of(head_dim_ * TILE);
    const T* const* rows = find_rows(cache_.k, cache_.k_scale);
    for (int64_t slot = 0; slot < TILE; slot += LANES) turn_columns(rows + slot, keys, slot, next);
    return keys;
  }

  // TILE rows of head_dim values.
  const T* const* value_rows() { return find_rows(cache_.v, cache_.v_scale); }

  // [head tile][TILE slots][TILE], or in pairs of slots.
  const Number* values() {
    Number* values = rooms_.values.of(head_tiles_ * TILE * TILE);
    const T* const* rows = value_rows();
    for (int64_t slot = 0; slot < TILE; slot += 2)
      for (int64_t tile = 0; tile < head_tiles_; tile++)
        put_values(rows[slot] + tile * TILE, rows[slot + 1] + tile * TILE,
                   std::min<int64_t>(TILE, head_dim_ - tile * TILE), values + tile * TILE * TILE + slot * TILE);
    return values;
  }

 private:
  static constexpr int64_t UNSEEN = FetchRows::UNSEEN;

  FetchRows fetch(const char* data, int64_t steps) const {
    int64_t size = cache_.format == SAME ? int64_t(sizeof(T)) : 1;
    return {data, found_, size, head_dim_ * size, (TILE + steps - 1) / steps};
  }

  // Where each slot's row is: in the cache, or in memory of its own, as numbers; zeros where no query sees it.
  const T* const* find_rows(const char* data, const float* scales) {
    T* own = rooms_.own.of((TILE + 1) * head_dim_);
    const T* zeros = std::fill_n(own + TILE * head_dim_, head_dim_, T{}) - head_dim_;
    const T* cached = reinterpret_cast<const T*>(data);
    if (cache_.format == SAME) {
      for (int64_t slot = 0; slot < TILE; slot++) rows_[slot] = slots_[slot] == UNSEEN ? zeros : cached + slots_[slot];
      return rows_;
    }
    for (int64_t slot = 0; slot < TILE; slot++) {
      T* to = own + slot * head_dim_;
      int64_t at = slots_[slot];
      if (at != UNSEEN) dequantise(cache_, data + at, scales ? scales[scale_of(cache_, at)] : 1.0f, to);
      rows_[slot] = at == UNSEEN ? zeros : to;
    }
    return rows_;
  }

  // LANES rows to LANES columns of the tile of keys, in units of 4 bytes: a number of float32, or two of bfloat16.
  void turn_columns(const T* const* rows, Number* keys, int64_t slot, const FetchRows& next) const {
    constexpr int64_t PER_UNIT = 4 / sizeof(T);
    int64_t units = head_dim_ / PER_UNIT, unit = 0;
    for (; unit + LANES <= units; unit += LANES) {
      Bits block[LANES];
      for (int i = 0; i < LANES; i++) {
        next.line(slot + i, 4 * unit);
        block[i] = load_as<Bits>(rows[i] + unit * PER_UNIT);
      }
      transpose(block);
      for (int i = 0; i < LANES; i++) put_unit(block[i], keys, unit + i, slot);
    }
    for (; unit < units; unit++) {
      Bits column;
      for (int i = 0; i < LANES; i++)
        std::memcpy(reinterpret_cast<char*>(&column) + 4 * i, rows[i] + unit * PER_UNIT, 4);
      put_unit(column, keys, unit, slot);
    }
  }

  static void put_unit(Bits column, Number* keys, int64_t unit, int64_t slot) {
    if constexpr (std::is_same_v<T, Number>) {
      std::memcpy(reinterpret_cast<char*>(keys) + 4 * (unit * TILE + slot), &column, sizeof column);
    } else {  // bfloat16, widened
      store(keys + 2 * unit * TILE + slot, (Floats)(column << 16));
      store(keys + (2 * unit + 1) * TILE + slot, (Floats)(column & 0xffff0000u));
    }
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
  // Where a tile's slots lie in the cache: elements from the layer's start; UNSEEN where no query sees one. It may be
  // another's by now, or not a number.
  int64_t slots_[TILE], found_[TILE];
  const T* rows_[TILE];
  // Kept from call to call, by thread: nothing is allocated in a step once they are large enough.
  struct Rooms {
    Room<Number> keys, values;
    Room<T> own;
  };
  static Rooms& rooms() {
    static thread_local Rooms kept;
    return kept;
  }
  Rooms& rooms_ = rooms();
};

}  // namespace nereid
