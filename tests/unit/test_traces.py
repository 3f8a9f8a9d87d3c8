"""What the prefix cache finds, and what blocks waste, on the first part of real traces; see tests/benchmarks."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

from nereid.bench.replay import azure
from tests.benchmarks.mooncake import format_plot
from tests.benchmarks.traces import BLOCK, TracedRequest, hits, ideal_hits, mooncake
from tests.benchmarks.waste import waste
from tests.conftest import shared_data


def test_an_ideal_cache_finds_full_blocks_behind_what_it_knows() -> None:
    first = TracedRequest(0.0, tuple(range(3 * BLOCK + 4)), 1)
    longer = TracedRequest(1.0, (*range(2 * BLOCK), *range(100, 100 + BLOCK)), 1)
    assert ideal_hits([first]).num_found == 0
    assert ideal_hits([first, longer]).num_found == 2 * BLOCK
    whole = TracedRequest(2.0, tuple(range(3 * BLOCK)), 1)
    assert ideal_hits([first, whole]).num_found == 2 * BLOCK, "a token is left to compute"


def test_hits_in_mooncakes_conversations_are_near_the_ideal() -> None:
    requests = list(itertools.islice(mooncake(shared_data("mooncake_conversation.jsonl")), 1500))
    found, ideal = hits(requests, 60_000), ideal_hits(requests)
    assert found.rate >= ideal.rate - 0.02
    assert hits(requests, 3000).rate < found.rate


def test_blocks_waste_less_than_a_hundredth_in_azures_conversations() -> None:
    found = waste(azure(shared_data("azure_conv.csv"))[:1500])
    assert found.paged <= 0.01
    assert found.by_longest_output > 0.3


def test_the_plot_is_well_formed() -> None:
    ElementTree.fromstring(format_plot([(100, 0.1), (1000, 0.3), (9000, 0.35)], 0.36))
