"""Run as a program: loads a model under a share of the memory, fills its whole pool, and tells the most it came to.

    python -m tests.engine.fill_pool DIRECTORY POOL_MIB

The share is what this process holds before the load, and POOL_MIB; it is for the host tier too. Prints JSON,
in bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nereid.memory.meters import CpuMeter
from nereid.request import Request, SamplingParams
from tests.engine.tiny import NAN_BYTE, SteppedEngine

_NUM_REQUESTS = 32
_HOST_BYTES = 8 << 20


def main(directory: Path, pool_mib: int) -> None:
    meter = CpuMeter()
    before = meter.read()
    allowed = before.held + (pool_mib << 20)
    share = {"gpu_memory_utilization": allowed / before.total, "host_cache_bytes": _HOST_BYTES}
    engine = SteppedEngine(directory, {"num_blocks": None, "max_num_seqs": _NUM_REQUESTS, **share})
    engine.runner.kv_cache.pages.fill_(NAN_BYTE)
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1, max_tokens=8, ignore_eos=True, logprobs=20)
    prompt_len = engine.model_config.max_position_embeddings - sampling.max_tokens
    told = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=20)
    prompts = [tuple((7 * i + j) % 257 for j in range(prompt_len)) for i in range(_NUM_REQUESTS)]
    engine.run(Request(i, prompt, told if i % 8 == 0 else sampling, 0.0) for i, prompt in enumerate(prompts))
    capacity = engine.runner.capacity
    pool = capacity.num_blocks * capacity.bytes_per_block
    print(json.dumps({"allowed": allowed, "pool": pool, "peak": meter.read().peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
