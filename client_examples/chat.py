"""A chat in the terminal. Answers stream in; Ctrl-C cancels an answer; at the prompt it ends the chat, as Ctrl-D does.

The conversation is sent as it is: the server renders it with the model's chat template.
"""

from __future__ import annotations

import argparse
import http.client
import json
import readline  # noqa: F401  gives `input` line editing and a history
import sys


class NoAnswerError(Exception):
    """The server refused the request, or ended it with an error."""


def stream_answer(args: argparse.Namespace, messages: list[dict[str, str]]) -> str:
    """Print the answer as it comes, and return it. Leaving early closes the connection, which cancels the request."""
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": 0.9}
    body = {"messages": json.dumps(messages), "stream": True, "sampling_parameters": json.dumps(sampling)}
    try:
        connection = http.client.HTTPConnection(args.url, timeout=600)
    except http.client.InvalidURL as error:
        raise NoAnswerError(f"--url {args.url}: {error}") from error
    answer = ""
    try:
        connection.request("POST", f"/v2/models/{args.model}/generate_stream", json.dumps(body))
        for line in connection.getresponse():
            event = json.loads(line.strip().removeprefix(b"data:") or "{}")
            if "error" in event:
                raise NoAnswerError(event["error"])
            answer += event.get("text_output", "")
            print(event.get("text_output", ""), end="", flush=True)
    except KeyboardInterrupt:
        print(" [cancelled]", end="")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswerError(f"{error}; is `./nereid serve` running, and --url its HTTP address?") from error
    finally:
        connection.close()
        print()
    return answer


def host_port(url: str) -> str:
    """HOST:PORT of what may be written as http://HOST:PORT/."""
    return url.removeprefix("http://").rstrip("/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--url", type=host_port, default="127.0.0.1:8000", help="HOST:PORT of the server's HTTP endpoint"
    )
    parser.add_argument("--model", default="smollm2", help="the model's name on the server")
    parser.add_argument("--system", default="You are a helpful assistant.")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.5)
    args = parser.parse_args()

    messages = [{"role": "system", "content": args.system}]
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            messages.append({"role": "assistant", "content": stream_answer(args, messages)})
        except NoAnswerError as error:
            print(f"[{error}]\n[the question is taken back]", file=sys.stderr)
            del messages[-1]


if __name__ == "__main__":
    sys.exit(main())
