"""One prompt, one answer or several, over plain HTTP: POST /v2/models/MODEL/generate. Standard library only."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from typing import Any

OUTPUTS = ("text_output", "num_output_tokens", "finish_reason")  # an element for each answer


def host_port(url: str) -> str:
    """HOST:PORT of what may be written as http://HOST:PORT/."""
    return url.removeprefix("http://").rstrip("/")


def as_list(value: Any) -> list[Any]:
    """What an output says of each answer: of one alone, its JSON is no list."""
    return value if isinstance(value, list) else [value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The first ten prime numbers are")
    parser.add_argument(
        "--url", type=host_port, default="127.0.0.1:8000", help="HOST:PORT of the server's HTTP endpoint"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument(
        "--n", type=int, default=1, help="how many answers; with a temperature, for they are drawn apart"
    )
    parser.add_argument("--stop", action="append", default=[], help="a text that ends the answer; may be repeated")
    args = parser.parse_args()

    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "stop": args.stop, "n": args.n}
    body = {
        "text_input": args.prompt,
        "sampling_parameters": json.dumps(sampling),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    request = urllib.request.Request(
        f"http://{args.url}/v2/models/{args.model}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        print(f"HTTP {error.code}: {error.read().decode()}", file=sys.stderr)
        return 1
    for text, count, reason in zip(*(as_list(answer[name]) for name in OUTPUTS), strict=True):
        print(args.prompt + text)
        print(f"[{answer['num_input_tokens']} tokens in, {count} out, ended by {reason}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.exit(f"no answer from the server: {error}; is `./nereid serve` running, and --url its HTTP address?")
    except KeyboardInterrupt:
        sys.exit(130)
