// Runs a program: all threads carry out one operation after another, each its share, and meet after each.
#include "program.h"

#include <omp.h>

using namespace nereid;

extern "C" void nereid_run(const Operation* operations, int64_t count, const Step* step, int threads) {
  Barrier barrier;
#pragma omp parallel num_threads(std::min(threads, MOST_THREADS))
  {
#pragma omp single
    barrier.count = omp_get_num_threads();  // may be fewer than asked for
    Team team{omp_get_thread_num(), barrier.count, &barrier};
    for (int64_t i = 0; i < count; i++) {
      operations[i].run(operations[i].arguments, *step, team);
      team.sync();
    }
  }
}

// Columns of a packed weight's tile.
extern "C" int nereid_tile() { return TILE; }
