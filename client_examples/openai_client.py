"""OpenAI's own client on Nereid's gateway: a chat that streams, and its usage.

It needs `./nereid serve` and `./nereid gateway` in two other terminals, and the package openai
(`.venv/bin/pip install openai`; an environment that has run the tests has it).
"""

from __future__ import annotations

import argparse
import sys
import urllib.parse

try:
    import openai
except ImportError:
    sys.exit("this example needs the package openai: .venv/bin/pip install openai")


def base_url(url: str) -> str:
    """The gateway's address, which may be written without http:// or /v1. Raises ValueError where it is none."""
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    _ = urllib.parse.urlsplit(url).port  # raises where it is no number
    return url if url.endswith("/v1") else f"{url}/v1"


def reason(error: openai.APIError) -> str:
    """What the gateway says, without the client's wrapping."""
    return str(error.body["message"]) if isinstance(error.body, dict) and "message" in error.body else str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--url", type=base_url, default="http://127.0.0.1:9000/v1", help="the gateway's address")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--api-key", default="none", help="where the gateway was started with one")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()

    client = openai.OpenAI(base_url=args.url, api_key=args.api_key)
    events = client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": args.question}],
        max_completion_tokens=args.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in events:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
        if event.usage is not None:
            print(f"\n[{event.usage.prompt_tokens} + {event.usage.completion_tokens} tokens]")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except openai.APIConnectionError as error:
        sys.exit(f"{error} Is `./nereid gateway` running, and --url its address?")
    except openai.AuthenticationError as error:
        sys.exit(f"{reason(error)}; the gateway was started with a key: give it with --api-key")
    except openai.APIError as error:
        sys.exit(reason(error))
    except KeyboardInterrupt:
        sys.exit(130)
