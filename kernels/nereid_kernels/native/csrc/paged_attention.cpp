// A step's queries over each sequence's blocks, for any mix of query lengths: prefill, chunk and decode alike.
//
// A piece of work is one sequence, one KV head, some query tokens (those of all its query heads are rows of one
// product), and, where a context is long and a query short, one chunk of the keys. Keys and values are read from their
// blocks into tiles once for all rows of a piece; softmax goes on from tile to tile (Milakov and Gimelshein 2018, Dao
// 2023), chunk by chunk. A chunk's part of the result does not depend on who computes it nor on what else is in the
// step, and parts are added in the order of the keys: a row's bits are the same alone, batched, chunked and split.
#include <algorithm>

#include "cache.h"
#include "room.h"
#include "tile_product.h"

namespace nereid {

// query: [tokens, query_stride], heads * head_dim of each.  out: [tokens, heads * head_dim].  Both of dtype.
// window: a query sees the `window` latest keys, itself included; 0: all.  num_sink_tokens: with a window, it sees so
// many first ones besides.  soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: they stay.  sinks: [heads], a
// logit a head that takes part in the softmax and has no value, or null.  alibi_slopes: [heads], slope * distance is
// taken off a score, or null.
struct PagedAttentionArguments {
  Cache cache;
  const void* query;
  void* out;
  const float* sinks;
  const float* alibi_slopes;
  int64_t query_stride, heads, window, num_sink_tokens;
  float scale, soft_cap;
  Dtype dtype;
};

namespace {

constexpr int64_t CHUNK = 512;     // keys
constexpr int64_t MOST_ROWS = 192;  // of a piece
constexpr int64_t SHORT_QUERY = 16;
constexpr int64_t FETCHED = 256;  // bytes of a block's rows
constexpr float NOTHING = -INFINITY;

// What one chunk, or all chunks up to one, made of a piece's rows.  sums: [rows, head_dim], to be divided by `mass`.
struct Partial {
  float* top;
  float* mass;
  float* sums;
};

Partial partial_at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
int64_t partial_size(int64_t rows, int64_t head_dim) { return rows * (2 + head_dim); }

struct Piece {
  int64_t sequence, kv_head, first_query, num_queries, chunk;  // chunk: -1: all
};

// A step's pieces by number. Each thread walks along them.
class Pieces {
 public:
  Pieces(const PagedAttentionArguments& a, const Step& step)
      : step_(step), kv_heads_(a.cache.kv_heads), group_(a.heads / kv_heads_) {
    queries_ = std::max<int64_t>(1, MOST_ROWS / group_);
  }

  int64_t group() const { return group_; }
  int64_t query_len(int64_t s) const { return step_.cu_query_lens[s + 1] - step_.cu_query_lens[s]; }
  int64_t num_chunks(int64_t s) const { return (step_.seq_lens[s] + CHUNK - 1) / CHUNK; }
  bool is_split(int64_t s) const { return query_len(s) <= std::min(SHORT_QUERY, queries_) && num_chunks(s) > 1; }

  int64_t count(int64_t s) const {
    return kv_heads_ * (is_split(s) ? num_chunks(s) : (query_len(s) + queries_ - 1) / queries_);
  }

  // Floats of scratch before those of sequence s.
  int64_t scratch_before(int64_t s, int64_t head_dim) const {
    int64_t size = 0;
    for (int64_t i = 0; i < s; i++)
      if (is_split(i)) size += count(i) * partial_size(query_len(i) * group_, head_dim);
    return size;
  }

  // The piece of a number, which is not below those asked for before; false behind the last.
  bool find(int64_t number, Piece& piece) {
    while (sequence_ < step_.num_sequences && number >= before_ + count(sequence_)) before_ += count(sequence_++);
    if (sequence_ == step_.num_sequences) return false;
    int64_t parts = count(sequence_) / kv_heads_, part = (number - before_) % parts;
    piece = {sequence_, (number - before_) / parts, 0, query_len(sequence_), -1};
    if (is_split(sequence_)) {
      piece.chunk = part;
    } else {
      part = parts - 1 - part;  // the last queries see most, and come first
      piece.first_query = part * queries_;
      piece.num_queries = std::min(queries_, piece.num_queries - piece.first_query);
    }
    return true;
  }

 private:
  const Step& step_;
  int64_t kv_heads_, group_, queries_, sequence_ = 0, before_ = 0;
};

// One thread's work on one piece.
template <class T>
class Attention {
 public:
  Attention(const PagedAttentionArguments& a, const Step& step)
      : a_(a), step_(step), cache_(a.cache), group_(a.heads / a.cache.kv_heads), head_dim_(a.cache.head_dim) {
    head_tiles_ = (head_dim_ + TILE - 1) / TILE;
    padded_ = head_tiles_ * TILE;
  }

  // `parts`: where the chunk's part goes of a piece that has one; else the output is written.
  void run(const Piece& piece, float* parts) {
    begin(piece);
    Partial all = partial_at(rooms_.all.of(partial_size(rows_, head_dim_)), rows_);
    Partial one = partial_at(parts ? parts : rooms_.one.of(partial_size(rows_, head_dim_)), rows_);
    if (parts) {
      clear(one);
      add_chunk(piece.chunk, one);
      return;
    }
    begin_with_sinks(all);
    int64_t last = last_position();
    for (int64_t chunk = 0; chunk * CHUNK <= last; chunk++) {
      if (!is_seen(chunk * CHUNK, CHUNK)) continue;
      clear(one);
      add_chunk(chunk, one);
      merge(all, one);
    }
    write(all);
  }

  // Adds up the parts of a split piece's chunks, and writes the output.
  void join(const Piece& piece, float* parts, int64_t num_chunks) {
    begin(piece);
    Partial all = partial_at(rooms_.all.of(partial_size(rows_, head_dim_)), rows_);
    begin_with_sinks(all);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++)
      merge(all, partial_at(parts + chunk * partial_size(rows_, head_dim_), rows_));
    write(all);
  }

 private:
  void begin(const Piece& piece) {
    piece_ = piece;
    rows_ = piece.num_queries * group_;
    first_token_ = step_.cu_query_lens[piece.sequence] + piece.first_query;
    int64_t query_len = step_.cu_query_lens[piece.sequence + 1] - step_.cu_query_lens[piece.sequence];
    first_position_ = step_.seq_lens[piece.sequence] - query_len + piece.first_query;
    table_ = step_.groups[cache_.group].block_tables + piece.sequence * step_.groups[cache_.group].max_blocks;
  }

  int64_t last_position() const { return first_position_ + piece_.num_queries - 1; }

  // Whether any row sees one of `count` keys from `first` on.
  bool is_seen(int64_t first, int64_t count) const {
    if (first > last_position()) return false;
    return !a_.window || first + count > first_position_ - a_.window + 1 || first < a_.num_sink_tokens;
  }

  void clear(Partial p) const {
    std::fill(p.top, p.top + rows_, NOTHING);
    std::fill(p.mass, p.mass + rows_ * (1 + head_dim_), 0.0f);
  }

  int64_t head_of(int64_t row) const { return piece_.kv_head * group_ + row % group_; }

  void begin_with_sinks(Partial p) const {
    clear(p);
    if (!a_.sinks) return;
    for (int64_t r = 0; r < rows_; r++) p.top[r] = a_.sinks[head_of(r)], p.mass[r] = 1.0f;
  }

  void merge(Partial all, Partial one) const {
    for (int64_t r = 0; r < rows_; r++) {
      if (one.top[r] == NOTHING && one.mass[r] == 0.0f) continue;
      float top = std::max(all.top[r], one.top[r]);
      if (one.top[r] != one.top[r]) top = one.top[r];
      float before = exp_one(all.top[r], top), now = exp_one(one.top[r], top);
      all.top[r] = top;
      all.mass[r] = all.mass[r] * before + one.mass[r] * now;
      float *to = all.sums + r * head_dim_, *from = one.sums + r * head_dim_;
      for (int64_t i = 0; i < head_dim_; i++) to[i] = to[i] * before + from[i] * now;
    }
  }

  static float exp_one(float x, float top) { return x == top ? 1.0f : exp_of(splat(x - top))[0]; }

  void write(Partial all) const {
    T* out = static_cast<T*>(a_.out);
    for (int64_t r = 0; r < rows_; r++) {
      T* to = out + ((first_token_ + r / group_) * a_.heads + head_of(r)) * head_dim_;
      float factor = all.mass[r] == 0.0f ? 0.0f : 1.0f / all.mass[r];
      const float* from = all.sums + r * head_dim_;
      for (int64_t i = 0; i < head_dim_; i += LANES)
        store_within(to, i, head_dim_, load_within(from, i, head_dim_) * factor);
    }
  }

  void add_chunk(int64_t chunk, Partial part) {
    const T* query = gather_query();
    int64_t end = std::min((chunk + 1) * CHUNK, last_position() + 1);
    int64_t first = next_tile(chunk * CHUNK, end);
    if (first < end) fetch(first);
    while (first < end) {
      std::memcpy(slots_, fetched_, sizeof slots_);
      int64_t next = next_tile(first + TILE, end);
      if (next < end) fetch(next);
      add_tile(query, first, part);
      first = next;
    }
  }

  int64_t next_tile(int64_t first, int64_t end) const {
    while (first < end && !is_seen(first, TILE)) first += TILE;
    return first;
  }

  const T* gather_query() {
    T* to = rooms_.query.of(rows_ * head_dim_);
    const T* query = static_cast<const T*>(a_.query);
    for (int64_t r = 0; r < rows_; r++) {
      const T* from = query + (first_token_ + r / group_) * a_.query_stride;
      std::memcpy(to + r * head_dim_, from + head_of(r) * head_dim_, head_dim_ * sizeof(T));
    }
    return to;
  }

  void add_tile(const T* query, int64_t first, Partial part) {
    float* scores = rooms_.scores.of(rows_ * TILE);
    read_keys();
    for_groups_of_rows(rows_, [&](auto count, int64_t row) {
      constexpr int R = count;
      Sums sums[R] = {};
      add_product<R>(tile_of_keys_, query + row * head_dim_, head_dim_, head_dim_, sums);
      std::memcpy(scores + row * TILE, sums, sizeof sums);
    });
    T* weights = rooms_.weights.of(rows_ * TILE);
    for (int64_t r = 0; r < rows_; r++) soften(scores + r * TILE, first, r, part, weights + r * TILE);
    read_values();
    for (int64_t tile = 0; tile < head_tiles_; tile++) add_values(weights, tile, part);
  }

  // Scores of a row become weights, and what was summed before is scaled to the new maximum.
  void soften(float* scores, int64_t first, int64_t r, Partial part, T* weights) {
    int64_t position = first_position_ + r / group_;
    bool whole = first + TILE <= position + 1 && (!a_.window || first > position - a_.window);
    Floats most = splat(NOTHING);
    for (int v = 0; v < VECTORS; v++) {
      Floats x = load(scores + v * LANES) * a_.scale;
      if (a_.soft_cap) x = capped(x);
      if (a_.alibi_slopes) x = biased(x, float(position - first - v * LANES), a_.alibi_slopes[head_of(r)]);
      if (!whole) x = masked(x, first + v * LANES, position);
      store(scores + v * LANES, x);
      most = larger(most, x);
    }
    float before = part.top[r], top = std::max(before, max_of(most));
    float shift = top == NOTHING ? 0.0f : top, factor = before == top ? 1.0f : exp_of(splat(before - shift))[0];
    Floats mass{};
    for (int v = 0; v < VECTORS; v++) {
      Floats weight = exp_of(load(scores + v * LANES) - splat(shift));
      store(weights + v * LANES, weight);
      mass += weight;
    }
    part.top[r] = top;
    part.mass[r] = part.mass[r] * factor + sum_of(mass);
    if (factor != 1.0f)
      for (int64_t i = 0; i < head_dim_; i++) part.sums[r * head_dim_ + i] *= factor;
  }

  Floats capped(Floats x) const {
    for (int i = 0; i < LANES; i++) x[i] = a_.soft_cap * std::tanh(x[i] / a_.soft_cap);
    return x;
  }

  // distance: of the register's first key; each further one lies one position less behind the query.
  static Floats biased(Floats x, float distance, float slope) {
    for (int i = 0; i < LANES; i++) x[i] -= slope * (distance - float(i));
    return x;
  }

  Floats masked(Floats x, int64_t first, int64_t position) const {
    for (int i = 0; i < LANES; i++) {
      int64_t key = first + i;
      bool seen = key <= position && (!a_.window || key > position - a_.window || key < a_.num_sink_tokens);
      if (!seen) x[i] = NOTHING;
    }
    return x;
  }

  void add_values(const T* weights, int64_t tile, Partial part) {
    int64_t column = tile * TILE, width = std::min<int64_t>(TILE, head_dim_ - column);
    const T* values = tile_of_values_ + tile * TILE * TILE;
    for_groups_of_rows(rows_, [&](auto count, int64_t row) {
      float* to = part.sums + row * head_dim_ + column;
      constexpr int R = count;
      Sums sums[R];
      for (int r = 0; r < count; r++) copy_sums(reinterpret_cast<float*>(sums[r]), to + r * head_dim_, width);
      add_product<R>(values, weights + row * TILE, TILE, TILE, sums);
      for (int r = 0; r < count; r++) std::memcpy(to + r * head_dim_, sums[r], width * sizeof(float));
    });
  }

  static void copy_sums(float* to, const float* from, int64_t width) {
    std::memcpy(to, from, width * sizeof(float));
    std::fill(to + width, to + TILE, 0.0f);
  }

  // Find a tile's slots, and have the processor fetch the beginning of each block's rows: a block lies on pages of its
  // own, up to which it does not look ahead by itself.
  void fetch(int64_t first) {
    int64_t size = cache_.format == SAME ? int64_t(sizeof(T)) : 1;
    int64_t index = first / cache_.block_size, place = first % cache_.block_size;
    for (int64_t slot = 0; slot < TILE; index++, place = 0) {
      int64_t count = std::min(cache_.block_size - place, TILE - slot);
      int64_t at = is_seen(first + slot, count) ? element(cache_, table_[index], piece_.kv_head, place) : -1;
      for (int64_t byte = 0; at >= 0 && byte < std::min(FETCHED, count * head_dim_ * size); byte += 64) {
        __builtin_prefetch(cache_.k + at * size + byte);
        __builtin_prefetch(cache_.v + at * size + byte);
      }
      for (int64_t i = 0; i < count; i++)
        fetched_[slot + i] = is_seen(first + slot + i, 1) ? at + i * head_dim_ : -1;
      slot += count;
    }
  }

  const T* row_or_zeros(const char* data, const float* scales, int64_t slot, T* decoded) {
    if (slots_[slot] >= 0) return read_row(cache_, data, scales, slots_[slot], decoded);
    std::fill(decoded, decoded + head_dim_, T{});
    return decoded;
  }

  void read_keys() {
    T* keys = tile_of_keys_ = rooms_.keys.of(head_dim_ * TILE);
    T* decoded = rooms_.decoded.of(LANES * head_dim_);
    const T* rows[LANES];
    for (int64_t slot = 0; slot < TILE; slot += LANES) {
      for (int i = 0; i < LANES; i++)
        rows[i] = row_or_zeros(cache_.k, cache_.k_scale, slot + i, decoded + i * head_dim_);
      turn_columns(rows, keys, slot);
    }
  }

  // LANES rows to LANES columns of the tile of keys, in units of 4 bytes: a float32, or a pair of bfloat16.
  void turn_columns(const T* const* rows, T* keys, int64_t slot) const {
    constexpr int64_t PER_UNIT = 4 / sizeof(T);
    int64_t units = head_dim_ / PER_UNIT, unit = 0;
    uint32_t* to = reinterpret_cast<uint32_t*>(keys);
    for (; unit + LANES <= units; unit += LANES) {
      Bits block[LANES];
      for (int i = 0; i < LANES; i++) block[i] = load_as<Bits>(rows[i] + unit * PER_UNIT);
      transpose(block);
      for (int i = 0; i < LANES; i++) std::memcpy(to + (unit + i) * TILE + slot, &block[i], sizeof(Bits));
    }
    for (; unit < units; unit++)
      for (int i = 0; i < LANES; i++) std::memcpy(to + unit * TILE + slot + i, rows[i] + unit * PER_UNIT, 4);
  }

  void read_values() {
    T* values = tile_of_values_ = rooms_.values.of(padded_ * TILE);
    T* decoded = rooms_.decoded.of(2 * padded_);
    for (int64_t slot = 0; slot < TILE; slot += 2) {
      const T* even = row_or_zeros(cache_.v, cache_.v_scale, slot, decoded);
      const T* odd = row_or_zeros(cache_.v, cache_.v_scale, slot + 1, decoded + padded_);
      for (int64_t tile = 0; tile < head_tiles_; tile++)
        put_values(even + tile * TILE, odd + tile * TILE, std::min<int64_t>(TILE, head_dim_ - tile * TILE),
                   values + tile * TILE * TILE + slot * TILE);
    }
  }

  static void put_values(const float* even, const float* odd, int64_t width, float* to) {
    std::fill(to, to + 2 * TILE, 0.0f);
    std::memcpy(to, even, width * sizeof(float));
    std::memcpy(to + TILE, odd, width * sizeof(float));
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

  const PagedAttentionArguments& a_;
  const Step& step_;
  const Cache& cache_;
  int64_t group_, head_dim_, head_tiles_, padded_;
  Piece piece_{};
  int64_t rows_ = 0, first_token_ = 0, first_position_ = 0;
  const int32_t* table_ = nullptr;
  T *tile_of_keys_ = nullptr, *tile_of_values_ = nullptr;
  // Where a tile's slots lie in the cache: elements from the layer's start; -1 where no row of the piece sees one. It may
  // be another's by now, or not a number.
  int64_t slots_[TILE], fetched_[TILE];
  // Kept from call to call, by thread: nothing is allocated in a step once they are large enough.
  struct Rooms {
    Room<T> query, keys, values, weights, decoded;
    Room<float> scores, all, one;
  };
  static Rooms& rooms() {
    static thread_local Rooms kept;
    return kept;
  }
  Rooms& rooms_ = rooms();
};

template <class T>
void run(const PagedAttentionArguments& a, const Step& step, const Team& team) {
  Pieces pieces(a, step);
  Attention<T> attention(a, step);
  Piece piece;
  int64_t head_dim = a.cache.head_dim, kv_heads = a.cache.kv_heads;
  auto parts_of = [&](int64_t s, int64_t kv_head) {
    int64_t size = partial_size(pieces.query_len(s) * pieces.group(), head_dim);
    return step.scratch + pieces.scratch_before(s, head_dim) + kv_head * pieces.num_chunks(s) * size;
  };
  for (int64_t number = team.take(); pieces.find(number, piece); number = team.take()) {
    float* parts = nullptr;
    if (piece.chunk >= 0)
      parts = parts_of(piece.sequence, piece.kv_head) +
              piece.chunk * partial_size(piece.num_queries * pieces.group(), head_dim);
    attention.run(piece, parts);
  }
  bool any_split = false;
  for (int64_t s = 0; s < step.num_sequences; s++) any_split |= pieces.is_split(s);
  if (!any_split) return;
  team.sync();
  for (int64_t number = team.take(); number < step.num_sequences * kv_heads; number = team.take()) {
    int64_t s = number / kv_heads;
    if (!pieces.is_split(s)) continue;
    piece = {s, number % kv_heads, 0, pieces.query_len(s), -1};
    attention.join(piece, parts_of(s, piece.kv_head), pieces.num_chunks(s));
  }
}

}  // namespace
}  // namespace nereid

extern "C" void nereid_paged_attention(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const PagedAttentionArguments*>(arguments);
  a.dtype == FLOAT32 ? run<float>(a, step, team) : run<bf16>(a, step, team);
}

// Floats that `Step::scratch` has to have for a layer of such shapes.
extern "C" int64_t nereid_attention_scratch(const void* arguments, const nereid::Step& step) {
  using namespace nereid;
  const auto& a = *static_cast<const PagedAttentionArguments*>(arguments);
  return Pieces(a, step).scratch_before(step.num_sequences, a.cache.head_dim);
}
