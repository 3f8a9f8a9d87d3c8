"""Beams: which sequence carries which hypothesis of its request's beam search. Owns the searches.

A request has as many sequences as its beams are wide. At first its leader alone carries one, the prompt; the others
rest. When all carriers of a step have been computed, the search says which hypotheses go on. The first that goes on
out of a carrier stays with it; others go to sequences without one, which share the carrier's blocks from then on, or,
where it has lost them or there is no seat, wait like any preempted request.

Invariants: a carrier that has been computed rests until all others of its search have, so that whoever does not rest
has a token to compute; it may lose its seat meanwhile, and is computed anew only as what goes on out of it. While a
search goes on, one of its sequences does not rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nereid.batch import SampledToken
from nereid.request import TokenLogprobs
from nereid.scheduling.beam_search import BeamSearch, Hypothesis, Move
from nereid.scheduling.request_state import RequestState
from nereid.scheduling.seats import Seats
from nereid.scheduling.tenants import Tenants


@dataclass(frozen=True, slots=True)
class SearchAdvance:
    """What a step brought one beam search: so many of its hypotheses were computed.  ended: none goes on, and
    `Beams.best` is final."""

    leader: RequestState
    num_tokens: int
    ended: bool


@dataclass(slots=True, eq=False)
class _Group:
    """carriers: of the search's live hypotheses, in their order.  found: what a step told of those computed so far."""

    states: tuple[RequestState, ...]
    search: BeamSearch
    carriers: list[RequestState]
    found: dict[RequestState, TokenLogprobs]


class Beams:
    """The beam searches of the requests that have one, by leader."""

    def __init__(self, seats: Seats, tenants: Tenants) -> None:
        self._seats = seats
        self._tenants = tenants
        self._groups: dict[RequestState, _Group] = {}
        self._changed: dict[RequestState, _Group] = {}  # some of their carriers were computed in this step

    def add(self, leader: RequestState) -> None:
        """A request that was queued; nothing happens where it is not searched for."""
        sampling, branching = leader.request.sampling, leader.request.branching
        if branching.beam_width > 1:
            search = BeamSearch(branching, leader.stop_ids, sampling.min_tokens, leader.max_tokens)
            self._groups[leader] = _Group((leader, *leader.siblings), search, [leader], {})

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, state: RequestState) -> bool:
        """Whether a sequence belongs to a search."""
        return (state.leader or state) in self._groups

    def remove(self, leader: RequestState) -> None:
        """A request has ended; nothing happens where it is not searched for."""
        self._groups.pop(leader, None)
        self._changed.pop(leader, None)

    def best(self, leader: RequestState) -> list[Hypothesis]:
        """The best hypotheses so far, as many as the request wants, or as there are."""
        return self._groups[leader].search.best()

    def found(self, state: RequestState, token: SampledToken) -> None:
        """A step computed a carrier's last token, and tells the best ones that may follow."""
        assert token.logprobs is not None, "a beam's tokens come with their logprobs"
        leader = state.leader or state
        group = self._changed[leader] = self._groups[leader]
        group.found[state] = token.logprobs

    def go_on(self) -> Iterator[SearchAdvance]:
        """After a step: the searches whose carriers have all been computed make theirs."""
        changed, self._changed = self._changed, {}
        for leader, group in changed.items():
            if len(group.found) == len(group.carriers):
                yield self._step(leader, group)
            else:
                for state in group.found:
                    self._tenants.rest(state)

    def _step(self, leader: RequestState, group: _Group) -> SearchAdvance:
        num_tokens = len(group.carriers)
        moves = group.search.advance([group.found[state].top for state in group.carriers])
        group.found = {}
        if moves:
            self._carry_on(group, moves)
        return SearchAdvance(leader, num_tokens, ended=not moves)

    def _carry_on(self, group: _Group, moves: Sequence[Move]) -> None:
        sources = [group.carriers[move.parent] for move in moves]
        outputs = [[*source.output_token_ids, move.token_id] for source, move in zip(sources, moves, strict=True)]
        group.carriers = _carriers(group.states, sources)
        for state in group.carriers:
            self._tenants.rouse(state)
        for state, source, output in zip(group.carriers, sources, outputs, strict=True):
            state.go_on_with(output)
            if state is not source:
                self._seats.follow(source, state)
        for state in set(group.states).difference(group.carriers):
            self._tenants.rest(state)
            self._seats.dismiss(state)


def _carriers(states: Sequence[RequestState], sources: Sequence[RequestState]) -> list[RequestState]:
    """Who carries a hypothesis out of each source: the source itself the first one, and of the others rather those with
    a seat where the source has blocks to share."""
    free = sorted((state for state in states if state not in sources), key=lambda state: not state.running)
    first = {source: index for index, source in reversed(list(enumerate(sources)))}
    rest = [index for index, source in enumerate(sources) if first[source] != index]
    carriers = list(sources)
    for index, state in zip(sorted(rest, key=lambda index: not sources[index].running), free, strict=False):
        carriers[index] = state
    return carriers
