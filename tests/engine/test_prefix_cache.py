"""What the prefix cache finds, in pools that hold little more than one request and among hundreds of requests, is what
the model computes. A block that nobody holds is full of NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import transformers

from nereid.batch import CopyBlock, SchedulerOutput, StepResult, SwapIn, SwapOut
from nereid.request import Request, SamplingParams
from tests.engine.test_identity import BLOCK, check, make_requests
from tests.engine.test_kv_ways import SETTINGS, again, every_length
from tests.engine.tiny import VOCAB, SteppedEngine


def test_what_was_evicted_while_a_request_waited_is_computed_anew(
    model: transformers.LlamaForCausalLM, directory: Path
) -> None:
    first, other = make_requests([30, 100], max_tokens=9)
    settings = {**SETTINGS, "num_blocks": 1 + 14, "host_cache_bytes": 0, "max_num_seqs": 1}  # all of them for the other
    engine = SteppedEngine(directory, settings)
    engine.run([first])
    cold = engine.num_computed_tokens
    engine.add(other)
    (waiting,) = engine.add(*again([first]))
    assert engine.kv_cache.match(waiting.root, waiting).num_tokens == 29
    engine.run([])
    assert engine.num_computed_tokens == 2 * cold + 100 + 8
    check(model, [first, other, *again([first])], engine.tokens)


def mixed_prompts() -> tuple[list[Request], list[Request]]:
    """Two hundred times one prompt, and between them as many others, each second of which begins like it."""
    rng = random.Random(41)
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(2 * BLOCK + 5))
    same, others = [], []
    for index in range(200):
        own = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, BLOCK)))
        other = (*prompt[: rng.randrange(len(prompt))], *own) if index % 2 else own
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        same.append(Request(2 * index, prompt, sampling, arrival_time=0.0))
        others.append(Request(2 * index + 1, other, sampling, arrival_time=0.0))
    return same, others


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8_e4m3"])
def test_who_asks_what_others_ask_beside_many_gets_what_is_computed_without_cache(
    directory: Path, kv_dtype: str
) -> None:
    same, others = mixed_prompts()
    settings: dict[str, object] = {"block_size": BLOCK, "deterministic": True, "kv_dtype": kv_dtype}
    uncached = [replace(request, cache=False) for request in (same[0], *others)]
    cold = SteppedEngine(directory, {**settings, "num_blocks": 500}).run(uncached)
    engine = SteppedEngine(directory, {**settings, "num_blocks": 60, "host_cache_bytes": 100_000})
    mixed = [request for pair in zip(same, others, strict=True) for request in pair]
    for shift in (0, 1000):
        tokens = engine.run(again(mixed, shift))
        assert all(tokens[request.request_id + shift] == cold[same[0].request_id] for request in same)
        assert all(tokens[request.request_id + shift] == cold[request.request_id] for request in others)
    assert all(engine.ops[op] > 50 for op in (CopyBlock, SwapOut, SwapIn)), engine.ops


@dataclass
class CopyingEngine(SteppedEngine):
    """copied: blocks that were copied, or into which another was."""

    copied: set[int] = field(default_factory=set)

    def compute(self, plan: SchedulerOutput) -> StepResult:
        copies = [op for op in plan.kv_ops if isinstance(op, CopyBlock)]
        self.copied.update(block for op in copies for block in (op.source, op.target))
        return super().compute(plan)


@pytest.mark.parametrize("host_cache_bytes", [0, 60_000])
def test_blocks_are_copied_in_part_up_to_the_edges_of_a_pool(
    model: transformers.LlamaForCausalLM, directory: Path, host_cache_bytes: int
) -> None:
    """In pools that hold one to two of these requests, so that the copy may take the last block there is."""
    requests = [request for request in every_length() if request.request_id % BLOCK in (BLOCK - 1, 0, 1)]
    least = -(-(4 * BLOCK + BLOCK + 1) // BLOCK)
    first_copied = last_copied = 0
    for num_blocks in range(least, 2 * least):
        settings = {**SETTINGS, "num_blocks": 1 + num_blocks, "host_cache_bytes": host_cache_bytes}
        engine = CopyingEngine(directory, settings)
        engine.run(requests)
        engine.run(again(requests))
        check(model, [*requests, *again(requests)], engine.tokens)
        first_copied += 1 in engine.copied
        last_copied += num_blocks in engine.copied
    assert first_copied > 1 and last_copied > 1, "copies at the edges"
