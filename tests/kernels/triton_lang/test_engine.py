"""The engine on the Triton-lang kernels: its tokens are those of transformers' dense pass, by the identity rule."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.kernels.triton_lang.devices import ON_GPU

if ON_GPU:
    pytest.skip("the engine's tensors lie on the CPU", allow_module_level=True)

import transformers  # noqa: E402

from tests.engine.test_identity import check, make_requests  # noqa: E402
from tests.engine.test_kv_dtype import QUANTISED, check_error  # noqa: E402
from tests.engine.tiny import SteppedEngine, make_tiny_llama  # noqa: E402

KERNELS = {
    "rms_norm",
    "qk_norm_rope_kv_write",
    "paged_attention",
    "paged_attention_reduce",
    "gated_activation",
    "sample",
}


@pytest.mark.parametrize("kv_dtype", list(QUANTISED))
def test_a_quantised_cache_errs_as_its_format_does(tmp_path: Path, kv_dtype: str) -> None:
    make_tiny_llama(tmp_path)
    check_error(tmp_path, kv_dtype, (1, 9, 20), attention_backend="triton_lang", block_size=16)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_equal_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture, temperature: float) -> None:
    model: transformers.LlamaForCausalLM = make_tiny_llama(tmp_path)
    caplog.set_level(logging.DEBUG, "nereid_kernels.launch")
    settings = {"attention_backend": "triton_lang", "block_size": 16, "max_num_batched_tokens": 21}
    requests = make_requests([1, 9, 80], max_tokens=6, temperature=temperature)
    check(model, requests, SteppedEngine(tmp_path, settings).run(requests))
    launched = {record.args[0] for record in caplog.records if isinstance(record.args, tuple)}
    assert launched == KERNELS
