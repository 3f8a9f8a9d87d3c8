"""What is told of a request whose sequences are preempted after any step: all that is told without, once, and no more.

Under `deterministic`, so that everything is equal to the bit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from nereid.batch import CopyBlock, KVOp, SchedulerOutput, StepResult, SwapIn, SwapOut
from nereid.config import EngineConfig
from nereid.engine_core import EngineCore
from nereid.executor import LocalExecutor
from nereid.guided.compiler import GuideCompiler
from nereid.model_config import ModelConfig
from nereid.model_runner import ModelRunner
from nereid.request import Branching, Guide, GuideKind, Request, RequestOutput, SamplingParams
from nereid.tokenization.tokenizer import Tokenizer
from tests.server.repository import write_tiny_model

PLAIN = {"max_tokens": 9, "ignore_eos": True}
GUIDE = Guide(GuideKind.REGEX, "[a-c]{2}-[0-9]{4}")
ONE, THREE = Branching(), Branching(3, 3)
REQUESTS: tuple[tuple[Branching, int, dict[str, object]], ...] = (
    (ONE, 20, {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 3}),
    (ONE, 16, {"frequency_penalty": 1.5, "presence_penalty": 0.5, "bad_words": ((5,), (7, 8))}),
    (ONE, 23, {"prompt_logprobs": 2, "logprobs": 0}),
    (ONE, 7, {"stop": ("e", "a"), "min_tokens": 4, "include_stop": True}),
    (ONE, 9, {"stop": ("never there",), "stop_token_ids": (45, 46), "logit_bias": ((45, 100.0),), "min_tokens": 3}),
    (ONE, 12, {"guide": GUIDE, "max_tokens": 20}),
    (THREE, 17, {"repetition_penalty": 1.2, "logprobs": 1, "prompt_logprobs": 0}),
    (Branching(2, 4), 11, {"temperature": 1.3}),
    (Branching(2, 2, 3), 19, {}),
)
"""Branching, length of the prompt, and how tokens are drawn."""


class Executor(LocalExecutor):
    """Counts the operations on the memory."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(lambda: runner)
        self.ops: Counter[type[KVOp]] = Counter()

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        self.ops.update(map(type, plan.kv_ops))
        return super().submit(plan)


class Bench:
    """The steps of an engine. Every run is another tenant's, which finds nothing in the prefix cache."""

    def __init__(self, directory: Path, **settings: object) -> None:
        fixed = {"model": str(directory), "dtype": "float32", "deterministic": True, "block_size": 4}
        sizes = {"num_blocks": 300, "max_num_batched_tokens": 40, "max_num_seqs": 16}
        config = EngineConfig.from_mapping({**fixed, **sizes, **settings})
        model, tokenizer = ModelConfig.load(directory), Tokenizer(directory)
        self.executor = Executor(ModelRunner(directory, config, model))
        compiler = GuideCompiler(tokenizer, model.vocab_size, model.eos_token_ids)
        compiler.compile(GUIDE)
        self._core = EngineCore(config, self.executor.start(), model, tokenizer, self.executor, compiler)
        self._next_id = 0

    def run(self, preempts_at: int | None = None) -> tuple[list[list[RequestOutput]], int]:
        """What is told of each of REQUESTS, and in how many steps. preempts_at: the step before which all that run are
        preempted."""
        core, first = self._core, self._next_id
        for index, (branching, prompt_len, sampling) in enumerate(REQUESTS):
            params = SamplingParams(**{**PLAIN, "seed": index, **sampling})  # type: ignore[arg-type]
            rng = random.Random(index)
            prompt = tuple(rng.randrange(100, 49_000) for _ in range(prompt_len))
            request = Request(first + index, prompt, params, 0.0, cache_salt=str(first), branching=branching)
            assert not list(core.accept(request))
        self._next_id += len(REQUESTS)
        told: list[list[RequestOutput]] = [[] for _ in REQUESTS]
        step = 0
        while core.has_work:
            if step == preempts_at:
                while core.stats.num_running:
                    core._scheduler.preempt_worst()
            for output in core.step():
                told[output.request_id - first].append(output)
            core.check_integrity()
            step += 1
        return told, step


def comparable(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """By sequence, which may take turns otherwise; without ids, times, and what a preemption costs."""
    return [
        replace(output, request_id=0, final=False, stats=None)
        for output in sorted(outputs, key=lambda output: output.sequence_index)
    ]


def usage(outputs: list[RequestOutput]) -> tuple[int, int, int]:
    """The counts of an answer, which its last output tells, and no other."""
    *others, last = outputs
    assert last.final and last.stats is not None
    assert not any(output.final or output.stats for output in others)
    return last.stats.num_prompt_tokens, last.stats.num_output_tokens, last.stats.num_cached_tokens


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, smollm2_directory: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny-smollm2")
    write_tiny_model(directory, smollm2_directory)
    return directory


@pytest.fixture(params=[0, 1 << 20], ids=["recomputed", "swapped"])
def bench(request: pytest.FixtureRequest, weights: Path) -> Iterator[Bench]:
    bench = Bench(weights, host_cache_bytes=request.param)
    yield bench
    swaps = bench.executor.ops[SwapIn], bench.executor.ops[SwapOut]
    bench.executor.shutdown()
    assert all(swaps) if request.param else not any(swaps)


def test_what_is_told_does_not_depend_on_preemptions(bench: Bench) -> None:
    expected, num_steps = bench.run()
    for step in range(1, num_steps):
        told, _ = bench.run(step)
        for index, (outputs, plain) in enumerate(zip(told, expected, strict=True)):
            assert comparable(outputs) == comparable(plain), f"request {index}, preempted before step {step}"
            assert usage(outputs) == usage(plain)
    assert bench.executor.ops[CopyBlock] > 0
