"""Guided requests in the engine: a random model with SmolLM2's tokenizer, and SmolLM2 itself in the slow test."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from nereid.build import build_engine
from nereid.config import EngineConfig
from nereid.errors import ErrorCode
from nereid.request import FinishReason, Guide, GuideKind, Request, RequestOutput, SamplingParams
from nereid.tokenization.tokenizer import Tokenizer
from tests.engine.test_engine import Outputs
from tests.guides import SCHEMAS, assert_valid, schema_guide
from tests.server.repository import write_tiny_model

OUTGROWS = Guide(GuideKind.GRAMMAR, 'start: "a" start')  # after the first "a" it asks for all that can ever follow
LETTERS = Guide(GuideKind.REGEX, "[a-c]{3}")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, smollm2_directory: Path) -> Path:
    directory = tmp_path_factory.mktemp("tiny-smollm2")
    write_tiny_model(directory, smollm2_directory)
    return directory


class Bench:
    """An engine; `run` gives the last output of each request, with all its text and tokens."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self._outputs = Outputs()
        fixed = {"model": str(directory), "num_threads": 1, "dtype": "float32"}
        config = EngineConfig.from_mapping({"num_blocks": 400, **fixed, **settings})
        built = build_engine(config, directory, self._outputs.emit)
        self.engine, self._compiler = built.engine, built.compiler
        self._next_id = 0

    def run(self, *params: SamplingParams, prompt_len: int = 9) -> list[RequestOutput]:
        for guide in filter(None, (sampling.guide for sampling in params)):
            self._compiler.compile(guide)
        return self.run_unchecked(*params, prompt_len=prompt_len)

    def run_unchecked(self, *params: SamplingParams, prompt_len: int = 9) -> list[RequestOutput]:
        """Without making the guides ready, as the server's side does."""
        ids = range(self._next_id, self._next_id + len(params))
        self._next_id += len(params)
        for request_id, sampling in zip(ids, params, strict=True):
            prompt = tuple(range(100, 100 + prompt_len))
            self.engine.submit(Request(request_id, prompt, sampling, time.monotonic()))
        whole = {request_id: RequestOutput(request_id) for request_id in ids}
        while not set(ids) <= set(self._outputs.ends):
            output = self._outputs.next()
            whole[output.request_id] = whole[output.request_id].merge(output)
        return [whole[request_id] for request_id in ids]


@pytest.fixture(scope="module")
def bench(weights: Path) -> Iterator[Bench]:
    bench = Bench(weights)
    yield bench
    bench.engine.shutdown(1.0)


def guided(guide: Guide, seed: int = 1, **more: object) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 300, "guide": guide, **more})  # type: ignore[arg-type]


def mixed() -> list[SamplingParams]:
    """Guided and unguided requests, in turn."""
    guides = [schema_guide("person"), LETTERS, schema_guide("numbers"), schema_guide("unicode"), None, None, None, None]
    return [SamplingParams(seed=seed, max_tokens=60, guide=guides[seed * 5 % 8]) for seed in range(8)]


def test_guided_rows_leave_the_others_as_they_are_alone(bench: Bench) -> None:
    together = bench.run(*mixed())
    alone = [bench.run(params)[0] for params in mixed()]
    for params, batched, single in zip(mixed(), together, alone, strict=True):
        assert batched.token_ids == single.token_ids and batched.finish_reason is single.finish_reason
        if params.guide == LETTERS:
            assert re.fullmatch("[a-c]{3}", batched.text)


@pytest.mark.parametrize("name", ["flat", "enum", "unicode", "recursive", "pattern"])
def test_what_stops_is_an_instance(bench: Bench, name: str) -> None:
    outputs = bench.run(*(guided(schema_guide(name), seed) for seed in range(4)))
    stopped = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert len(stopped) >= 2
    for output in stopped:
        assert_valid(output.text, SCHEMAS[name])


def test_a_complete_output_ends_at_its_last_token(bench: Bench, smollm2_tokenizer: Tokenizer) -> None:
    """No step for an end-of-sequence token; neither min_tokens nor ignore_eos nor a length that is reached matters."""
    (output,) = bench.run(guided(LETTERS, ignore_eos=True, min_tokens=50))
    assert re.fullmatch("[a-c]{3}", output.text) and output.finish_reason is FinishReason.STOP
    assert smollm2_tokenizer.decode(output.token_ids) == output.text and output.stop_reason is None
    (exact,) = bench.run(guided(LETTERS, max_tokens=len(output.token_ids)))
    assert (exact.text, exact.finish_reason) == (output.text, FinishReason.STOP)


def test_an_output_that_may_end_or_go_on_ends_by_its_own_token(bench: Bench) -> None:
    outputs = bench.run(*(guided(Guide(GuideKind.REGEX, "a{1,40}"), seed) for seed in range(6)))
    for output in outputs:
        assert re.fullmatch("a{1,40}", output.text) and output.finish_reason is FinishReason.STOP


def test_an_output_cut_by_its_length_is_a_beginning(bench: Bench) -> None:
    (whole,) = bench.run(guided(schema_guide("person"), 3))
    (cut,) = bench.run(guided(schema_guide("person"), 3, max_tokens=4))
    assert cut.finish_reason is FinishReason.LENGTH and cut.token_ids == whole.token_ids[:4]
    assert whole.text.startswith(cut.text)


def test_a_guide_goes_on_through_preemption_and_chunks(weights: Path, bench: Bench) -> None:
    params = [guided(schema_guide("array_of_objects"), seed, max_tokens=80) for seed in range(4)]
    small = Bench(weights, num_blocks=40, block_size=4, max_num_batched_tokens=16)
    together = small.run(*params, prompt_len=40)
    preemptions = small.engine.stats.num_preemptions
    small.engine.shutdown(1.0)
    assert preemptions > 0
    for params_alone, output in zip(params, together, strict=True):
        assert bench.run(params_alone, prompt_len=40)[0].token_ids == output.token_ids


def test_a_guide_that_cannot_go_on_ends_its_request_alone(bench: Bench) -> None:
    params = [guided(OUTGROWS, max_tokens=4000), *mixed()]
    failed, *others = bench.run(*params)
    assert failed.failure is not None and failed.failure.code is ErrorCode.INVALID_ARGUMENT
    assert failed.failure.message.startswith("the guide cannot go on: ")
    assert [output.token_ids for output in others] == [output.token_ids for output in bench.run(*mixed())]


def test_the_loop_compiles_no_guide(bench: Bench) -> None:
    refused, other = bench.run_unchecked(guided(Guide(GuideKind.REGEX, "never compiled")), SamplingParams(max_tokens=3))
    assert refused.failure is not None and refused.failure.code is ErrorCode.UNAVAILABLE
    assert "guide was made ready too long ago" in refused.failure.message and other.failure is None
    assert bench.engine.alive and bench.engine.stats.kv_cache_usage == 0.0


PROMPT = "<|im_start|>user\nWrite a short JSON example for: {}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_generations(smollm2_directory: Path, smollm2_tokenizer: Tokenizer) -> None:
    """Under twenty bounded schemas, on SmolLM2: what stops is valid; what does not is rare, and a valid beginning."""
    ends: dict[int, RequestOutput] = {}
    done = threading.Event()

    def collect(outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            ends[output.request_id] = ends.get(output.request_id, RequestOutput(output.request_id)).merge(output)
        if sum(output.final for output in ends.values()) == len(names):
            done.set()

    names = [name for name in SCHEMAS for _ in range(100)]
    config = EngineConfig.from_mapping(
        {"model": str(smollm2_directory), "max_num_seqs": 32, "max_queue_size": 2000, "queue_timeout_ms": 3_600_000}
    )
    built = build_engine(config, smollm2_directory, collect)
    for index, name in enumerate(names):
        temperature = random.Random(index).choice([0.3, 0.7, 1.0])
        sampling = replace(guided(schema_guide(name), index), temperature=temperature)
        prompt = smollm2_tokenizer.encode(PROMPT.format(name))
        built.compiler.compile(schema_guide(name))
        built.engine.submit(Request(index, prompt, sampling, time.monotonic()))
    assert done.wait(3500)
    built.engine.shutdown(1.0)
    counts: Counter[str] = Counter()
    for index, name in enumerate(names):
        output, reason = ends[index], ends[index].finish_reason
        counts[f"{name}: {reason.value if reason else output.failure}"] += 1
        if reason is FinishReason.STOP:
            try:
                assert_valid(output.text, SCHEMAS[name])
            except (jsonschema.ValidationError, json.JSONDecodeError) as error:
                counts[f"{name}: not valid"] += 1
                print(name, repr(output.text), error)
        else:
            assert reason is FinishReason.LENGTH
            assert built.compiler.compile(schema_guide(name)).matcher().accept(output.token_ids)
    print(*sorted(counts.items()), sum(len(output.token_ids) for output in ends.values()), sep="\n")
    assert not [key for key in counts if "not valid" in key]
    assert sum(count for key, count in counts.items() if key.endswith("length")) <= 0.02 * len(names)
