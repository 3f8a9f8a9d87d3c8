"""Tiny random models of odd sizes made with transformers, and engines on them, driven step by step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import torch
import transformers

from nereid.batch import GuideMasks, KVOp, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.kv_cache.manager import make_kv_cache
from nereid.model_config import ModelConfig
from nereid.model_runner import ModelRunner
from nereid.request import Request, SamplingParams
from nereid.sampling.noise import noise_key
from nereid.scheduler import Advance, RequestState, Scheduler
from nereid.scheduling.beam_search import Hypothesis
from nereid.sequences import sequences_of
from nereid_kernels.draw_noise import gumbel
from tests.conftest import TOLERANCES

VOCAB = 257
EOS = 2
NAN_BYTE = 255  # a NaN in every dtype that a cache may have, int8 aside, whose scales are then NaN
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB, "hidden_size": 60, "intermediate_size": 100, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "eos_token_id": EOS,
    }
)  # fmt: skip


def make_tiny_llama(directory: Path) -> transformers.LlamaForCausalLM:
    """Every token sees all before it."""
    model = _make_tiny(directory, transformers.LlamaConfig(**SIZES))
    assert isinstance(model, transformers.LlamaForCausalLM)
    return model


def make_tiny_mistral(directory: Path, window: int) -> transformers.PreTrainedModel:
    """Every layer has the window."""
    return _make_tiny(directory, transformers.MistralConfig(**SIZES, sliding_window=window))


def make_tiny_ministral(directory: Path, window: int) -> transformers.PreTrainedModel:
    """The first and the last of three layers have the window."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return _make_tiny(directory, transformers.MinistralConfig(**SIZES, sliding_window=window, layer_types=kinds))


def _make_tiny(directory: Path, config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """Write a model with large weights, so that its logits are far apart and its tokens varied."""
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(directory)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
    library = tokenizers.Tokenizer(words)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(directory / "tokenizer.json"))
    return model


def _no_masks() -> GuideMasks:
    raise AssertionError("masks were asked for")


@dataclass
class SteppedEngine:
    """Scheduler and runner without threads; every block is full of NaN before it is used."""

    directory: Path
    settings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fixed = {"model": str(self.directory), "dtype": "float32"}
        self.config = EngineConfig.from_mapping({**fixed, "num_blocks": 200, **self.settings})
        self.model_config = ModelConfig.load(self.directory)
        self.runner = ModelRunner(self.directory, self.config, self.model_config)
        self.runner.kv_cache.pages.fill_(NAN_BYTE)
        self.kv_cache = make_kv_cache(self.runner.capacity, self.config.max_num_batched_tokens)
        max_model_len = min(self.model_config.max_position_embeddings, self.kv_cache.max_tokens)
        self.scheduler = Scheduler(self.config, self.kv_cache, max_model_len, self.model_config.eos_token_ids)
        self.tokens: dict[int, list[int]] = {}
        self.found: dict[int, list[Hypothesis]] = {}  # by beam searches that have ended
        self.held: set[int] = set()
        self.num_computed_tokens = 0
        self.ops: Counter[type[KVOp]] = Counter()
        self.num_failed_loads = 0
        self.sibling_ids = itertools.count(-1, -1)

    def add(self, request: Request) -> list[RequestState]:
        """Queue a request; its sequences."""
        own, *others = sequences_of(request, self.sibling_ids, self.model_config.eos_token_ids)
        leader = self.scheduler.add(own, others)
        return [leader, *leader.siblings]

    def compute(self, plan: SchedulerOutput) -> StepResult:
        """Run a plan; no request of these engines has a guide."""
        return self.runner.run(plan, _no_masks)

    def step(self) -> list[Advance]:
        """One step; requests that end are finished; blocks that fall free are filled with NaN again."""
        plan = self.scheduler.schedule()
        result = self.compute(plan)
        self.ops.update(map(type, plan.kv_ops))
        self.num_failed_loads += len(result.failed_loads)
        self.num_computed_tokens += plan.num_scheduled_tokens
        advances = self.scheduler.update(plan, result)
        for advance in advances:
            assert advance.fault is None, advance.fault
            self.tokens.setdefault(advance.state.request_id, []).append(advance.token_id)
            if advance.finish_reason:
                self.scheduler.finish(advance.state)
        for search in self.scheduler.search():
            if search.ended:
                self.found[search.leader.request_id] = self.scheduler.hypotheses(search.leader)
                self.scheduler.end(search.leader)
        self.scheduler.check_integrity()
        self._poison_free_blocks()
        return advances

    def _poison_free_blocks(self) -> None:
        held = self.kv_cache.held_blocks
        self.runner.kv_cache.pages[sorted(self.held - held)] = NAN_BYTE
        self.held = held

    def run_with_preemptions(self, first: int) -> None:
        """Until nothing is left to do; before step `first` and every fifth one after it somebody is preempted."""
        for count in itertools.count():
            if not self.scheduler.has_work:
                break
            if count >= first and (count - first) % 5 == 0 and self.scheduler.num_running:
                self.scheduler.preempt_worst()
            self.step()

    def run(self, requests: Iterable[Request]) -> dict[int, list[int]]:
        """All requests at once, to their ends; their tokens by id."""
        for request in requests:
            self.add(request)
        while self.scheduler.has_work:
            self.step()
        return self.tokens

    def close(self) -> None:
        """Write what is cached to disk, where there is one, as an engine does at its end."""
        self.runner.run(SchedulerOutput(0, (), (), (), tuple(self.kv_cache.store_all())), _no_masks)
        self.runner.close()


@dataclass
class IdentityRule:
    """Counts positions, and those where two tokens were too close to tell."""

    positions: int = 0
    near_ties: list[str] = field(default_factory=list)

    def check(
        self, logits: torch.Tensor, tokens: list[int], prompt_len: int, sampling: SamplingParams, index: int = 0
    ) -> None:
        """Compare tokens with what the reference's logits [len(tokens), vocabulary] would have drawn.

        Up to the first position whose two top (noisy) logits lie within the bound, all must be equal. index: of the
        sequence.
        """
        noisy = logits.double()
        if not sampling.greedy:
            keys = [[noise_key(sampling.seed, index, prompt_len + i)] for i in range(len(tokens))]
            noisy = noisy / sampling.temperature + gumbel(torch.tensor(keys), torch.arange(noisy.shape[1]))
        top = noisy.topk(2)
        for index, token in enumerate(tokens):
            self.positions += 1
            gap = float(top.values[index, 0] - top.values[index, 1])
            if gap < TOLERANCES["identity_top_gap"]:
                self.near_ties.append(f"position {index}: gap {gap:.1e}")
                return
            assert token == int(top.indices[index, 0]), f"token {index}: {token}, reference {top.indices[index, 0]}"

    def conclude(self) -> None:
        """Near ties are few, and are printed."""
        print(f"{self.positions} positions compared, near ties: {self.near_ties or 'none'}")
        assert len(self.near_ties) <= max(1, TOLERANCES["identity_share"] * self.positions)


def reference_logits(
    model: transformers.PreTrainedModel, prompt: tuple[int, ...], tokens: list[int], num_sink_tokens: int = 0
) -> torch.Tensor:
    """What transformers gives in one dense pass at each position that drew a token: [len(tokens), vocabulary].

    num_sink_tokens: masks by which layers with a window see so many of the first tokens besides.
    """
    token_ids = torch.tensor([[*prompt, *tokens]])
    masks = _sink_masks(model.config, token_ids.shape[1], num_sink_tokens) if num_sink_tokens else None
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids, attention_mask=masks).logits[0]
    return logits[len(prompt) - 1 : -1]


def _sink_masks(config: Any, length: int, num_sink_tokens: int) -> torch.Tensor | dict[str, torch.Tensor]:
    """[1, 1, query, key], what is added to scores; of a mixed model, by kind of layer."""
    key, query = torch.arange(length), torch.arange(length)[:, None]
    is_within = (query - key < config.sliding_window) | (key < num_sink_tokens)
    full = torch.zeros(1, 1, length, length).masked_fill(key > query, -math.inf)
    sliding = full.masked_fill(~is_within, -math.inf)
    return {"full_attention": full, "sliding_attention": sliding} if hasattr(config, "layer_types") else sliding
