"""RequestTracker: the requests on their way, and what becomes of them. Turns what steps brought into outputs.

Owns which request a sequence belongs to, and ends whatever is kept of a request elsewhere. Invariant: a request that
was added gets exactly one final output, and is then forgotten.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nereid.batch import DrawFault, SchedulerOutput, StepResult
from nereid.errors import NereidError, NoTokenError, NumericsError, RequestError
from nereid.guided.tracker import GuideTracker
from nereid.output_processor import OutputProcessor
from nereid.request import FinishReason, Request, RequestFailure, RequestOutput
from nereid.scheduler import Advance, Scheduler, SearchAdvance
from nereid.scheduling.beam_search import Hypothesis
from nereid.scheduling.due_times import DueTimes
from nereid.sequences import TrackedRequest, sequences_of
from nereid.statistics import EngineStatistics


class RequestTracker:
    """Requests by id, and by the ids of their sequences: the first has its request's, the others negative ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        outputs: OutputProcessor,
        guides: GuideTracker,
        due_times: DueTimes,
        statistics: EngineStatistics,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._guides = guides
        self._due_times = due_times
        self._statistics = statistics
        self._eos_token_ids = tuple(eos_token_ids)
        self._requests: dict[int, TrackedRequest] = {}
        self._by_sequence: dict[int, TrackedRequest] = {}
        self._new_ids = itertools.count(-1, -1)

    @property
    def request_ids(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. Raises NereidError where it is refused."""
        own, *others = sequences_of(request, self._new_ids, self._eos_token_ids)
        try:
            self._guides.add(own.request_id, own.sampling.guide)
            leader = self._scheduler.add(own, others)
        except NereidError:
            self._guides.drop(own.request_id)
            raise
        tracked = self._requests[request.request_id] = TrackedRequest(request, leader)
        for sequence in (own, *others):
            self._outputs.add(sequence)
            self._by_sequence[sequence.request_id] = tracked
        for sequence in others:
            self._guides.fork(own.request_id, sequence.request_id)
        self._due_times.watch(leader)
        self._statistics.accepted(request)

    def scheduled(self, plan: SchedulerOutput, now: float) -> None:
        """The rows of a plan are about to be computed."""
        self._statistics.scheduled(row.request_id for row in plan.scheduled)
        for row in plan.scheduled:
            tracked = self._by_sequence[row.request_id]
            if tracked.scheduled(now) and tracked.request.cache:
                self._statistics.looked_up(tracked.stats.num_prompt_tokens, tracked.stats.num_cached_tokens)

    def advance(self, plan: SchedulerOutput, result: StepResult, now: float) -> Iterator[RequestOutput]:
        """What a step brought the requests."""
        self._outputs.keep_prompt_logprobs(result.prompt_logprobs)
        for advance in self._scheduler.update(plan, result):
            yield from self._advance(advance, now)
        for search in self._scheduler.search():
            yield from self._advance_search(search, now)

    def _advance(self, advance: Advance, now: float) -> Iterator[RequestOutput]:
        sequence_id = advance.state.request_id
        if (tracked := self._by_sequence.get(sequence_id)) is None:
            return  # its request has ended in this step, by what became of another of its sequences
        try:
            if advance.fault is not None:
                raise _as_error(advance.fault, advance.state.num_tokens)
            complete = self._guides.advance(sequence_id, advance.token_id)
        except RequestError as error:
            yield self._end_failed(tracked, error)
            return
        reason = advance.finish_reason
        completes = complete and reason is not FinishReason.STOP
        self._count(tracked, sequence_id, 1, now)
        output = self._outputs.advance(
            sequence_id,
            advance.token_id,
            FinishReason.STOP if completes else reason,
            advance.logprobs,
            completes=completes,
        )
        if output.finished:
            self._scheduler.finish(advance.state)
        yield from self._told(tracked, tracked.tell(sequence_id, output))

    def _advance_search(self, search: SearchAdvance, now: float) -> Iterator[RequestOutput]:
        request_id = search.leader.request_id
        tracked = self._requests[request_id]
        self._count(tracked, request_id, search.num_tokens, now)
        if search.ended:
            yield from self._answer_search(tracked, FinishReason.LENGTH)

    def _count(self, tracked: TrackedRequest, sequence_id: int, num_tokens: int, now: float) -> None:
        self._statistics.advanced(tracked.stats_of(sequence_id), num_tokens, now)
        tracked.advanced(sequence_id, num_tokens, now)

    def break_off(self, request_id: int) -> Iterator[RequestOutput]:
        """End a request with what it has."""
        tracked = self._requests[request_id]
        if tracked.request.branching.beam_width > 1:
            yield from self._answer_search(tracked, FinishReason.TIMEOUT)
            return
        for sequence_id in tracked.unfinished_ids:
            output = self._outputs.end(sequence_id, FinishReason.TIMEOUT)
            yield from self._told(tracked, tracked.tell(sequence_id, output))

    def _answer_search(self, tracked: TrackedRequest, reason: FinishReason) -> tuple[RequestOutput, ...]:
        """The best hypotheses of a beam search; reason: why those end that did not by themselves."""
        request = tracked.request
        found = self._scheduler.hypotheses(tracked.leader)
        found += [Hypothesis()] * (request.branching.n - len(found))
        wholes = [
            replace(
                self._outputs.whole(request, hypothesis.token_ids, hypothesis.reason or reason),
                cumulative_logprob=hypothesis.total,
                logprobs=tuple(hypothesis.logprobs(request.sampling.logprobs or 0)),
            )
            for hypothesis in found
        ]
        return self._told(tracked, tracked.answer(wholes, self._outputs.take_prompt_logprobs(request.request_id)))

    def fail(self, request_id: int, error: NereidError) -> Iterator[RequestOutput]:
        """End a request with an error; nothing happens where it has ended."""
        if tracked := self._requests.get(request_id):
            yield self._end_failed(tracked, error)

    def failures(self, error: NereidError) -> tuple[RequestOutput, ...]:
        """What `fail` would give for each request; all are kept."""
        return tuple(replace(failed(i, error), stats=tracked.stats) for i, tracked in self._requests.items())

    def _told(self, tracked: TrackedRequest, outputs: tuple[RequestOutput, ...]) -> tuple[RequestOutput, ...]:
        """Outputs of a request, of which nothing is kept after the final one."""
        if outputs and outputs[-1].final:
            self._forget(tracked)
        return outputs

    def _end_failed(self, tracked: TrackedRequest, error: NereidError) -> RequestOutput:
        self._forget(tracked)
        return replace(failed(tracked.request.request_id, error), stats=tracked.stats)

    def _forget(self, tracked: TrackedRequest) -> None:
        self._scheduler.end(tracked.leader)
        for sequence_id in tracked.sequence_ids:
            self._outputs.drop(sequence_id)
            self._guides.drop(sequence_id)
            del self._by_sequence[sequence_id]
        self._due_times.forget(tracked.leader)
        del self._requests[tracked.request.request_id]
        self._statistics.finished(tracked.request, tracked.stats)


def failed(request_id: int, error: NereidError) -> RequestOutput:
    """The final output of a request that ends with an error."""
    return RequestOutput(request_id, failure=RequestFailure(error.code, str(error)), final=True)


def _as_error(fault: DrawFault, position: int) -> RequestError:
    kind = NumericsError if fault is DrawFault.NOT_FINITE else NoTokenError
    return kind(f"no token can be drawn at position {position}: {fault.value}")
