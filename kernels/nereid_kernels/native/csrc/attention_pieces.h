// How a step's attention is cut into pieces of work, which threads take one by one.
//
// A piece is one sequence, one KV head, some query tokens, and, where a context is long and a query short, one chunk of
// the keys. How a sequence is cut depends on its own lengths alone.
#pragma once

#include <algorithm>

#include "program.h"

namespace nereid {

constexpr int64_t CHUNK = 512;     // keys
constexpr int64_t MOST_ROWS = 192;  // of a piece
constexpr int64_t SHORT_QUERY = 16;

// What one chunk, or all chunks up to one, made of a piece's rows.  sums: [rows, head_dim], to be divided by `mass`.
struct Partial {
  float* top;
  float* mass;
  float* sums;
};

Partial partial_at(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
int64_t partial_size(int64_t rows, int64_t head_dim) { return rows * (2 + head_dim); }

struct AttentionPiece {
  int64_t sequence, kv_head, first_query, num_queries, chunk;  // chunk: -1: all
};

// Which keys the queries at positions `first` to `last` see.  window: each the latest so many, itself included; 0: all
// before it.  num_sinks: with a window, so many first ones besides.
struct Sight {
  int64_t first, last, window, num_sinks;

  // Whether any of the queries sees any of `count` keys from `key` on.
  bool any(int64_t key, int64_t count) const {
    if (key > last) return false;
    return !window || key + count > first - window + 1 || key < num_sinks;
  }

  // Whether each of them is seen by some query.
  bool each(int64_t key, int64_t count) const {
    if (key + count > last + 1) return false;
    return !window || key > first - window || key + count <= num_sinks;
  }

  // Whether the query at `position` sees all of them.
  bool all(int64_t key, int64_t count, int64_t position) const {
    return key + count <= position + 1 && (!window || key > position - window);
  }

  // Scores of LANES keys from `key` on, `nothing` in place of those that the query at `position` does not see.
  Floats masked(Floats scores, int64_t key, int64_t position, float nothing) const {
    Ints keys;
    for (int i = 0; i < LANES; i++) keys[i] = int32_t(key) + i;
    Ints seen = keys <= int32_t(position);
    if (window) seen &= (keys > int32_t(position - window)) | (keys < int32_t(num_sinks));
    return seen ? scores : splat(nothing);
  }
};

// A step's pieces by number. Each thread walks along them.
class Pieces {
 public:
  Pieces(int64_t heads, int64_t kv_heads, const Step& step)
      : step_(step), kv_heads_(kv_heads), group_(heads / kv_heads) {
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
  bool find(int64_t number, AttentionPiece& piece) {
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

}  // namespace nereid
