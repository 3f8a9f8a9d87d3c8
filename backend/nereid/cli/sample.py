"""What a person sees of a server that just became ready: commands that work as printed, and one answer as it streams.

Always holds: the commands and the sample ask the same question, as messages where the model has a chat format.
"""

from __future__ import annotations

import http.client
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereid.cli.server_process import HOST
from nereid.errors import NereidError
from nereid.tokenization.chat_template import ChatTemplate

_QUESTION = "What is the capital of France?"
_PLAIN_PROMPT = "The capital of France is"
_MAX_TOKENS = 48
_TIMEOUT_S = 120.0


def sample_prompt(directory: Path) -> dict[str, Any]:
    """The fields of a prompt: a question as messages where the model in `directory` has a chat format that takes them,
    else a text, the start of a sentence."""
    messages = [{"role": "user", "content": _QUESTION}]
    try:
        ChatTemplate(directory).render(messages)
    except NereidError:
        return {"text_input": _PLAIN_PROMPT, "exclude_input_in_output": True}
    return {"messages": json.dumps(messages, ensure_ascii=False)}


def curl_command(port: int, model: str, prompt: Mapping[str, Any], *, stream: bool) -> str:
    """A command for a POSIX shell."""
    options, path = ("-sN", "generate_stream") if stream else ("-s", "generate")
    return (
        f"curl {options} http://{HOST}:{port}/v2/models/{model}/{path} -d {shlex.quote(_body(prompt, stream=stream))}"
    )


def _body(prompt: Mapping[str, Any], *, stream: bool) -> str:
    parameters = {"max_tokens": _MAX_TOKENS, "temperature": 0.0}
    return json.dumps({**prompt, "stream": stream, "parameters": parameters}, ensure_ascii=False)


def streams(port: int, model: str) -> bool:
    """Whether the model is decoupled: one that is not gives its answer whole. Raises as `stream_answer` does."""
    with _request(port, "GET", f"/v2/models/{model}/config") as response:
        policy = json.load(response).get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


def stream_answer(port: int, model: str, prompt: Mapping[str, Any], *, stream: bool) -> Iterator[str]:
    """The pieces of the answer as they come. Raises OSError or HTTPException, or ValueError with the model's error."""
    with _request(port, "POST", f"/v2/models/{model}/generate_stream", _body(prompt, stream=stream)) as response:
        for line in response:
            if line.startswith(b"data: "):
                yield _piece(json.loads(line.removeprefix(b"data: ")))


@contextmanager
def _request(port: int, method: str, path: str, body: str = "") -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(HOST, port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, body.encode("utf-8"))
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(_error_of(response.read()))
        yield response
    finally:
        connection.close()


def _piece(event: dict[str, Any]) -> str:
    if "error" in event:
        raise ValueError(str(event["error"]))
    return str(event.get("text_output", ""))


def _error_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace").strip() or "no reason given"
