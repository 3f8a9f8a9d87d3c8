"""A tiny random Llama of odd sizes made with transformers, and engines on it, driven step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
import torch
import transformers

from nereid.batch import GuideMasks, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.kv_cache.manager import KVCacheManager
from nereid.model_config import ModelConfig
from nereid.model_runner import ModelRunner
from nereid.request import Request, SamplingParams
from nereid.sampling.noise import noise_key
from nereid.scheduler import Advance, Scheduler
from nereid_kernels.draw_noise import gumbel
from tests.conftest import TOLERANCES

VOCAB = 257
EOS = 2


def make_tiny_llama(directory: Path) -> transformers.LlamaForCausalLM:
    """Write a model with large weights, so that its logits are far apart and its tokens varied."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=60, intermediate_size=100, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=EOS,
    )  # fmt: skip
    model: transformers.LlamaForCausalLM = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
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
        self.runner.kv_cache.pool.fill_(float("nan"))
        capacity = self.runner.capacity
        self.kv_cache = KVCacheManager(capacity.num_blocks, capacity.group_block_sizes)
        max_model_len = min(self.model_config.max_position_embeddings, self.kv_cache.max_tokens)
        self.scheduler = Scheduler(self.config, self.kv_cache, max_model_len, self.model_config.eos_token_ids)
        self.tokens: dict[int, list[int]] = {}
        self.used: set[int] = set()

    def compute(self, plan: SchedulerOutput) -> StepResult:
        """Run a plan; no request of these engines has a guide."""
        return self.runner.run(plan, _no_masks)

    def step(self) -> list[Advance]:
        """One step; requests that end are finished; blocks that fall free are filled with NaN again."""
        plan = self.scheduler.schedule()
        result = self.compute(plan)
        advances = self.scheduler.update(plan, result)
        for advance in advances:
            assert advance.fault is None, advance.fault
            self.tokens.setdefault(advance.state.request_id, []).append(advance.token_id)
            if advance.finish_reason:
                self.scheduler.finish(advance.state)
        self.scheduler.check_integrity()
        self._poison_free_blocks()
        return advances

    def _poison_free_blocks(self) -> None:
        used = {block for tables in self.kv_cache.tables.values() for table in tables for block in table}
        self.runner.kv_cache.pool[sorted(self.used - used)] = float("nan")
        self.used = used

    def run(self, requests: Iterable[Request]) -> dict[int, list[int]]:
        """All requests at once, to their ends; their tokens by id."""
        for request in requests:
            self.scheduler.add(request)
        while self.scheduler.has_work:
            self.step()
        return self.tokens


@dataclass
class IdentityRule:
    """Counts positions, and those where two tokens were too close to tell."""

    positions: int = 0
    near_ties: list[str] = field(default_factory=list)

    def check(self, logits: torch.Tensor, tokens: list[int], prompt_len: int, sampling: SamplingParams) -> None:
        """Compare tokens with what the reference's logits [len(tokens), vocabulary] would have drawn.

        Up to the first position whose two top (noisy) logits lie within the bound, all must be equal.
        """
        noisy = logits.double()
        if not sampling.greedy:
            keys = [[noise_key(sampling.seed, 0, prompt_len + i)] for i in range(len(tokens))]
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


def reference_logits(model: transformers.LlamaForCausalLM, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """What transformers gives in one dense pass at each position that drew a token: [len(tokens), vocabulary]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1]
