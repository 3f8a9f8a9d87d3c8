"""Weights of 8 and 4 bits: the engine computes what the dequantised weights give, whatever is beside a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nereid_kernels.native.quantising import quantise
from tests.conftest import TOLERANCES
from tests.engine.test_deterministic import assert_same_bits, logits_by_request, make_request
from tests.engine.test_kv_dtype import make_requests

GROUP = 16
LENGTHS = (1, 7, 8, 40, 100)
BITS = {"int8": 8, "int4": 4}


pytestmark = pytest.mark.usefixtures("own_cache")


def dequantised(weight: torch.Tensor, bits: int) -> torch.Tensor:
    return quantise(weight.detach(), bits, GROUP).numbers().float()


@pytest.fixture(scope="module", params=list(BITS))
def rounded(
    request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A quantisation, and the tiny model with the weights that it stands for."""
    folder = tmp_path_factory.mktemp(request.param)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(directory)
    bits = BITS[request.param]
    head = dequantised(model.lm_head.weight, 8)
    with torch.no_grad():
        for module in model.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(dequantised(module.weight, bits))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    return request.param, folder


def first_logits(directory: Path, **settings: object) -> torch.Tensor:
    requests = make_requests(LENGTHS)
    found = logits_by_request(directory, requests, {"block_size": 8, "dtype": "float32", **settings})
    return torch.stack([found[request.request_id][0] for request in requests])


def test_the_engine_computes_what_the_dequantised_weights_give(directory: Path, rounded: tuple[str, Path]) -> None:
    quantization, folder = rounded
    quantised = first_logits(directory, quantization=quantization, quantization_group_size=GROUP)
    same, others = first_logits(folder), first_logits(directory)
    allowed = float(same.abs().max()) * TOLERANCES["rows_in_16_bits"]
    torch.testing.assert_close(quantised, same, rtol=0, atol=allowed)
    assert not torch.allclose(quantised, others, rtol=0, atol=10 * allowed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", list(BITS))
def test_bits_do_not_depend_on_what_is_beside_a_request(directory: Path, quantization: str, dtype: str) -> None:
    requests = [make_request(index, tuple(range(3, 3 + length)), 12) for index, length in enumerate(LENGTHS)]
    settings = {"quantization": quantization, "quantization_group_size": GROUP, "dtype": dtype, "block_size": 8}
    assert_same_bits(directory, requests, settings)
