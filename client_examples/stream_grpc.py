"""Many prompts at once on one gRPC stream, with tritonclient: every answer grows as its tokens come.

Each request has an id, which its responses carry; the final one is marked by `triton_final_response`.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

PROMPTS = ["The capital of Italy is", "Water boils at", "The opposite of cold is", "Shakespeare wrote"]


def inputs_for(prompt: str, sampling: dict[str, object]) -> list[Any]:
    values = {
        "text_input": np.array([prompt.encode()], dtype=object),
        "sampling_parameters": np.array([json.dumps(sampling).encode()], dtype=object),
        "stream": np.array([True]),
    }
    inputs = []
    for name, value in values.items():
        tensor = grpcclient.InferInput(name, [1], "BOOL" if value.dtype == bool else "BYTES")
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


def host_port(url: str) -> str:
    """HOST:PORT of what may be written as http://HOST:PORT/."""
    return url.removeprefix("http://").rstrip("/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument(
        "--url", type=host_port, default="127.0.0.1:8001", help="HOST:PORT of the server's gRPC endpoint"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=24)
    args = parser.parse_args()

    responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    texts = {str(index): "" for index in range(len(args.prompts))}
    running = set(texts)
    client = grpcclient.InferenceServerClient(args.url)
    client.is_server_live()  # raises where it is not there
    client.start_stream(lambda result, error: responses.put((result, error)))
    try:
        for index, prompt in enumerate(args.prompts):
            sampling = {"max_tokens": args.max_tokens, "temperature": 0.0}
            client.async_stream_infer(args.model, inputs_for(prompt, sampling), request_id=str(index))
        while running:
            result, error = responses.get(timeout=600)
            if error is not None:
                print(error, file=sys.stderr)
                return 1
            response = result.get_response()
            delta = result.as_numpy("text_output")[0].decode()
            texts[response.id] += delta
            print(f"[{response.id}] {delta!r}")
            if response.parameters["triton_final_response"].bool_param:
                running.discard(response.id)
    finally:
        client.stop_stream(cancel_requests=True)  # what still runs, after an error or Ctrl-C, ends here
    for index, prompt in enumerate(args.prompts):
        print(f"{prompt}{texts[str(index)]}\n---")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except InferenceServerException as error:
        sys.exit(f"{error}; is `./nereid serve` running, and --url its gRPC address?")
