"""`nereid bench`: what is wrong with its arguments is said before anything is fetched, loaded or measured."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nereid.cli import main


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """The command takes SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["peers", "--engines", "nereid,llama"], "--engines: got llama; allowed: nereid, vllm, openvino, nereid-int8"),
        (["peers", "--workloads", "long-x9"], "--workloads: got long-x9; allowed: short-x1, short-x8"),
        (["peers", "--workloads", "replay"], "--workloads: replay needs --trace FILE"),
        (["peers", "--workloads", "mid-x1,replay"], "--workloads: replay needs --trace FILE"),
        (["peers", "--trace", "/no/such.csv"], "--trace /no/such.csv: cannot be read"),
        (["engine", "--workloads", "replay"], "--workloads: got replay; allowed: short-x1"),
        (["server", "--", "more"], "bench server takes nothing after --; got more"),
    ],
)
def test_wrong_choice_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    assert main(["bench", "peers", "--trace", str(path)]) == 1
    assert "cannot be read as Azure's trace" in capsys.readouterr().err
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert main(["bench", "peers", "--trace", str(path)]) == 1
    assert "has 1 requests; at least 160 are needed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--streams", "1,x"], ["--streams", ","], ["--engines", "a"]])
def test_wrong_spelling_ends_with_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "server", *arguments])
    assert ended.value.code == 2
