"""What no limit sees coming: a guide is compiled where it can be stopped, and nobody else pays for it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from nereid.errors import ErrorCode, InvalidRequestError, QueueTimeoutError, RequestError
from nereid.guided.check_process import GuideChecker
from nereid.guided.compiler import GuideCompiler
from nereid.guided.library import Vocabulary
from nereid.request import Guide, GuideKind
from nereid.tokenization.tokenizer import Tokenizer
from tests.server.waiting import wait_until

VOCAB, EOS = 49152, 2
FINE = Guide(GuideKind.REGEX, "[a-c]{3}")
_EACH = [f".*[{letter}].{{{index + 7}}}" for index, letter in enumerate("abcdefghijklmnopqrstuvwx")]
# Within the limits: one intersection. The library does not come back from it, and grows.
HOSTILE = Guide(GuideKind.GRAMMAR, f"start: A\nA: /({'|'.join(_EACH)})/ & ~/({'|'.join(_EACH[::-1])}x)/")


@pytest.fixture(scope="module")
def vocabulary(smollm2_tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(smollm2_tokenizer.as_json(), smollm2_tokenizer.num_tokens, VOCAB, (EOS,))


def wait_until_busy(processes: list[psutil.Process]) -> None:
    """Until one of them works."""

    def seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = seconds()
    wait_until(lambda: seconds() > before + 0.1, "the process is busy")


def test_a_guide_that_takes_too_long_is_refused_and_others_go_on(smollm2_tokenizer: Tokenizer) -> None:
    compiler = GuideCompiler(smollm2_tokenizer, VOCAB, (EOS,), deadline_s=1.0)
    compiler.compile(FINE)
    before = psutil.Process().memory_info().rss
    for longest in (5.0, 0.5):  # the second answer comes from the cache
        start = time.monotonic()
        with pytest.raises(InvalidRequestError, match="more than 1 s to compile") as caught:
            compiler.compile(HOSTILE)
        assert time.monotonic() - start < longest
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    compiler.compile(Guide(GuideKind.REGEX, "[d-f]{3}"))
    assert psutil.Process().memory_info().rss - before < 50 << 20


def test_a_guide_that_takes_too_much_memory_is_refused(vocabulary: Vocabulary) -> None:
    checker = GuideChecker(vocabulary, deadline_s=60.0, memory_bytes=96 << 20)
    assert checker.refusal(FINE) is None
    reason = checker.refusal(HOSTILE) or ""
    assert "more than 96 MiB to compile" in reason
    assert checker.refusal(FINE) is None


def test_who_only_waited_is_not_blamed(smollm2_tokenizer: Tokenizer) -> None:
    compiler = GuideCompiler(smollm2_tokenizer, VOCAB, (EOS,), wait_s=1.0, deadline_s=3.0)
    compiler.compile(FINE)
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(compiler.compile, HOSTILE)
        wait_until_busy(psutil.Process().children())
        with pytest.raises(QueueTimeoutError, match="other guides were compiled for 1 s") as caught:
            compiler.compile(Guide(GuideKind.REGEX, "[d-f]{3}"))
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert compiler.compile(FINE).guide == FINE  # what is known waits for nobody
        with pytest.raises(InvalidRequestError, match="more than 3 s"):
            hostile.result()
    assert compiler.compile(Guide(GuideKind.REGEX, "[d-f]{3}"))


def test_a_process_that_is_killed_costs_one_guide_at_most(vocabulary: Vocabulary) -> None:
    checker = GuideChecker(vocabulary, deadline_s=20.0)
    assert checker.refusal(FINE) is None and checker.pid
    idle = psutil.Process(checker.pid)
    idle.kill()
    wait_until(lambda: idle.status() == psutil.STATUS_ZOMBIE, "the idle process is dead")
    assert checker.refusal(FINE) is None and checker.pid != idle.pid
    with ThreadPoolExecutor(1) as pool:
        busy = psutil.Process(checker.pid)
        hostile = pool.submit(checker.refusal, HOSTILE)
        wait_until_busy([busy])
        busy.kill()
        with pytest.raises(RequestError, match="ended with -9") as caught:
            hostile.result()
    assert caught.value.code is ErrorCode.INTERNAL
    assert checker.refusal(FINE) is None


def test_a_process_that_dies_before_it_reads_costs_no_guide(vocabulary: Vocabulary) -> None:
    checker = GuideChecker(vocabulary, deadline_s=20.0)
    assert checker.refusal(FINE) is None and checker.pid
    dying = psutil.Process(checker.pid)
    dying.suspend()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(checker.refusal, FINE)
        time.sleep(0.2)  # the question lies in the socket of a process that will not read it
        dying.kill()
        assert asked.result() is None
    assert checker.pid != dying.pid


def test_a_process_that_cannot_start_is_tried_anew(
    smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GuideCompiler(smollm2_tokenizer, VOCAB, (EOS,))
    for program in ("/no/such/program", "/bin/false"):
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(RequestError, match="no process to check them could be started") as caught:
            compiler.compile(FINE)
        assert caught.value.code is ErrorCode.INTERNAL
    monkeypatch.undo()
    assert compiler.compile(FINE).guide == FINE


def test_a_process_ends_with_its_owner(vocabulary: Vocabulary) -> None:
    checker = GuideChecker(vocabulary)
    assert checker.refusal(FINE) is None and checker.pid
    process = psutil.Process(checker.pid)
    del checker
    gc.collect()
    assert not process.is_running()


@pytest.mark.parametrize("guide", ["FINE", "HOSTILE"])
def test_a_process_ends_when_its_parent_is_killed(smollm2_directory: Path, guide: str) -> None:
    code = f"""
from pathlib import Path
from nereid.guided.compiler import GuideCompiler
from nereid.tokenization.tokenizer import Tokenizer
from tests.unit.test_guided_checker import FINE, HOSTILE
compiler = GuideCompiler(Tokenizer(Path({str(smollm2_directory)!r})), {VOCAB}, ({EOS},), deadline_s=2.0)
compiler.compile(FINE)
print("ready", flush=True)
compiler.compile({guide})
input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        (checker,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not checker.is_running() or checker.status() == psutil.STATUS_ZOMBIE, "the checker has ended")
