"""Start a long answer, read a few tokens of it, then cancel it: the server frees its memory at once.

Shows the share of the KV cache in use, from the server's metrics, before, while and after.
"""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import re
import sys
import time
import urllib.request
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

PROMPT = "Once upon a time"


def kv_cache_usage(metrics_url: str, model: str) -> float:
    with urllib.request.urlopen(f"http://{metrics_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    match = re.search(rf'^vllm:kv_cache_usage_perc{{[^}}]*model_name="{model}"[^}}]*}} (\S+)', text, re.MULTILINE)
    if match is None:
        raise OSError(f"the metrics do not know a model {model}")
    return float(match[1])


def host_port(url: str) -> str:
    """HOST:PORT of what may be written as http://HOST:PORT/."""
    return url.removeprefix("http://").rstrip("/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--url", type=host_port, default="127.0.0.1:8001", help="HOST:PORT of the server's gRPC endpoint"
    )
    parser.add_argument(
        "--metrics-url", type=host_port, default="127.0.0.1:8002", help="HOST:PORT of the server's metrics"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8, help="how many responses to read before cancelling")
    args = parser.parse_args()

    text = grpcclient.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([PROMPT.encode()], dtype=object))
    stream = grpcclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    sampling = grpcclient.InferInput("sampling_parameters", [1], "BYTES")
    settings = {"max_tokens": 4000, "temperature": 0.8, "ignore_eos": True}
    sampling.set_data_from_numpy(np.array([json.dumps(settings).encode()], dtype=object))

    responses: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    print(f"KV cache in use before: {kv_cache_usage(args.metrics_url, args.model):.2%}\n{PROMPT}", end="")
    client = grpcclient.InferenceServerClient(args.url)
    client.is_server_live()  # raises where it is not there
    client.start_stream(lambda result, error: responses.put((result, error)))
    client.async_stream_infer(args.model, [text, stream, sampling])
    for _ in range(args.tokens):
        result, error = responses.get(timeout=600)
        if error is not None:
            print(f"\n{error}", file=sys.stderr)
            return 1
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    print(f"\nKV cache in use while it runs: {kv_cache_usage(args.metrics_url, args.model):.2%}")
    start = time.monotonic()
    client.stop_stream(cancel_requests=True)
    print(f"cancelled; the stream closed after {time.monotonic() - start:.3f} s")
    time.sleep(1.0)
    print(f"KV cache in use after: {kv_cache_usage(args.metrics_url, args.model):.2%}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except InferenceServerException as error:
        sys.exit(f"{error}; is `./nereid serve` running, and --url its gRPC address?")
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.exit(f"no metrics from the server: {error}; is `./nereid serve` running, and --metrics-url right?")
