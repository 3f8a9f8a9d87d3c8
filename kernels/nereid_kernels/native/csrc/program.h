// What a program of operations is, and what differs from one step to the next. Plain structures that Python fills in
// (program.py has the same fields in the same order).
#pragma once

#include <algorithm>
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

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

constexpr int MOST_THREADS = 64;

// Threads that meet in a point, and share out work until they do. Waits without sleeping at first: the threads of a step
// are never far apart, unless the machine has other work.
class Barrier {
 public:
  int count = 1;

  void wait() {
    int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      for (int i = 0; i < count; i++) taken_[i].ends.store(0, std::memory_order_relaxed);
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

  // Units of a thread's share that nobody has taken since the threads last met: for itself those from the front up to a
  // multiple of `most`, for others the last one.
  Range take_of(int thread, Range share, int64_t most, bool from_front) {
    std::atomic<uint64_t>& ends = taken_[thread].ends;
    uint64_t before = ends.load(std::memory_order_relaxed);
    while (true) {
      int64_t front = int64_t(before >> 32), back = int64_t(before & 0xffffffffu);
      int64_t left = share.size() - front - back;
      if (left <= 0) return {0, 0};
      int64_t taken = from_front ? std::min(most - (share.begin + front) % most, left) : 1;
      uint64_t after = before + (from_front ? uint64_t(taken) << 32 : uint64_t(taken));
      if (!ends.compare_exchange_weak(before, after, std::memory_order_relaxed)) continue;
      if (from_front) return {share.begin + front, share.begin + front + taken};
      return {share.end - back - taken, share.end - back};
    }
  }

 private:
  // How many units at both ends of a thread's share are taken: at its front in the upper half, at its back in the lower.
  struct alignas(64) Taken {
    std::atomic<uint64_t> ends{0};
  };

  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> phase_{0};
  Taken taken_[MOST_THREADS];
};

// One thread's view of those that run a program together.
struct Team {
  int index, count;
  Barrier* barrier;

  // A thread's part of 0 .. n - 1.
  Range share_of(int thread, int64_t n) const { return {n * thread / count, n * (thread + 1) / count}; }
  // The next piece of work that nobody has taken since the threads last met.
  int64_t take() const { return barrier->take(); }
  void sync() const { barrier->wait(); }

  // Calls f(range) until all of 0 .. n - 1 are taken, once between two meetings: in ranges of at most `most` units this
  // thread's share from its front on, and then from the backs of others' what these have not come to, as the system may
  // have halted them.
  template <class F>
  void for_ranges(int64_t n, int64_t most, F f) const {
    for (int i = 0; i < count; i++) {
      int thread = (index + i) % count;
      Range range;
      while ((range = barrier->take_of(thread, share_of(thread, n), most, i == 0)).size()) f(range);
    }
  }
};

struct Operation {
  void (*run)(const void* arguments, const Step& step, const Team& team);
  const void* arguments;
};

}  // namespace nereid
