"""Everything that crosses the engine's two queues and the executor seam survives pickling, equal to itself."""

from __future__ import annotations

import pickle

import pytest

from nereid.batch import (
    BlockGroup,
    BlockKey,
    Capacity,
    CopyBlock,
    DrawFault,
    GuideMasks,
    LoadBlock,
    NewRequest,
    PromptLogprobs,
    SampledToken,
    ScheduledRequest,
    SchedulerOutput,
    StepResult,
    StoreBlock,
    SwapIn,
    SwapOut,
    TransferRates,
)
from nereid.errors import ErrorCode
from nereid.request import (
    Cancel,
    Drain,
    FinishReason,
    Request,
    RequestFailure,
    RequestOutput,
    RequestStats,
    SamplingParams,
    Submit,
    TokenLogprobs,
)

SAMPLING = SamplingParams(temperature=0.7, stop=("a", "b"), stop_token_ids=(3,), seed=2**64 - 1)
LOGPROBS = TokenLogprobs(5, -0.5, 1, ((5, -0.5), (9, -1.5)))
KEY = BlockKey("name", "parent", (1, 2), 0)
MESSAGES = [
    Submit(Request(1, (1, 2, 3), SAMPLING, 1.5, 2.5)),
    Cancel(1),
    Drain(9.0),
    RequestOutput(1, "text", (5, 6), (LOGPROBS, LOGPROBS), (LOGPROBS,)),
    RequestOutput(1, "é", (7,), finish_reason=FinishReason.STOP, stop_reason=7, stats=RequestStats(1.0, 2.0)),
    RequestOutput(1, failure=RequestFailure(ErrorCode.UNAVAILABLE, "why")),
    SchedulerOutput(
        7,
        (NewRequest(1, (1, 2), SAMPLING),),
        (ScheduledRequest(1, 0, 2, True, (0,), ((4, 5),)),),
        (9,),
        (CopyBlock(4, 5), SwapOut(4, 1), SwapIn(1, 5), StoreBlock(KEY, 4, on_host=False), LoadBlock(KEY, 5)),
    ),
    GuideMasks(7, (1,), bytes(8)),
    StepResult(
        7,
        (SampledToken(1, 42, logprobs=LOGPROBS), SampledToken(2, -1, DrawFault.NONE_LEFT)),
        (PromptLogprobs(3, 1, (LOGPROBS,)),),
        ("name",),
    ),
    Capacity(100, 4096, 16, (BlockGroup(64, 4),), 10, TransferRates(1.0, 2.0, 3.0), "fingerprint"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_pickling(message: object) -> None:
    copy = pickle.loads(pickle.dumps(message))
    assert copy == message and type(copy) is type(message)


def test_outputs_merge_to_what_they_were_one_by_one() -> None:
    merged = (
        RequestOutput(1, "a", (1,), (LOGPROBS,), (LOGPROBS,))
        .merge(RequestOutput(1, "", (2,), (LOGPROBS,)))
        .merge(RequestOutput(1, "b", (3,), (LOGPROBS,), finish_reason=FinishReason.STOP, stop_reason="x"))
    )
    assert merged == RequestOutput(
        1, "ab", (1, 2, 3), (LOGPROBS,) * 3, (LOGPROBS,), finish_reason=FinishReason.STOP, stop_reason="x"
    )
    assert merged.finished
