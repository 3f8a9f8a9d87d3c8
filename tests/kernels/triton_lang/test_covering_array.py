"""The covering array of paged_attention's properties: complete, and few enough rows to run each time."""

from __future__ import annotations

import itertools

from tests.kernels.covering_array import covering_array, pairs_of
from tests.kernels.triton_lang.test_paged_attention import CROSSED

MAX_ROWS = 60


def test_every_two_properties_meet_in_few_rows() -> None:
    rows = covering_array(CROSSED)
    assert len(rows) <= MAX_ROWS
    met = set().union(*map(pairs_of, rows))
    for one, other in itertools.combinations(CROSSED, 2):
        for values in itertools.product(CROSSED[one], CROSSED[other]):
            assert (one, values[0], other, values[1]) in met
