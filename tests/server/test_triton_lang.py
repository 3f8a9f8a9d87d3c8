"""The engine on the Triton-lang kernels, in a real server whose Python processes have the interpreter switched on."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers

from nereid.cli.server_process import TritonServer
from nereid.request import SamplingParams
from tests.engine.tiny import IdentityRule, reference_logits
from tests.server.conftest import make_server
from tests.server.grpc_client import GrpcStream
from tests.server.repository import tiny_settings, write_model

# Logs every kernel launch, and each step: query lengths, new prompts, drawn tokens.
WATCHED = """
import json
import logging

from nereid.model_runner import ModelRunner
from nereid.server.model import TritonPythonModel  # noqa: F401

_LOG = logging.getLogger("watched")
logging.getLogger("nereid_kernels.launch").setLevel(logging.DEBUG)
_run = ModelRunner.run


def run(self, plan, masks):
    result = _run(self, plan, masks)
    step = {
        "query_lens": [row.num_scheduled_tokens for row in plan.scheduled],
        "prompts": {new.request_id: new.prompt_token_ids for new in plan.new_requests},
        "tokens": {sampled.request_id: sampled.token_id for sampled in result.sampled},
    }
    _LOG.info("step %s", json.dumps(step))
    return result


ModelRunner.run = run
"""
# The same, with a mistake in a kernel: keys and values come out larger than they are.
WRONG = (
    WATCHED
    + """
import triton
import triton.language as tl

from nereid_kernels.triton_lang import paged_softmax


@triton.jit
def widen(x, FORMAT: tl.constexpr, dtype: tl.constexpr):
    return x * 1.25


paged_softmax.widen = widen
"""
)
KERNELS = (
    "rms_norm",
    "qk_norm_rope_kv_write",
    "paged_attention",
    "paged_attention_reduce",
    "gated_activation",
    "sample",
)
BUDGET = 24
# The first fills a step, so that the others wait for the next: then 23 tokens of the second go beside the first's one,
# and again, and then its last 4 beside 19 of the third, whose context grows long enough to be split.
PROMPT_LENS = (BUDGET, 2 * (BUDGET - 1) + 4, 90, 5)
MIXED = [1, 4, BUDGET - 5]
MAX_TOKENS = 6


@dataclass
class Seen:
    """What a watched model has logged."""

    query_lens: list[list[int]] = field(default_factory=list)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    launches: Counter[str] = field(default_factory=Counter)


def read_log(server: TritonServer, model: str) -> Seen:
    seen = Seen()
    for line in server.options.log.read_text("utf-8", "replace").splitlines():
        if f" {model} INFO watched: step " in line:
            step = json.loads(line.split(": step ", 1)[1])
            seen.query_lens.append(step["query_lens"])
            seen.prompts |= step["prompts"]
            for request_id, token in step["tokens"].items():
                seen.tokens.setdefault(request_id, []).append(token)
        elif f" {model} DEBUG nereid_kernels.launch: launch " in line:
            seen.launches[line.split(": launch ", 1)[1].split()[0]] += 1
    return seen


@pytest.fixture(scope="module")
def kernel_server(tmp_path_factory: pytest.TempPathFactory, tiny_weights: Path) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("triton_lang") / "models"
    settings = tiny_settings(
        tiny_weights, attention_backend="triton_lang", max_num_batched_tokens=BUDGET, num_blocks=64
    )
    write_model(folder, "right", settings, source=WATCHED)
    write_model(folder, "wrong", settings, source=WRONG)
    with make_server(folder, ["right", "wrong"], environment={"TRITON_INTERPRET": "1"}) as running:
        running.wait_ready(120)
        yield running


def stream_four(server: TritonServer, model: str) -> None:
    """Four requests at once, of tokens, each streamed to its end."""
    rng = random.Random(3)
    with GrpcStream(server) as stream:
        for index, length in enumerate(PROMPT_LENS):
            ids = [rng.randrange(3, 49152) for _ in range(length)]
            sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
            stream.send(model, str(index), None, sampling, input_ids=ids)
        answers = stream.wait_done(280)
    assert [(answer.num_tokens, answer.errors) for answer in answers.values()] == [(MAX_TOKENS, [])] * 4


def check_tokens(weights: Path, seen: Seen) -> None:
    """The identity rule, against transformers' dense pass."""
    model: transformers.LlamaForCausalLM = transformers.LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32)
    rule = IdentityRule()
    assert len(seen.prompts) == 4
    for request_id, prompt in seen.prompts.items():
        tokens = seen.tokens[request_id]
        assert len(tokens) == MAX_TOKENS
        logits = reference_logits(model, tuple(prompt), tokens)
        rule.check(logits, tokens, len(prompt), SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    rule.conclude()


@pytest.mark.timeout(400)
def test_four_streams_on_the_kernels_say_what_the_model_says(kernel_server: TritonServer, tiny_weights: Path) -> None:
    stream_four(kernel_server, "right")
    seen = read_log(kernel_server, "right")
    assert MIXED in seen.query_lens, "a chunk, a decode and a query of 4 in one step"
    assert [name for name in KERNELS if not seen.launches[name]] == []
    check_tokens(tiny_weights, seen)


@pytest.mark.timeout(400)
def test_a_wrong_kernel_is_noticed(kernel_server: TritonServer, tiny_weights: Path) -> None:
    stream_four(kernel_server, "wrong")
    with pytest.raises(AssertionError, match="reference"):
        check_tokens(tiny_weights, read_log(kernel_server, "wrong"))
