"""What the scheduler and the KV cache's books cost a step, with many requests running; nothing is computed.

    .venv/bin/python tests/benchmarks/scheduling.py [--running 256] [--steps 2000]

Every request has a prompt of its own, of which the last block is filled by a different part, so that each step some of
the requests come to the edge of a block: they take another one and publish the last. Each step draws a token for every
request. Timed is `Scheduler.schedule` and `Scheduler.update`, in processor time of the thread, so that other work on
the machine does not count; and how long the executor's side then takes to follow is not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nereid.batch import SampledToken, SchedulerOutput, StepResult  # noqa: E402
from nereid.config import EngineConfig  # noqa: E402
from nereid.kv_cache.layout import BlockLayout  # noqa: E402
from nereid.kv_cache.manager import KVCacheManager  # noqa: E402
from nereid.request import Request, SamplingParams  # noqa: E402
from nereid.scheduler import Scheduler  # noqa: E402

_BLOCK = 16
_PROMPT = 500
_GOAL_MS = 0.5
_EOS = 2


def make_scheduler(num_running: int, num_steps: int) -> Scheduler:
    """With so many requests, for whose output there is room."""
    most = _PROMPT + _BLOCK + num_steps
    config = EngineConfig.from_mapping(
        {"model": "none", "block_size": _BLOCK, "max_num_seqs": num_running, "max_num_batched_tokens": 4096}
    )
    num_blocks = num_running * (most // _BLOCK + 2)
    scheduler = Scheduler(config, KVCacheManager(num_blocks, BlockLayout(_BLOCK)), most, (_EOS,))
    for request_id in range(1, num_running + 1):
        prompt = tuple(range(request_id * 1000, request_id * 1000 + _PROMPT + request_id % _BLOCK))
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        scheduler.add(Request(request_id, prompt, sampling, arrival_time=request_id * 1e-3))
    return scheduler


def result_of(plan: SchedulerOutput) -> StepResult:
    """Every sequence that samples draws a token of its own."""
    drawn = (SampledToken(row.request_id, 1000 + row.request_id) for row in plan.scheduled if row.samples)
    return StepResult(plan.step, tuple(drawn))


def step_times(num_running: int, num_steps: int) -> list[float]:
    """Seconds of each step once all run and all prompts are computed."""
    scheduler = make_scheduler(num_running, num_steps)
    times: list[float] = []
    gc.freeze()
    while len(times) < num_steps:
        start = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        result = result_of(plan)
        drawn = time.thread_time()
        scheduler.update(plan, result)
        spent = planned - start + time.thread_time() - drawn
        if len(result.sampled) == num_running == plan.num_scheduled_tokens:
            times.append(spent)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, help="requests that run at once")
    parser.add_argument("--steps", type=int, default=2000, help="steps that are timed")
    options = parser.parse_args()
    times = sorted(1e3 * seconds for seconds in step_times(options.running, options.steps))
    median = statistics.median(times)
    mean, slow = statistics.fmean(times), times[len(times) * 99 // 100]
    print("running,steps,median ms,mean ms,99 % ms")
    print(f"{options.running},{options.steps},{median:.3f},{mean:.3f},{slow:.3f}")
    if median > _GOAL_MS:
        print(f"MISSED: more than {_GOAL_MS} ms a step")
    return int(median > _GOAL_MS)


if __name__ == "__main__":
    sys.exit(main())
