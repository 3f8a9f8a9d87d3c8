// A step's queries over each sequence's blocks, for any mix of query lengths: prefill, chunk and decode alike.
//
// A piece of work is one sequence, one KV head, some query tokens (those of all its query heads are rows of one
// product), and, where a context is long and a query short, one chunk of the keys. Keys and values are read from their
// blocks into tiles once for all rows of a piece; softmax goes on from tile to tile (Milakov and Gimelshein 2018, Dao
// 2023), chunk by chunk. A chunk's part of the result does not depend on who computes it nor on what else is in the
// step, and parts are added in the order of the keys: a row's bits are the same alone, batched, chunked and split.
#include <cmath>

#include "attention_products.h"

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

constexpr float NOTHING = -INFINITY;

// One thread's work on one piece.
template <class Products>
class Attention {
  using T = typename Products::T;
  using Number = typename Products::Number;

 public:
  Attention(const PagedAttentionArguments& a, const Step& step)
      : a_(a), step_(step), group_(a.heads / a.cache.kv_heads), head_dim_(a.cache.head_dim), tiles_(a.cache),
        products_(a.cache) {}

  // `parts`: where the chunk's part goes of a piece that has one; else the output is written.  ahead: the piece that
  // this thread is likely to come to next, or null: what it reads first is fetched while the last of this one's keys are
  // multiplied.
  void run(const AttentionPiece& piece, float* parts, const AttentionPiece* ahead) {
    begin(piece);
    const Number* query = gather_query();
    Partial all = partial_at(rooms_.all.of(partial_size(rows_, head_dim_)), rows_);
    Partial one = partial_at(parts ? parts : rooms_.one.of(partial_size(rows_, head_dim_)), rows_);
    if (parts) {
      clear(one);
      add_chunk(query, piece.chunk, one, ahead);
      return;
    }
    begin_with_sinks(all);
    for (int64_t chunk = 0; chunk * CHUNK <= sight_.last; chunk++) {
      if (!sight_.any(chunk * CHUNK, CHUNK)) continue;
      clear(one);
      add_chunk(query, chunk, one, (chunk + 1) * CHUNK > sight_.last ? ahead : nullptr);
      merge(all, one);
    }
    write(all);
  }

  // Adds up the parts of a split piece's chunks, and writes the output.
  void join(const AttentionPiece& piece, float* parts, int64_t num_chunks) {
    begin(piece);
    Partial all = partial_at(rooms_.all.of(partial_size(rows_, head_dim_)), rows_);
    begin_with_sinks(all);
    for (int64_t chunk = 0; chunk < num_chunks; chunk++)
      merge(all, partial_at(parts + chunk * partial_size(rows_, head_dim_), rows_));
    write(all);
  }

 private:
  void begin(const AttentionPiece& piece) {
    piece_ = piece;
    rows_ = piece.num_queries * group_;
    first_token_ = step_.cu_query_lens[piece.sequence] + piece.first_query;
    sight_ = sight_of(piece);
  }

  Sight sight_of(const AttentionPiece& piece) const {
    int64_t query_len = step_.cu_query_lens[piece.sequence + 1] - step_.cu_query_lens[piece.sequence];
    int64_t first = step_.seq_lens[piece.sequence] - query_len + piece.first_query;
    return {first, first + piece.num_queries - 1, a_.window, a_.num_sink_tokens};
  }

  int64_t head_of(int64_t row) const { return piece_.kv_head * group_ + row % group_; }

  void clear(Partial p) const {
    std::fill(p.top, p.top + rows_, NOTHING);
    std::fill(p.mass, p.mass + rows_ * (1 + head_dim_), 0.0f);
  }

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

  // [rows][head_dim].
  const Number* gather_query() {
    Number* to = rooms_.query.of(rows_ * head_dim_);
    const T* query = static_cast<const T*>(a_.query);
    for (int64_t r = 0; r < rows_; r++) {
      const T* from = query + (first_token_ + r / group_) * a_.query_stride + head_of(r) * head_dim_;
      if constexpr (std::is_same_v<T, Number>) std::copy_n(from, head_dim_, to + r * head_dim_);
      else std::transform(from, from + head_dim_, to + r * head_dim_, [](T x) { return to_float(x); });
    }
    return to;
  }

  void add_chunk(const Number* query, int64_t chunk, Partial part, const AttentionPiece* ahead) {
    masses_ = std::fill_n(rooms_.masses.of(rows_ * LANES), rows_ * LANES, 0.0f) - rows_ * LANES;
    int64_t end = std::min((chunk + 1) * CHUNK, sight_.last + 1);
    int64_t first = next_tile(chunk * CHUNK, end, sight_);
    find(piece_, first, end, sight_);
    tiles_.fetch_all();
    while (first < end) {
      tiles_.turn_to_found();
      int64_t next = next_tile(first + TILE, end, sight_);
      next < end || !ahead ? find(piece_, next, end, sight_) : find_start(*ahead);
      add_tile(query, first, part);
      first = next;
    }
    for (int64_t r = 0; r < rows_; r++) part.mass[r] = sum_of(load(masses_ + r * LANES));
  }

  void find(const AttentionPiece& piece, int64_t first, int64_t end, const Sight& sight) {
    const Group& group = step_.groups[a_.cache.group];
    tiles_.find(group.block_tables + piece.sequence * group.max_blocks, piece.kv_head, first, end, sight);
  }

  void find_start(const AttentionPiece& piece) {
    Sight sight = sight_of(piece);
    find(piece, next_tile(std::max<int64_t>(piece.chunk, 0) * CHUNK, sight.last + 1, sight), sight.last + 1, sight);
  }

  static int64_t next_tile(int64_t first, int64_t end, const Sight& sight) {
    while (first < end && !sight.any(first, TILE)) first += TILE;
    return first;
  }

  // What was found last, the next tile, is fetched meanwhile: keys while those of this one are read, values while they
  // are multiplied with the first rows.
  void add_tile(const Number* query, int64_t first, Partial part) {
    float* scores = rooms_.scores.of(rows_ * TILE);
    products_.multiply_keys(tiles_, query, rows_, scores);
    Number* weights = rooms_.weights.of(rows_ * TILE);
    scale_to_new_tops(scores, first, part);
    soften(scores, part, weights);
    products_.add_values(tiles_, weights, rows_, part.sums);
  }

  // Scores get their bias and mask; what was summed before is scaled to each row's new maximum.
  void scale_to_new_tops(float* scores, int64_t first, Partial part) {
    float* factors = rooms_.factors.of(rows_ + LANES);
    for (int64_t r = 0; r < rows_; r++) {
      float top = new_top(scores + r * TILE, first, r, part.top[r]);
      factors[r] = part.top[r] - shift_of(top);
      part.top[r] = top;
    }
    for (int64_t r = 0; r < rows_; r += LANES) store(factors + r, exp_of(load(factors + r)));
    for (int64_t r = 0; r < rows_; r++) {
      if (factors[r] == 1.0f) continue;
      store(masses_ + r * LANES, load(masses_ + r * LANES) * factors[r]);
      for (int64_t i = 0; i < head_dim_; i++) part.sums[r * head_dim_ + i] *= factors[r];
    }
  }

  static float shift_of(float top) { return top == NOTHING ? 0.0f : top; }

  // Whether scores get their scale before they are softened, not then.
  bool scaled_before() const { return a_.soft_cap || a_.alibi_slopes || a_.scale <= 0.0f; }
  float scale() const { return scaled_before() ? 1.0f : a_.scale; }

  // The larger one of `top` and what a row's scores are when scaled.
  float new_top(float* scores, int64_t first, int64_t r, float top) const {
    int64_t position = sight_.first + r / group_;
    bool whole = sight_.all(first, TILE, position);
    if (scaled_before() || !whole) change(scores, first, r, whole);
    Floats most = load(scores);
    for (int v = 1; v < VECTORS; v++) most = larger(most, load(scores + v * LANES));
    most *= scale();
    return any_above(most, splat(top)) ? max_of(most) : top;
  }

  // whole: the row's query sees all of the tile.
  [[gnu::noinline]] void change(float* scores, int64_t first, int64_t r, bool whole) const {
    int64_t position = sight_.first + r / group_;
    for (int v = 0; v < VECTORS; v++) {
      Floats x = load(scores + v * LANES);
      if (scaled_before()) x *= a_.scale;
      if (a_.soft_cap) x = capped(x);
      if (a_.alibi_slopes) x = biased(x, float(position - first - v * LANES), a_.alibi_slopes[head_of(r)]);
      if (!whole) x = sight_.masked(x, first + v * LANES, position, NOTHING);
      store(scores + v * LANES, x);
    }
  }

  // Scores become weights.
  void soften(const float* scores, Partial part, Number* weights) const {
    constexpr int DEGREE = sizeof(Number) == 2 ? 4 : 6;
    float scale = this->scale() * LOG2_E;
    for (int64_t r = 0; r < rows_; r++, scores += TILE, weights += TILE) {
      Floats shift = splat(shift_of(part.top[r]) * LOG2_E), mass = load(masses_ + r * LANES);
      for (int v = 0; v < VECTORS; v++) {
        Floats weight = exp2_of<DEGREE>(load(scores + v * LANES) * scale - shift);
        store(weights + v * LANES, weight);
        mass += weight;
      }
      store(masses_ + r * LANES, mass);
    }
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

  const PagedAttentionArguments& a_;
  const Step& step_;
  int64_t group_, head_dim_;
  KVTiles<T, Number> tiles_;
  Products products_;
  AttentionPiece piece_{};
  Sight sight_{};
  int64_t rows_ = 0, first_token_ = 0;
  float* masses_ = nullptr;  // of a chunk: [rows][LANES], which are added up at its end
  // Kept from call to call, by thread: nothing is allocated in a step once they are large enough.
  struct Rooms {
    Room<Number> query, weights;
    Room<float> scores, factors, masses, all, one;
  };
  static Rooms& rooms() {
    static thread_local Rooms kept;
    return kept;
  }
  Rooms& rooms_ = rooms();
};

template <class Products>
void run(const PagedAttentionArguments& a, const Step& step, const Team& team) {
  Pieces pieces(a.heads, a.cache.kv_heads, step);
  Attention<Products> attention(a, step);
  Pieces pieces_ahead = pieces;
  AttentionPiece piece, ahead;
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
    bool more = pieces_ahead.find(number + team.count, ahead);
    attention.run(piece, parts, more ? &ahead : nullptr);
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
  if (a.dtype == FLOAT32) return run<VectorProducts<float>>(a, step, team);
#if defined(__AMX_BF16__)
  if (a.cache.head_dim % amx::INPUTS == 0) return run<amx::Products>(a, step, team);
#endif
  run<VectorProducts<bf16>>(a, step, team);
}

// Floats that `Step::scratch` has to have for a layer of such shapes.
extern "C" int64_t nereid_attention_scratch(const void* arguments, const nereid::Step& step) {
  using namespace nereid;
  const auto& a = *static_cast<const PagedAttentionArguments*>(arguments);
  return Pieces(a.heads, a.cache.kv_heads, step).scratch_before(step.num_sequences, a.cache.head_dim);
}
