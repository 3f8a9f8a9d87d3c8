"""One prompt, the answer as it is generated: server-sent events from /v2/models/MODEL/generate_stream.

Standard library only. Closing the connection cancels the request.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if line.startswith(b"data:"):
                yield json.loads(line.removeprefix(b"data:"))


def host_port(url: str) -> str:
    """HOST:PORT of what may be written as http://HOST:PORT/."""
    return url.removeprefix("http://").rstrip("/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="A short story about a lighthouse:")
    parser.add_argument(
        "--url", type=host_port, default="127.0.0.1:8000", help="HOST:PORT of the server's HTTP endpoint"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=None, help="the same seed gives the same answer")
    args = parser.parse_args()

    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    body = {"text_input": args.prompt, "stream": True, "sampling_parameters": json.dumps(sampling)}
    print(args.prompt, end="", flush=True)
    try:
        for event in events(f"http://{args.url}/v2/models/{args.model}/generate_stream", body):
            if "error" in event:
                print(f"\n{event['error']}", file=sys.stderr)
                return 1
            print(event["text_output"], end="", flush=True)
    except urllib.error.HTTPError as error:
        print(f"\nHTTP {error.code}: {error.read().decode()}", file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.exit(f"no answer from the server: {error}; is `./nereid serve` running, and --url its HTTP address?")
    except KeyboardInterrupt:
        sys.exit(130)
