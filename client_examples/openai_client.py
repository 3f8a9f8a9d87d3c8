"""OpenAI's own client on Nereid's gateway: a chat that streams, and its usage.

It needs `./nereid serve` and `./nereid gateway` in two other terminals, and the package openai
(`pip install openai`; an environment that has run the tests has it).
"""

from __future__ import annotations

import argparse
import sys

import openai


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--url", default="http://127.0.0.1:9000/v1", help="the gateway's address")
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
    except openai.APIError as error:
        sys.exit(f"{error}; are `./nereid serve` and `./nereid gateway` running, and is --url the gateway's?")
    except KeyboardInterrupt:
        sys.exit(130)
