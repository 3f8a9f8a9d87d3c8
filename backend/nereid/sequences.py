"""Sequences: what a request is split into for the scheduler, and how its answer is put together again.

`sequences_of` makes of a request one for each sequence, under ids of their own. A TrackedRequest owns what is kept of a
request until its answer is complete: what each sequence was told, and what the request will be told about itself.

Invariant: an answer has n finished outputs, one for each sequence in it, of which the last alone is final.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nereid.request import FinishReason, Request, RequestOutput, RequestStats, SamplingParams, TokenLogprobs
from nereid.scheduling.beam_search import num_candidates
from nereid.scheduling.request_state import RequestState


def sequences_of(request: Request, new_ids: Iterator[int], eos_token_ids: Sequence[int]) -> tuple[Request, ...]:
    """The request as each of its sequences sees it: the first under the request's own id, the others under new ones.

    The prompt is told of once, by the first. What decides between sequences is told of all: logprobs.
    """
    branching, sampling = request.branching, request.sampling
    if branching.beam_width > 1:
        sampling = _beam_sampling(request, eos_token_ids)
    elif not branching.streams and sampling.logprobs is None:
        sampling = replace(sampling, logprobs=0)
    count = max(branching.best_of, branching.beam_width)
    first = request if sampling is request.sampling else replace(request, sampling=sampling)
    if count == 1:
        return (first,)
    others = replace(sampling, prompt_logprobs=None)
    siblings = [replace(request, request_id=next(new_ids), sampling=others) for _ in range(count - 1)]
    return (first, *siblings)


def _beam_sampling(request: Request, eos_token_ids: Sequence[int]) -> SamplingParams:
    """Nothing is drawn for a beam: its best next tokens are told."""
    asked = request.sampling
    stop_ids = {*asked.stop_token_ids, *(() if asked.ignore_eos else eos_token_ids)}
    return SamplingParams(
        temperature=0.0,
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        stop_token_ids=asked.stop_token_ids,
        ignore_eos=asked.ignore_eos,
        logprobs=max(num_candidates(request.branching.beam_width, len(stop_ids)), asked.logprobs or 0),
        prompt_logprobs=asked.prompt_logprobs,
    )


@dataclass(slots=True)
class _Sequence:
    """told: its outputs, where they are held until all sequences have ended.  end: its last one."""

    state: RequestState
    stats: RequestStats
    cumulative_logprob: float = 0.0
    told: list[RequestOutput] = field(default_factory=list)
    end: RequestOutput | None = None


class TrackedRequest:
    """A request on its way."""

    def __init__(self, request: Request, leader: RequestState) -> None:
        """leader: of its sequences, which the scheduler has taken."""
        self.request = request
        self.leader = leader
        own = RequestStats(request.arrival_time)
        self._sequences = {state.request_id: _Sequence(state, own) for state in (leader, *leader.siblings)}
        self._first = self._sequences[leader.request_id]
        self._first.stats = replace(own, num_prompt_tokens=len(request.prompt_token_ids))

    @property
    def sequence_ids(self) -> list[int]:
        return list(self._sequences)

    @property
    def unfinished_ids(self) -> list[int]:
        """Of the sequences that have not ended."""
        return [key for key, sequence in self._sequences.items() if sequence.end is None]

    def stats_of(self, sequence_id: int) -> RequestStats:
        """Of one sequence; the prompt is the first one's."""
        return self._sequences[sequence_id].stats

    @property
    def stats(self) -> RequestStats:
        """Of the whole request: the tokens of all sequences that were drawn or searched, told or not."""
        sequences = self._sequences.values()
        firsts = [s.stats.first_token_time for s in sequences if s.stats.first_token_time is not None]
        lasts = [s.stats.last_token_time for s in sequences if s.stats.last_token_time is not None]
        return replace(
            self._first.stats,
            first_token_time=min(firsts, default=None),
            last_token_time=max(lasts, default=None),
            num_output_tokens=sum(s.stats.num_output_tokens for s in sequences),
            num_preemptions=sum(s.state.num_preemptions for s in sequences),
            num_new_blocks=sum(s.state.num_new_blocks for s in sequences),
        )

    def scheduled(self, now: float) -> bool:
        """It takes part in a step; returns whether for the first time."""
        first = self._first
        if first.stats.first_scheduled_time is not None:
            return False
        num_found = first.state.num_cached_tokens
        first.stats = replace(first.stats, first_scheduled_time=now, num_cached_tokens=num_found)
        return True

    def advanced(self, sequence_id: int, num_tokens: int, now: float) -> None:
        """A step brought a sequence tokens."""
        sequence = self._sequences[sequence_id]
        sequence.stats = replace(
            sequence.stats,
            first_token_time=sequence.stats.first_token_time or now,
            last_token_time=now,
            num_output_tokens=sequence.stats.num_output_tokens + num_tokens,
        )

    def tell(self, sequence_id: int, output: RequestOutput) -> tuple[RequestOutput, ...]:
        """A sequence's next output; returns what can be told of the request now, labelled as its own."""
        sequence = self._sequences[sequence_id]
        sequence.cumulative_logprob += sum(told.logprob for told in output.logprobs)
        if output.finished:
            sequence.end = output
        ended = output.finished and not self.unfinished_ids
        if not self.request.branching.streams:
            sequence.told.append(output)
            return self._ranked() if ended else ()
        if sequence is not self._first:
            output = replace(output, request_id=self.request.request_id, sequence_index=sequence.state.sequence_index)
        if not output.finished:
            return (output,)
        total = sequence.cumulative_logprob if self.request.sampling.logprobs is not None else None
        return (replace(output, cumulative_logprob=total, stats=self.stats if ended else None, final=ended),)

    def _ranked(self) -> tuple[RequestOutput, ...]:
        """The n best sequences, whole. One that was broken off comes after those that ended by themselves, and one
        without a token after all others."""

        def rank(sequence: _Sequence) -> tuple[bool, bool, float]:
            broken_off = sequence.end is None or sequence.end.finish_reason is FinishReason.TIMEOUT
            return broken_off, not sequence.stats.num_output_tokens, -sequence.cumulative_logprob

        best = sorted(self._sequences.values(), key=rank)[: self.request.branching.n]  # stable: the lower index first
        wholes = [replace(joined(s.told), cumulative_logprob=s.cumulative_logprob) for s in best]
        return self.answer(wholes, joined(self._first.told).prompt_logprobs)

    def answer(
        self, wholes: Sequence[RequestOutput], prompt_logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[RequestOutput, ...]:
        """The whole answer at once. wholes: of its sequences, the best first."""
        told = self.request.sampling.logprobs is not None
        outputs = [
            replace(
                whole,
                request_id=self.request.request_id,
                sequence_index=index,
                logprobs=whole.logprobs if told else (),
                prompt_logprobs=() if index else prompt_logprobs,
            )
            for index, whole in enumerate(wholes)
        ]
        outputs[-1] = replace(outputs[-1], stats=self.stats, final=True)
        return tuple(outputs)


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """A sequence's outputs, at least one, as one."""
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(itertools.chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=tuple(itertools.chain.from_iterable(output.logprobs for output in outputs)),
        prompt_logprobs=next(filter(None, (output.prompt_logprobs for output in outputs)), ()),
    )
