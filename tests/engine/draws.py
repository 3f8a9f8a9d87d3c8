"""Looking at the logits that an engine's tokens are drawn from."""

from __future__ import annotations

import unittest.mock

import torch

from nereid.batch import SchedulerOutput, StepResult
from nereid.request import Request
from tests.engine.tiny import SteppedEngine


def draws(engine: SteppedEngine, requests: list[Request]) -> dict[int, list[torch.Tensor]]:
    """Of each request, the logits of every position that drew a token, in order."""
    seen: dict[int, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    logits_of, compute = engine.runner.model.logits, engine.compute
    plans: list[SchedulerOutput] = []

    def run(plan: SchedulerOutput) -> StepResult:
        plans.append(plan)
        return compute(plan)

    def record(hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(hidden)
        for row, row_logits in zip((row for row in plans[-1].scheduled if row.samples), logits, strict=True):
            seen[row.request_id].append(row_logits.clone())
        return logits

    with (
        unittest.mock.patch.object(engine, "compute", run),
        unittest.mock.patch.object(engine.runner.model, "logits", record),
    ):
        engine.run(requests)
    return seen
