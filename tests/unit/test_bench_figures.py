"""The benchmark's arithmetic, on runs whose times are known: measures, floors, medians, ratios, goals."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from nereid.bench import pairs, tables
from nereid.bench.ceilings import Ceilings
from nereid.bench.floors import WEIGHT_BITS, Machine, ModelSize, Work, decode_step, prefill
from nereid.bench.measures import Measures, agreement, measure, percentile
from nereid.bench.pairs import Pair
from nereid.bench.records import Circumstances, RecordFile, Run, write_rows
from nereid.bench.worker_loop import Answer
from nereid.bench.workloads import Arrival, Workload

WHERE = Circumstances("a processor", 2, "abc", "3.11")
TWO = Workload("two", (Arrival(0.0, 100, 4), Arrival(0.0, 60, 4)))


def steady(sent: float, first: float, step: float, count: int) -> Answer:
    return Answer(sent, [first + i * step for i in range(count)], [1] * count, list(range(count)))


def test_decoding_is_measured_between_the_last_first_token_and_the_first_end() -> None:
    found = measure(TWO, [steady(0.0, 1.0, 1.0, 4), steady(0.0, 2.0, 1.0, 4)])
    assert (found.seconds, found.output_tokens, found.output_rate) == (5.0, 8, 1.6)
    assert found.prefill_rate == 80.0  # 160 prompt tokens, the last of which was done after 2 s
    assert (found.decode_rate, found.step_s) == (2.0, 1.0)  # from 2 s to 4 s: two tokens each
    assert (found.ttft, found.ttft_p99, found.tpot) == (1.5, 2.0, 1.0)


def test_tokens_that_come_together_count_as_many() -> None:
    found = measure(TWO, [Answer(0.0, [1.0, 3.0], [1, 3]), Answer(0.0, [1.0, 3.0], [2, 2])])
    assert found.decode_rate == 2.5
    assert found.tpot == pytest.approx((2 / 3 + 1) / 2)


def test_prompt_alone_has_no_decoding() -> None:
    found = measure(Workload("one", (Arrival(0.0, 2000, 1),)), [Answer(0.0, [2.0], [1])])
    assert found.prefill_rate == 1000.0
    assert all(map(math.isnan, (found.decode_rate, found.step_s, found.tpot, found.tpot_p99)))


def test_open_load_is_measured_from_each_arrival() -> None:
    found = measure(replace(TWO, rate=2.0), [steady(0.0, 1.0, 1.0, 4), steady(3.0, 3.5, 1.0, 4)])
    assert (found.ttft, found.ttft_p99) == (0.75, 1.0)
    assert math.isnan(found.decode_rate) and math.isnan(found.prefill_rate)


def test_outputs_agree_up_to_where_they_part() -> None:
    ours, theirs = Answer(0.0, token_ids=[1, 2, 3, 4]), Answer(0.0, token_ids=[1, 2, 9, 4])
    assert agreement([ours], [ours]) == 1.0
    assert agreement([ours, ours], [ours, theirs]) == 0.75


def test_percentile_is_a_value_that_occurred() -> None:
    assert [percentile([3.0, 1.0, 2.0], p) for p in (0, 50, 99)] == [1.0, 2.0, 3.0]


SIZE = ModelSize(layer_weights=1000, logit_weights=100, kv_numbers=10, pair_operations=40)


def test_decode_step_reads_weights_once_and_each_context() -> None:
    assert decode_step(SIZE, WEIGHT_BITS["none"], [0]) == Work(bytes=2200, operations=2200)
    assert decode_step(SIZE, WEIGHT_BITS["none"], [5, 15]) == Work(bytes=2200 + 20 * 20, operations=4400 + 20 * 40)
    assert decode_step(SIZE, WEIGHT_BITS["int4"], [0]).bytes == 1000 * 5 / 8 + 100 * 8.25 / 8


def test_prefill_computes_each_token_and_every_pair() -> None:
    work = prefill(SIZE, WEIGHT_BITS["none"], [3, 1])
    assert work.operations == 2 * (1000 * 4 + 100 * 2) + (6 + 1) * 40
    assert work.bytes == 2200


def test_arithmetic_bound_is_the_better_of_both_kinds_of_product() -> None:
    assert Ceilings(2.0, 5.0, 3.0).machine == Machine(2.0, 5.0)
    assert Ceilings(2.0, 3.0, 5.0).machine == Machine(2.0, 5.0)


def test_floor_is_the_larger_of_reading_and_computing() -> None:
    machine = Machine(bandwidth=100.0, arithmetic=1000.0)
    assert Work(bytes=200, operations=500).floor_s(machine) == 2.0
    assert Work(bytes=200, operations=5000).floor_s(machine) == 5.0


def run(number: int, engine: str, rate: float) -> Run:
    measures = Measures(1.0, 8, rate, math.nan, 2 * rate, 0.1, 0.1, 0.1, 0.1, 0.1)
    return Run(number, engine, "two", measures, "torch==1", 0.05, Ceilings(2e10, 1e12, 5e11))


def test_ratio_is_taken_round_by_round() -> None:
    """The second round met a machine of half the speed: the ratio of medians would be another."""
    ours = [run(1, "a", 100.0), run(2, "a", 50.0), run(3, "a", 90.0)]
    theirs = [run(1, "b", 50.0), run(2, "b", 25.0), run(3, "b", 30.0)]
    runs = [*theirs, *ours]
    assert tables.of(runs, "a", "two") == ours
    assert tables.median_ratio(ours, theirs, lambda m: m.output_rate) == 2.0
    assert tables.median(ours, lambda m: m.decode_rate) == 180.0


def test_what_was_not_measured_is_a_dash() -> None:
    assert math.isnan(tables.median_ratio([run(1, "a", 1.0)], [], lambda m: m.output_rate))
    assert math.isnan(tables.median([run(1, "a", 1.0)], lambda m: m.prefill_rate))
    assert (tables.number(math.nan), tables.share(math.nan), tables.share(0.5)) == ("-", "-", "50 %")


def test_columns_of_a_table_stand_below_each_other() -> None:
    assert tables.table(("a", "bbb"), [["long", "1"]]) == "a     bbb\nlong    1"


def test_each_run_is_a_line_with_its_circumstances(tmp_path: Path) -> None:
    records = RecordFile(tmp_path / "x.csv", WHERE)
    records.add(run(1, "a", 100.0))
    records.add(run(2, "a", 50.0))
    with (tmp_path / "x.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["round"], second["round"], second["output_rate"], first["prefill_rate"]) == ("1", "2", "50", "nan")
    assert (first["machine"], first["commit"], first["taken"]) == (
        "a processor", "abc", "0.050",
    )  # fmt: skip


def test_rows_are_written_with_their_circumstances(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.csv", [{"a": 1}, {"a": 2}], WHERE)
    assert (tmp_path / "x.csv").read_text().splitlines()[1] == "1,a processor,2,abc,3.11"


def pair(number: int, streams: int, server_rate: float, later_s: float = 0.01, lone: float = 0.97) -> Pair:
    return Pair(number, streams, 100.0, server_rate, 0.05, 0.05 + later_s, lone, 0.0)


def test_goals_are_judged_by_medians_of_pairs() -> None:
    good = [pair(1, 1, 95.0), pair(2, 1, 50.0), pair(3, 1, 93.0), pair(1, 16, 91.0)]
    found = pairs.findings(good, ready_s=5.0)
    assert [each.met for each in found] == [True] * 6
    assert found[0].found == "93.0%"
    late = pairs.findings([pair(1, 1, 89.0, later_s=0.02, lone=0.9)], ready_s=6.5)
    assert [each.met for each in late] == [False] * 4
    assert "missed" in pairs.describe(good, late)
