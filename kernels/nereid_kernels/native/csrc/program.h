// What a program of operations is, and what differs from one step to the next. Plain structures that Python fills in
// (program.py has the same fields in the same order).
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "simd.h"

namespace nereid {

// What a buffer or a weight holds.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

// Over which rows an operation runs: the step's tokens, or those whose hidden states are wanted.
enum Rows : int32_t { TOKENS = 0, HIDDEN_ROWS = 1 };

// Where one KV cache group's tokens lie.  slot_mapping: [tokens].  block_tables: [sequences, max_blocks].
struct Group {
  const int64_t* slot_mapping;
  const int32_t* block_tables;
  int64_t max_blocks;
};

// token_ids, positions: [tokens].  hidden_rows: [num_hidden_rows].  cu_query_lens: [sequences + 1].  seq_lens:
// [sequences]. scratch: room for what attention over long contexts leaves between two of its parts.
struct Step {
  int64_t num_tokens, num_hidden_rows, num_sequences;
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* hidden_rows;
  const int32_t* cu_query_lens;
  const int32_t* seq_lens;
  const Group* groups;
  float* scratch;

  int64_t num_rows(Rows rows) const { return rows == TOKENS ? num_tokens : num_hidden_rows; }
};

// Threads that meet in a point, and take numbers until they do. Waits without sleeping at first: the threads of a step
// are never far apart, unless the machine has other work.
class Barrier {
 public:
  int count = 1;

  void wait() {
    int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins > 4096) std::this_thread::yield();
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }

  // 0, 1, 2 ... since the threads last met, each to one of them.
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> phase_{0};
};

struct Range {
  int64_t begin, end;
};

// One thread's view of those that run a program together.
struct Team {
  int index, count;
  Barrier* barrier;

  // This thread's part of 0 .. n - 1.
  Range share(int64_t n) const { return {n * index / count, n * (index + 1) / count}; }
  // The next piece of work that nobody has taken since the threads last met.
  int64_t take() const { return barrier->take(); }
  void sync() const { barrier->wait(); }
};

struct Operation {
  void (*run)(const void* arguments, const Step& step, const Team& team);
  const void* arguments;
};

}  // namespace nereid
