"""What the benchmark prints of runs that are known: which engines are compared, and with what."""

from __future__ import annotations

import math
from dataclasses import replace

from nereid.bench.ceilings import Ceilings
from nereid.bench.comparison import compare, describe_floors, describe_machine, describe_parts, usual_ceilings
from nereid.bench.contestants import Contestant, choose
from nereid.bench.floors import ModelSize
from nereid.bench.measures import Measures
from nereid.bench.records import Circumstances, Run
from nereid.bench.rounds import Outcome
from nereid.bench.workloads import Arrival, Workload

SIZE = ModelSize(layer_weights=10**8, logit_weights=10**7, kv_numbers=10**4, pair_operations=10**4)
CEILINGS = Ceilings(read=22e9, float32=1e12, bfloat16=5e11)
MEASURES = Measures(1.0, 64, 64.0, 1000.0, 50.0, 0.02, 0.1, 0.1, 0.02, 0.03)
ONE = Workload("one", (Arrival(0.0, 100, 64),))


def runs(contestants: tuple[Contestant, ...], speeds: list[float], workload: str = "one") -> list[Run]:
    return [
        Run(
            number,
            c.name,
            workload,
            replace(MEASURES, output_rate=64.0 * speed, decode_rate=50.0 * speed),
            "",
            0.02,
            CEILINGS,
        )
        for number in (1, 2, 3)
        for c, speed in zip(contestants, speeds, strict=True)
    ]


def cells(table: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.replace(" %", "%").split()[1:] for line in table.splitlines()[2:]}


def test_each_peer_is_compared_with_ours_of_its_weights() -> None:
    chosen = choose(("nereid", "vllm", "nereid-int4", "openvino-q4_1"))
    outcome = Outcome(runs(chosen, [2.0, 1.0, 6.0, 4.0]), {("vllm", "one"): 0.75}, {})
    rows = cells(compare(ONE, chosen, outcome, SIZE))
    assert list(rows) == ["nereid", "vllm", "nereid-int4", "openvino-q4_1"]
    assert rows["nereid"][7:10] == ["-", "-", "-"]
    assert rows["vllm"][7:] == ["2.00", "2.00", "1.00", "75%", "2%"]
    assert rows["openvino-q4_1"][7:9] == ["1.50", "1.50"]


def test_share_of_the_floor_is_that_of_the_weights() -> None:
    """A step reads 220 MB of bfloat16 weights and 2.6 MB of keys at 22 GB/s: 10.1 ms of 20."""
    chosen = choose(("nereid", "vllm"))
    rows = cells(compare(ONE, chosen, Outcome(runs(chosen, [1.0, 1.0]), {}, {}), SIZE))
    assert rows["vllm"][5] == "51%"
    assert "10.0" in describe_floors(SIZE, CEILINGS, ["none"]).splitlines()[1]


def test_each_round_is_held_against_what_the_machine_could_do_then() -> None:
    chosen = choose(("nereid",))
    first, *others = runs(chosen, [1.0])
    busy = replace(first, ceilings=replace(CEILINGS, read=11e9), measures=replace(MEASURES, step_s=0.04))
    rows = cells(compare(ONE, chosen, Outcome([busy, *others], {}, {}), SIZE))
    assert rows["nereid"][5] == "51%"
    where = Circumstances("machine", 2, "commit", "3.11")
    assert "reading 22 (11 - 22) GB/s; float32 products 1000 (1000 - 1000)" in describe_machine(where, [busy, *others])
    assert usual_ceilings([busy, *others]) == CEILINGS


def test_open_load_compares_times_by_their_speed() -> None:
    chosen = choose(("nereid", "openvino"))
    open_load = replace(ONE, name="replay-1/s", rate=1.0)
    found = runs(chosen, [1.0, 1.0], open_load.name)
    slow = [replace(r, measures=replace(r.measures, ttft=0.3)) if r.engine == "openvino" else r for r in found]
    rows = cells(compare(open_load, chosen, Outcome(slow, {}, {}), SIZE))
    assert rows["openvino"][5:8] == ["1.00", "3.00", "1.00"]
    assert rows["nereid"][5:8] == ["-", "-", "-"]


def test_parts_are_shown_where_they_are_told() -> None:
    table = describe_parts({"a": {"run": 1.5, "update": math.nan}, "b": {}})
    assert table.splitlines()[1].split() == ["a", "1.50", "-"]
    assert len(table.splitlines()) == 2
