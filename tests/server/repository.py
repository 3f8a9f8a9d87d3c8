"""What the server tests serve: folders of a model repository, a tiny random model, and toy models of a few lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

NEREID_MODEL = "from nereid.server.model import TritonPythonModel  # noqa: F401\n"
CONFIG = 'backend: "python"\ninstance_group [ { kind: KIND_CPU, count: 1 } ]\n'
UNARY_CONFIG = CONFIG + "model_transaction_policy { decoupled: false }\n"
TOY_CONFIG = (
    CONFIG
    + """
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [1] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [-1] } ]
"""
)


def write_tiny_model(directory: Path, smollm2: Path) -> None:
    """A random two-layer Llama with SmolLM2's tokenizer. What it says at temperature 1 is random pieces of text, and as
    often pieces of characters, to which the larger embeddings are given."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    parts = [token_id for token_id in range(config.vocab_size) if "\ufffd" in tokenizer.decode([token_id])]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # layers outweigh the last token's own embedding: else each token repeats itself
        model.model.embed_tokens.weight[parts] *= 2.75
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, directory)


def write_model(
    repository: Path, name: str, settings: Mapping[str, Any] | None, *, config: str = CONFIG, source: str = NEREID_MODEL
) -> Path:
    """A model's folder; settings None: without model.json. Returns where its model.py lies."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(source)
    if settings is not None:
        (version / "model.json").write_text(json.dumps(settings))
    return version


def tiny_settings(weights: Path, **settings: Any) -> dict[str, Any]:
    """Settings of a tiny model: float32, one thread, a pool of 65,000 tokens unless `settings` says otherwise."""
    return {"model": str(weights), "dtype": "float32", "num_threads": 1, "num_blocks": 4097, **settings}


# Leaves the file `finalized` beside model.py when it has been finalized.
MARKS_FINALIZE = """
from pathlib import Path

from nereid.server.model import TritonPythonModel as Base


class TritonPythonModel(Base):
    def initialize(self, args):
        self._mark = Path(args["model_repository"]) / args["model_version"] / "finalized"
        super().initialize(args)

    def finalize(self):
        super().finalize()
        self._mark.touch()
"""

# A chain: calls the model `tiny` and passes its responses on. A client that left gets no more of them; the rest of
# what `tiny` says is read to the end.
CHAIN = """
import json
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

SAMPLING = {"max_tokens": 24, "ignore_eos": True, "seed": 5}


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            threading.Thread(target=self.answer, args=(text, request.get_response_sender())).start()

    def answer(self, text, sender):
        inputs = [
            pb_utils.Tensor("text_input", text),
            pb_utils.Tensor("stream", np.array([True])),
            pb_utils.Tensor("sampling_parameters", np.array([json.dumps(SAMPLING).encode()], dtype=object)),
        ]
        call = pb_utils.InferenceRequest(model_name="tiny", inputs=inputs, requested_output_names=["text_output"])
        error = None
        for response in call.exec(decoupled=True):
            if response.has_error():
                error = response.error()
            elif response.output_tensors() and not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse(response.output_tensors()))
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender.send(pb_utils.InferenceResponse([], error=error), flags=final) if error else sender.send(flags=final)
"""

# Sends once more after its final response; the answer to "count" is how often that raised in Python.
SENDS_AFTER_FINAL = """
import threading

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def response(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))])


class TritonPythonModel:
    def initialize(self, args):
        self.raised = []

    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
            sender = request.get_response_sender()
            if text == b"count":
                sender.send(response(str(len(self.raised))), flags=FINAL)
            else:
                threading.Thread(target=self.answer, args=(sender,)).start()

    def answer(self, sender):
        sender.send(response("first"))
        sender.send(response("last"), flags=FINAL)
        try:
            sender.send(response("after the last"))
        except Exception as error:
            self.raised.append(error)
"""
