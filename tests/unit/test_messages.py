"""Everything that crosses the engine's two queues and the executor seam survives pickling, equal to itself."""

from __future__ import annotations

import pickle

import pytest

from nereid.batch import Capacity, NewRequest, SampledToken, ScheduledRequest, SchedulerOutput, StepResult
from nereid.errors import ErrorCode
from nereid.request import (
    Cancel,
    Drain,
    FinishReason,
    Request,
    RequestFailure,
    RequestOutput,
    SamplingParams,
    Submit,
)

SAMPLING = SamplingParams(temperature=0.7, stop=("a", "b"), stop_token_ids=(3,), seed=2**64 - 1)
MESSAGES = [
    Submit(Request(1, (1, 2, 3), SAMPLING, 1.5, 2.5)),
    Cancel(1),
    Drain(9.0),
    RequestOutput(1, "text", 2),
    RequestOutput(1, "é", 1, FinishReason.STOP),
    RequestOutput(1, failure=RequestFailure(ErrorCode.UNAVAILABLE, "why")),
    SchedulerOutput(
        7,
        (NewRequest(1, (1, 2), SAMPLING),),
        (ScheduledRequest(1, 0, 2, ((4, 5),), restarted=False, samples=True),),
        (9,),
    ),
    StepResult(7, (SampledToken(1, 42), SampledToken(2, -1, "NaN"))),
    Capacity(100, 4096, (16,)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_pickling(message: object) -> None:
    copy = pickle.loads(pickle.dumps(message))
    assert copy == message and type(copy) is type(message)


def test_outputs_merge_to_what_they_were_one_by_one() -> None:
    merged = (
        RequestOutput(1, "a", 1).merge(RequestOutput(1, "", 1)).merge(RequestOutput(1, "b", 1, FinishReason.LENGTH))
    )
    assert merged == RequestOutput(1, "ab", 3, FinishReason.LENGTH) and merged.finished
