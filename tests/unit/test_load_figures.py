"""TTFT, ITL, TPOT and throughput from a profile export whose times are known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from client_examples.load.figures import percentile, read_export, table

MS = 1_000_000


def response(text: str, tokens: object = "") -> dict[str, object]:
    """As perf_analyzer writes it; an output that the server did not fill is an empty text."""
    return {"text_output": text, "num_output_tokens": tokens}


def response_event(text: str) -> dict[str, object]:
    return {"response": f'data: {{"text_output":"{text}"}}\n\n'}


def request(sent_ms: int, received_ms: list[int], outputs: list[dict[str, object]]) -> dict[str, Any]:
    return {
        "timestamp": sent_ms * MS,
        "response_timestamps": [ms * MS for ms in received_ms],
        "response_outputs": outputs,
    }


def export(path: Path, *requests: dict[str, Any]) -> Path:
    experiment = {"experiment": {"mode": "request_rate", "value": 2.5}, "requests": requests}
    path.write_text(json.dumps({"experiments": [experiment]}))
    return path


def test_figures_of_two_requests(tmp_path: Path) -> None:
    merged = request(1000, [1100, 1150, 1400], [response("a", 1), response("bc", 2), response("", 1)])
    plain = request(1500, [1800, 2000, 2000], [response("a"), response("b"), response("")])
    (figures,) = read_export(export(tmp_path / "x.json", merged, plain))
    assert (figures.load, figures.requests, figures.unanswered) == ("request rate 2.5", 2, 0)
    assert figures.ttft == (100.0, 300.0)
    assert figures.itl == (50.0, 250.0, 200.0)  # the empty end of the second one is none
    assert figures.tpot == (100.0, 200.0)
    assert figures.latency == (400.0, 500.0)
    assert figures.output_tokens == 6  # the empty last response of the first one brought a token
    assert figures.lone_tokens == 4
    assert figures.duration_s == 1.0
    lines = table(figures).splitlines()
    assert lines[2].split() == ["TTFT", "(ms)", "200.0", "100.0", "300.0", "300.0"]
    assert lines[-2:] == [f"{'output tokens/s':22}{6.0:10.2f}", f"{'requests/s':22}{2.0:10.2f}"]


def test_streams_over_http_have_an_empty_end_too(tmp_path: Path) -> None:
    events = [response_event(text) for text in ("a", "b")]
    (figures,) = read_export(export(tmp_path / "x.json", request(0, [10, 30, 31], [*events, {"response": ""}])))
    assert (figures.ttft, figures.itl, figures.output_tokens) == ((10.0,), (20.0,), 2)


def test_request_without_an_answer_is_counted_apart(tmp_path: Path) -> None:
    (figures,) = read_export(export(tmp_path / "x.json", request(0, [5], [response("a", 1)]), request(0, [], [])))
    assert (figures.requests, figures.unanswered, figures.itl, figures.tpot) == (1, 1, (), ())
    assert "TPOT (ms)" in table(figures)


def test_nothing_was_answered(tmp_path: Path) -> None:
    (figures,) = read_export(export(tmp_path / "x.json", request(0, [], [])))
    assert (figures.requests, figures.unanswered) == (0, 1)
    assert "nan" in table(figures)


@pytest.mark.parametrize("text", ["{}", '{"experiments": [{}]}', "[]", '{"experiments": 3}', "no JSON"])
def test_file_that_is_no_export(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no profile export|Expecting value"):
        read_export(path)


def test_percentile_is_a_value_that_occurred() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (0, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert math.isnan(percentile([], 50))
