"""Plain data between the engine, the executor and the model runner: numbers and tuples only, picklable.

A plan (`SchedulerOutput`) sends a request's prompt and sampling parameters once, in the step that first schedules it;
afterwards only what changed. The executor keeps the tokens; the plan carries counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import repeat
from typing import NamedTuple

from nereid.request import SamplingParams, TokenLogprobs

BlockIds = tuple[tuple[int, ...], ...]  # block ids by KV cache group


@dataclass(frozen=True, slots=True)
class BlockKey:
    """What names a block beyond the process: which tokens it holds KV of, behind which others.

    name: a digest of everything that its contents depend on: model, layout, salt, adapter, all tokens up to its last.
    parent: the name of the block before it, or of the root.  token_ids: the block's own.  group: its KV cache group.
    """

    name: str
    parent: str
    token_ids: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy a block of the device to another one."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy a block of the device to one of the host's."""

    block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy a block of the host to one of the device's."""

    host_block: int
    block: int


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """Write a block to disk, on the device or on the host. It may fail in silence. patient: where many wait to be
    written, wait for them instead of giving the block up."""

    key: BlockKey
    block: int
    on_host: bool
    patient: bool = False


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Read a block of the device from disk. Where its file is not there or not right, the step's result says so."""

    key: BlockKey
    block: int


KVOp = CopyBlock | SwapOut | SwapIn | StoreBlock | LoadBlock


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A sequence that the executor has not seen yet. sequence_index: which of its request's it is."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    sequence_index: int = 0


class ScheduledRequest(NamedTuple):  # NOTE: there is one a row and step, and a dataclass takes longer to make
    """The share of one request in a step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    samples: the last of its tokens is scheduled, so that a new one is drawn. new_block_ids: what its block tables hold
    from index first_new_blocks on, by group; the entries before are as they were. Both are empty where all are.
    forked_from: a request of this step with the same prompt, from whose logits the first token is drawn; nothing is
    scheduled then. given_token_ids: its tokens from position first_given on, whatever the executor has there; empty:
    as the executor knows them.
    """

    request_id: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    first_new_blocks: tuple[int, ...] = ()
    new_block_ids: BlockIds = ()
    forked_from: int | None = None
    first_given: int = 0
    given_token_ids: tuple[int, ...] = ()


def rows_of_last_tokens(request_ids: Iterable[int], num_computed_tokens: Iterable[int]) -> Iterator[ScheduledRequest]:
    """A row for each request that goes on with its one token left; no news of it. In half the time that the class
    takes for so many calls."""
    others = (repeat(default) for default in ScheduledRequest._field_defaults.values())
    fields = zip(request_ids, num_computed_tokens, repeat(1), repeat(True), *others, strict=False)
    return map(partial(tuple.__new__, ScheduledRequest), fields)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. finished_ids: requests that the executor forgets before the step.  kv_ops: carried out in
    this order before the model runs, in a plan without tokens too."""

    step: int
    new_requests: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    finished_ids: tuple[int, ...]
    kv_ops: tuple[KVOp, ...] = ()

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
    """What a step drew: one entry for each scheduled request that samples. failed_loads: names of BlockKeys whose
    LoadBlock brought nothing; those blocks hold no KV."""

    step: int
    sampled: tuple[SampledToken, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failed_loads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """What the scheduler's side knows of a KV cache group: which tokens its layers look back at.

    window: a token sees the `window` latest ones, itself included; 0 is all.  num_sink_tokens: the first ones, which
    every token sees even so.
    """

    window: int = 0
    num_sink_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TransferRates:
    """Measured when the executor started. Bytes a second from device to host and back; tokens of prompts a second."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor has room for, known once it has started.

    num_blocks counts the null block.  bytes_per_block: of one block, whichever its group.  block_size: tokens a block.
    groups: in the order of the block tables.  num_host_blocks: room in the host's memory for blocks that were swapped
    out; the first is not used.  rates: None where nothing was measured.  fingerprint: of all that a block's bytes
    depend on beside its tokens.  stored_names: of the blocks on disk, other models' too; None where there is no disk.
    """

    num_blocks: int
    bytes_per_block: int
    block_size: int
    groups: tuple[BlockGroup, ...] = (BlockGroup(),)
    num_host_blocks: int = 0
    rates: TransferRates | None = None
    fingerprint: str = ""
    stored_names: frozenset[str] | None = None


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
