"""A storm of warnings shows a few, and how many it hid."""

from __future__ import annotations

import logging

import pytest

from nereid.kv_memory.limited_log import LimitedLog


def test_a_storm_is_cut_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    warnings = LimitedLog(logging.getLogger("nereid.test"), burst=2, period_s=60, clock=lambda: now)
    for number in range(1000):
        warnings.warning("block %d", number)
    now += 59
    warnings.warning("still hidden")
    now += 1
    warnings.warning("%s again", "block 7")
    warnings.warning("last")
    hidden = " (999 more such warnings were not shown)"
    assert caplog.messages == ["block 0", "block 1", "block 7 again" + hidden, "last"]
