"""A model of a few lines that has the engine's tensors and says what it is told to, to see what a gateway makes of it.

The last message, or the prompt, is a JSON object: `say`: the texts of its responses (one response unless the request
streams); `sequences`: the texts of each of several sequences, and then nothing else counts; `inputs`: it says instead,
as JSON, all that it was given; `outputs`: further outputs of the last response; `finish`; `error`: it ends with that
error, after all but the last of what it says, or all with `error_after`; `wait`: it goes on until its request is
cancelled.
"""

from __future__ import annotations

_INPUTS = {
    "text_input": "STRING dims: [1]",
    "input_ids": "INT32 dims: [-1]",
    "messages": "STRING dims: [1]",
    "sampling_parameters": "STRING dims: [1]",
    **dict.fromkeys(
        (
            "stream", "exclude_input_in_output", "return_finish_reason", "return_num_input_tokens",
            "return_num_output_tokens", "return_num_cached_tokens", "return_logprobs", "return_prompt_logprobs",
            "return_output_ids", "return_sequence_index",
        ),
        "BOOL dims: [1]",
    ),
}  # fmt: skip
_OUTPUTS = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "num_cached_tokens": "UINT32",
    "logprobs": "STRING",
    "prompt_logprobs": "STRING",
    "output_ids": "INT32",
    "sequence_index": "INT32",
}
SAYS_CONFIG = "\n".join(
    [
        'backend: "python"\nmax_batch_size: 0\nmodel_transaction_policy { decoupled: true }',
        "instance_group [ { kind: KIND_CPU, count: 1 } ]",
        *(f'input [ {{ name: "{name}" data_type: TYPE_{kind} optional: true }} ]' for name, kind in _INPUTS.items()),
        *(f'output [ {{ name: "{name}" data_type: TYPE_{kind} dims: [-1] }} ]' for name, kind in _OUTPUTS.items()),
    ]
)

SAYS = """
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
NUMBERS = {"num_input_tokens": np.uint32, "num_output_tokens": np.uint32, "num_cached_tokens": np.uint32,
           "output_ids": np.int32, "sequence_index": np.int32}


def tensor(name, value):
    values = value if isinstance(value, list) else [value]
    if name in NUMBERS:
        return pb_utils.Tensor(name, np.array(values, dtype=NUMBERS[name]))
    return pb_utils.Tensor(name, np.array([str(v).encode() for v in values], dtype=object))


def plain(array):
    return [v.decode() if isinstance(v, bytes) else v for v in array.reshape(-1).tolist()]


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            given = {tensor.name(): plain(tensor.as_numpy()) for tensor in request.inputs()}
            threading.Thread(target=self.answer, args=(given, request.get_response_sender())).start()

    def answer(self, given, sender):
        script, stream = self.script(given), given["stream"][0]
        if "sequences" in script:
            return self.answer_several(script["sequences"], stream, sender)
        said = script.get("say", ["said"])
        if script.get("inputs"):
            said = [json.dumps(given)]
        if not stream:
            said = ["".join(said)]
        for text in said[:-1]:
            outputs = {"text_output": text, "finish_reason": "None", "num_input_tokens": 11, "num_output_tokens": 1}
            sender.send(pb_utils.InferenceResponse([tensor(n, v) for n, v in outputs.items()]))
        while script.get("wait") and not sender.is_cancelled():
            time.sleep(0.01)
        if script.get("error_after"):
            outputs = {"text_output": said[-1], "finish_reason": script["finish"]}
            sender.send(pb_utils.InferenceResponse([tensor(n, v) for n, v in outputs.items()]))
        if "error" in script:
            sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(script["error"])), flags=FINAL)
            return
        outputs = {"text_output": said[-1], "finish_reason": script.get("finish", "stop"), "num_input_tokens": 11,
                   "num_output_tokens": 1 if stream else 3, "num_cached_tokens": 8, **script.get("outputs", {})}
        sender.send(pb_utils.InferenceResponse([tensor(n, v) for n, v in outputs.items()]), flags=FINAL)

    def answer_several(self, sequences, stream, sender):
        counts = {"num_input_tokens": 11, "num_cached_tokens": 8}
        whole = {"text_output": ["".join(said) for said in sequences], "finish_reason": ["stop"] * len(sequences),
                 "num_output_tokens": [len(said) for said in sequences], **counts}
        turns = [(turn, i) for i, said in enumerate(sequences) for turn in range(len(said))]
        parts = [
            {"text_output": sequences[i][turn], "sequence_index": i, "num_output_tokens": 1, **counts,
             "finish_reason": "stop" if turn == len(sequences[i]) - 1 else "None"}
            for turn, i in sorted(turns)
        ]
        responses = parts if stream else [whole]
        for number, outputs in enumerate(responses, start=1):
            flags = FINAL if number == len(responses) else 0
            sender.send(pb_utils.InferenceResponse([tensor(n, v) for n, v in outputs.items()]), flags=flags)

    def script(self, given):
        text = json.loads(given["messages"][0])[-1]["content"] if "messages" in given else given["text_input"][0]
        return json.loads(text) if text.startswith("{") else {}
"""
