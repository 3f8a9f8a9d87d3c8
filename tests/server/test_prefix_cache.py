"""The prefix cache as clients and operators see it: counts of cached tokens in answers and on the metrics page, kept
apart by tenant, and answers that are the same with and without it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from nereid.cli.server_process import TritonServer
from tests.server.grpc_client import GrpcStream
from tests.server.http_client import Answer, generate
from tests.server.metrics_page import MetricsPage, metrics_page
from tests.server.waiting import wait_until

MODEL, BLOCK = "tiny", 16
FIELDS = {"max_tokens": 6, "seed": 5, "ignore_eos": True}
SWITCHES = {f"return_{name}": True for name in ("num_cached_tokens", "output_ids", "perf_metrics")}


def ids_of(name: str, length: int) -> list[int]:
    """A prompt that no other name has, not even its first token (within 64 names)."""
    draw = random.Random(name)
    return [draw.randrange(100, 49000) for _ in range(length)]


def ask(server: TritonServer, ids: list[int], **fields: Any) -> Answer:
    answer = generate(
        server, MODEL, None, {**FIELDS, **fields}, input_ids=ids, exclude_input_in_output=True, **SWITCHES
    )
    assert answer.status == 200, answer
    return answer


def cached(answer: Answer) -> int:
    return int(answer.json["num_cached_tokens"])


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100])
def test_a_prompt_that_was_asked_before_is_found_but_for_its_last_token(server: TritonServer, length: int) -> None:
    ids = ids_of(f"twice {length}", length)
    first, second = ask(server, ids), ask(server, ids)
    assert first.json["output_ids"] == second.json["output_ids"]
    # Of the answer's tokens full blocks are kept: so all but the last token of a prompt may be found, if any was kept.
    kept = (length + FIELDS["max_tokens"] - 1) // BLOCK * BLOCK
    assert (cached(first), cached(second)) == (0, min(kept, length - 1))
    assert second.json["kv_cache_reused_blocks"] == cached(second) // BLOCK


def test_a_prompt_that_goes_on_otherwise_is_found_as_far_as_it_is_the_same(server: TritonServer) -> None:
    ids = ids_of("shared", 40)
    ask(server, ids)
    for same in (3, 20, 32):
        other = [*ids[:same], *ids_of(f"own {same}", 30)]
        first = ask(server, other)
        assert cached(first) == same
        assert ask(server, other, cache=False).json["output_ids"] == first.json["output_ids"]


def test_another_tenant_finds_nothing_and_sees_nothing_of_it(server: TritonServer) -> None:
    """All that an answer says is what it says where the prompt is new, and no metric speaks of a tenant."""
    ids = ids_of("secret", 48)
    ask(server, ids, cache_salt="alice-who-asks-first")
    untold = ask(server, ids_of("nobody's", 48), cache_salt="carol").json
    theirs = ask(server, ids, cache_salt="bob-who-asks-next").json
    plain = ask(server, ids).json
    for answer in (theirs, plain):
        for name in ("num_cached_tokens", "kv_cache_reused_blocks", "kv_cache_alloc_new_blocks", "num_preemptions"):
            assert answer[name] == untold[name], name
        assert answer.keys() == untold.keys() and answer["output_ids"] == theirs["output_ids"]
    assert cached(ask(server, ids, cache_salt="alice-who-asks-first")) == 47
    text = metrics_page(server, MODEL).text
    assert "alice" not in text and "bob-who" not in text and "salt" not in text


def test_a_request_may_keep_out_of_the_cache(server: TritonServer) -> None:
    ids = ids_of("private", 48)
    assert [cached(ask(server, ids, cache=False)) for _ in range(2)] == [0, 0]
    assert [cached(ask(server, ids)) for _ in range(2)] == [0, 47]
    assert cached(ask(server, ids, cache=False)) == 0


def test_a_streams_last_response_tells_it(server: TritonServer) -> None:
    ids = ids_of("streamed", 48)
    with GrpcStream(server) as stream:
        for number, expected in enumerate((0, 47)):
            answer = stream.send(MODEL, str(number), None, FIELDS, input_ids=ids, return_num_cached_tokens=True)
            stream.wait_done()
            told = [result.as_numpy("num_cached_tokens") for result in answer.results]
            assert [array is None for array in told] == [True] * (len(told) - 1) + [False]
            assert list(told[-1]) == [expected]


@pytest.mark.parametrize("length", range(BLOCK - 1, 2 * BLOCK + 2))
def test_a_prompts_logprobs_are_whole_whatever_is_cached_of_it(server: TritonServer, length: int) -> None:
    ids = ids_of(f"told {length}", length)
    tells = {"prompt_logprobs": 5, "temperature": 0}

    def told() -> list[Any]:
        answer = generate(server, MODEL, None, {**FIELDS, **tells}, input_ids=ids, return_prompt_logprobs=True)
        assert answer.status == 200, answer
        entries: list[Any] = json.loads(answer.json["prompt_logprobs"])
        assert len(entries) == length and entries[0] is None
        assert [next(iter(entry)) for entry in entries[1:]] == [str(token_id) for token_id in ids[1:]]
        return entries

    cold = told()
    ask(server, ids)
    assert cached(ask(server, ids)) > 0 and told() == told()
    for before, after in zip(cold[1:], told()[1:], strict=True):
        assert {token: entry["logprob"] for token, entry in after.items()} == pytest.approx(
            {token: entry["logprob"] for token, entry in before.items()}, abs=1e-4
        )


def test_queries_and_hits_are_counted_in_tokens(server: TritonServer) -> None:
    ids = ids_of("counted", 64)
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "nereid:cached_tokens_total")
    before = settled(server)
    for fields in ({}, {}, {"cache": False}, {"cache_salt": "x"}):
        ask(server, ids, **fields)
    wanted = [before.value(names[0]) + 3 * 64, before.value(names[1]) + 63, before.value(names[2]) + 63]
    wait_until(lambda: [metrics_page(server, MODEL).value(name) for name in names] == wanted, f"{names} are {wanted}")


def settled(server: TritonServer) -> MetricsPage:
    """The page once it shows a request that was sent for this."""
    name = "vllm:e2e_request_latency_seconds_count"
    count = metrics_page(server, MODEL).value(name)
    ask(server, ids_of("settles", 1), cache=False)
    wait_until(lambda: metrics_page(server, MODEL).value(name) > count, "what came before is counted")
    wait_until(lambda: metrics_page(server, MODEL).value("vllm:num_requests_running") == 0, "nothing runs")
    return metrics_page(server, MODEL)
