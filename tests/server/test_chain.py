"""Models that are not Nereid's beside it: a chain that calls it, and one that sends after its final response."""

from __future__ import annotations

from typing import Any

from nereid.cli.server_process import TritonServer
from tests.server.grpc_client import GrpcStream
from tests.server.http_client import generate_stream, joined
from tests.server.server_state import is_live, wait_until_idle
from tests.server.waiting import wait_until

SAMPLING = {"max_tokens": 24, "ignore_eos": True, "seed": 5}  # the chain's own
ONLY_TEXT: dict[str, Any] = {"stream": None, "return_finish_reason": None, "return_num_output_tokens": None}


def test_chain_of_32_with_half_of_them_cancelled(server: TritonServer, chain: str) -> None:
    """All that stay get their whole text; the model that is called is idle in the end."""
    expected = joined(generate_stream(server, "tiny", "call it", SAMPLING))
    with GrpcStream(server) as staying, GrpcStream(server) as leaving:
        for number in range(16):
            staying.send(chain, f"stays {number}", "call it", **ONLY_TEXT, empty_final=True)
            leaving.send(chain, f"leaves {number}", "call it", **ONLY_TEXT, empty_final=True)
        leaving.wait(lambda: any(answer.finals for answer in leaving.answers.values()))
        leaving.close(cancel=True)
        answers = staying.wait_done()
    assert [answer.text for answer in answers.values()] == [expected] * 16
    wait_until_idle(server, "tiny")


def test_refusal_of_the_called_model_reaches_the_client(server: TritonServer, chain: str) -> None:
    with GrpcStream(server) as stream:
        refused = stream.send(chain, "a", "", **ONLY_TEXT)
        stream.wait(lambda: bool(refused.errors or stream.other_errors))
    assert "text_input" in (refused.errors + stream.other_errors)[0]


def test_send_after_the_final_response_raises_in_python(server: TritonServer, sends_after_final: str) -> None:
    """In 100 streams at once, and nothing crashes."""
    with GrpcStream(server) as stream:
        for number in range(100):
            stream.send(sends_after_final, str(number), "x", **ONLY_TEXT)
        assert {answer.text for answer in stream.wait_done().values()} == {"firstlast"}
        assert {len(answer.finals) for answer in stream.answers.values()} == {2}
    wait_until(lambda: num_raised(server, sends_after_final) == 100, "each raised")
    assert is_live(server)
    assert sends_after_final in server.stub_models()


def num_raised(server: TritonServer, model: str) -> int:
    with GrpcStream(server) as stream:
        answer = stream.send(model, "count", "count", **ONLY_TEXT)
        stream.wait_done()
    return int(answer.text)
