"""Plain data between the engine, the executor and the model runner: numbers and tuples only, picklable.

A plan (`SchedulerOutput`) sends a request's prompt and sampling parameters once, in the step that first schedules it;
afterwards only what changed. The executor keeps the tokens; the plan carries counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nereid.request import SamplingParams, TokenLogprobs

BlockIds = tuple[tuple[int, ...], ...]  # block ids by KV cache group


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the executor has not seen yet."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """The share of one request in a step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    new_block_ids: block ids appended to its block table, by group.  restarted: the table is emptied first (a request
    that comes back from preemption).  samples: the last of its tokens is scheduled, so that a new one is drawn.
    """

    request_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: BlockIds
    restarted: bool
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. finished_ids: requests that the executor forgets before the step."""

    step: int
    new_requests: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    finished_ids: tuple[int, ...]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(row.num_scheduled_tokens for row in self.scheduled)


@dataclass(frozen=True, slots=True)
class GuideMasks:
    """What the guides of a step allow, for those of its rows that sample and have one.

    bitmask: int32 words, [len(request_ids), ceil(vocabulary / 32)], in the machine's byte order; bit t % 32 of word
    t // 32 is set where token t is allowed.
    """

    step: int
    request_ids: tuple[int, ...]
    bitmask: bytes


class DrawFault(Enum):
    """Why no token could be drawn."""

    NOT_FINITE = "the logits are not finite"
    NONE_LEFT = "masks, biases and penalties leave none"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token. fault: why there is none (the id is then -1).  logprobs: where they were asked for."""

    request_id: int
    token_id: int
    fault: DrawFault | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of a request's prompt, positions from `start` on: of the tokens that stand there."""

    request_id: int
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew: one entry for each scheduled request that samples."""

    step: int
    sampled: tuple[SampledToken, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor has room for, known once it has started.

    num_blocks counts the null block.  bytes_per_block is for all layers.  group_block_sizes: tokens a block, by group.
    """

    num_blocks: int
    bytes_per_block: int
    group_block_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine, for metrics. num_blocks: of the KV cache, all that requests can have.  num_preemptions:
    since the start.  queue_age: seconds since the arrival of the request that waits longest for its first step; 0 where
    none waits."""

    num_running: int
    num_waiting: int
    num_blocks_in_use: int
    num_blocks: int
    num_preemptions: int
    queue_age: float

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.num_blocks_in_use / self.num_blocks
