"""A Hypothesis state machine: random submissions, steps, cancellations, preemptions and ends against the block pool.

Requests have priorities and tenants, and some have several sequences or beams; the pool is too small for them. After
each rule the books are checked whole; at the end everything is finished, within as many steps as there were tokens to
compute, and every block is free.
"""

from __future__ import annotations

import itertools
import pickle
import random
import unittest
from dataclasses import replace

from hypothesis import settings, stateful
from hypothesis import strategies as st

from nereid.batch import (
    CopyBlock,
    DrawFault,
    KVOp,
    LoadBlock,
    SampledToken,
    ScheduledRequest,
    StepResult,
    StoreBlock,
    SwapIn,
    SwapOut,
)
from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError, QueueFullError
from nereid.kv_cache.disk_index import DiskIndex
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.matching import Match
from nereid.request import Branching, Request, SamplingParams, TokenLogprobs
from nereid.scheduler import RequestState, Scheduler
from nereid.scheduling.seats import Seats
from nereid.scheduling.step_plan import StepPlan
from nereid.sequences import sequences_of

BLOCK, NUM_BLOCKS, BUDGET, MAX_SEQS, MAX_QUEUE, MAX_LEN, EOS = 4, 12, 10, 4, 6, 36, 2
AGEING_S = 2.0
Prefix = tuple[int, ...]
BEAMS = [Branching(width, width, width, early_stopping=early) for width in (2, 3, 6) for early in (False, True)]


class SchedulerMachine(stateful.RuleBasedStateMachine):
    """The model beside it: for each request, the tokens that it must have, and what the executor was told."""

    NUM_HOST_BLOCKS, DISK = 0, False

    def __init__(self) -> None:
        super().__init__()
        config = EngineConfig(
            model="x", block_size=BLOCK, max_num_batched_tokens=BUDGET, max_num_seqs=MAX_SEQS, max_queue_size=MAX_QUEUE,
            priority_ageing_ms=int(AGEING_S * 1000),
        )  # fmt: skip
        disk = DiskIndex("fingerprint", ()) if self.DISK else None
        self.kv_cache = KVCacheManager(NUM_BLOCKS, BlockLayout(BLOCK), self.NUM_HOST_BLOCKS, disk)
        self.scheduler = Scheduler(config, self.kv_cache, MAX_LEN, (EOS,))
        self.awaiting: set[RequestState] = set()  # in this step, for what others compute, or what is read from disk
        self._note_who_awaits(self.scheduler._seats)
        self.next_id = 0
        self.sibling_ids = itertools.count(-1, -1)
        self.states: dict[int, RequestState] = {}
        self.tables: dict[int, list[int]] = {}  # of the requests that the executor knows
        self.tokens: dict[int, list[int]] = {}  # likewise: what it takes for their tokens
        # What each slot of a block holds the KV of: a token and all before it. The same in the host's memory, and by
        # name on disk.
        self.memory: dict[int, list[Prefix]] = {block: [()] * BLOCK for block in range(NUM_BLOCKS)}
        self.host_memory: dict[int, list[Prefix]] = {}
        self.files: dict[str, list[Prefix]] = {}
        self.num_loads = 0

    def _note_who_awaits(self, seats: Seats) -> None:
        awaits = seats.awaits

        def noting(state: RequestState, match: Match, plan: StepPlan) -> bool:
            if answer := awaits(state, match, plan):
                self.awaiting.add(state)
            return answer

        seats.awaits = noting  # type: ignore[method-assign]

    @stateful.rule(
        prompt_len=st.integers(0, MAX_LEN + 1),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
        salt=st.sampled_from(["", "b", "c"]),
        first=st.integers(0, 2),
        cache=st.sampled_from([True, True, True, False]),
        priority=st.sampled_from([0, 0, 0, -1, 1, 3, -100, 100]),
        branching=st.sampled_from([*[Branching()] * 4, *(Branching(n, n) for n in (2, 3, 6)), *BEAMS]),
    )
    def submit(
        self,
        prompt_len: int,
        max_tokens: int,
        ignore_eos: bool,
        salt: str,
        first: int,
        cache: bool,
        priority: int,
        branching: Branching,
    ) -> None:
        self.next_id += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        prompt = tuple(range(prompt_len // 2)) + tuple(range(first, first + prompt_len - prompt_len // 2))
        request = Request(
            self.next_id, prompt, sampling, float(self.next_id), None, priority, cache_salt=salt, cache=cache,
            branching=branching,
        )  # fmt: skip
        queued = sum(not (s.leader or s.running or self.rests(s)) for s in self.states.values())
        places = MAX_QUEUE + MAX_SEQS - self.scheduler.num_running - queued
        refusable = self.refusable(salt) if places <= 0 else set()
        own, *others = sequences_of(request, self.sibling_ids, (EOS,))
        try:
            leader = self.scheduler.add(own, others)
            self.states.update((state.request_id, state) for state in (leader, *leader.siblings))
        except InvalidRequestError:
            assert not 1 <= prompt_len < MAX_LEN
            return
        except QueueFullError:
            assert places <= 0 and not refusable
            return
        assert 1 <= prompt_len < MAX_LEN and (places > 0 or refusable)
        displaced = self.scheduler.displaced()
        assert (displaced in refusable) if refusable else displaced is None
        if displaced:
            self.end_request(displaced)

    def refusable(self, salt: str) -> set[RequestState]:
        """Who may be refused in the stead of a new request of `salt` where the queue is full; nobody: the new one."""
        waiting: dict[str, list[RequestState]] = {}
        for state in self.states.values():
            if not state.known_to_executor and state.leader is None:
                waiting.setdefault(state.salt, []).append(state)
        share = max(1, MAX_QUEUE // len({salt, *(state.salt for state in self.states.values())}))
        most = max(map(len, waiting.values()), default=0)
        if len(waiting.get(salt, ())) >= share or most <= share:
            return set()
        return {max(states, key=lambda state: state.rank) for states in waiting.values() if len(states) == most}

    def front(self) -> int:
        """Of the best-ranked sequence of each tenant that has something to compute, the one that arrived first."""
        best: dict[str, tuple[float, int, int]] = {}
        for sequence_id, state in self.states.items():
            if not self.rests(state):
                request, index = state.request, state.sequence_index
                number = (state.leader or state).request_id
                rank = (request.arrival_time + request.priority * AGEING_S, 100 * number + index, sequence_id)
                best[request.cache_salt] = min(rank, best.get(request.cache_salt, rank))
        return min(best.values(), key=lambda rank: rank[1])[2]

    def rests(self, state: RequestState) -> bool:
        """A beam without a hypothesis, or with one that was computed while others are not."""
        group = self.scheduler._beams._groups.get(state.leader or state)
        return group is not None and (state not in group.carriers or state in group.found)

    @stateful.precondition(lambda self: self.scheduler.has_work)
    @stateful.rule(token=st.sampled_from([EOS, 5, 6, 7, 8]), failing=st.integers(0, 30))
    def step(self, token: int, failing: int) -> None:
        front = self.front() if self.states else None
        seated = {i for i, s in self.states.items() if s.running}
        streams = {i for i, s in self.states.items() if s.running and s.num_tokens == s.num_computed_tokens + 1}
        self.awaiting.clear()
        plan = self.scheduler.schedule()
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert plan.num_scheduled_tokens <= BUDGET
        scheduled = {row.request_id for row in plan.scheduled}
        loads = any(isinstance(op, LoadBlock) for op in plan.kv_ops)
        assert front is None or front in scheduled or loads, "the front must advance"
        assert {i for i in streams if self.states[i].running} <= scheduled, "a prompt stalls a stream"
        for request_id in plan.finished_ids:
            del self.tables[request_id], self.tokens[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self.tables, "a request was sent whole twice"
            self.tables[new.request_id] = []
            self.tokens[new.request_id] = list(new.prompt_token_ids)
            if new.request_id not in seated:  # else it was a beam's, by right of what waited then
                self.check_nobody_was_passed_over(self.states[new.request_id])
        failed = [name for op in plan.kv_ops if (name := self._carry_out(op, failing))]
        for row in plan.scheduled:
            self._write(row)
        self.check_forks(plan.scheduled)
        sampled = [self._follow(row, token, failing) for row in plan.scheduled]
        result = StepResult(plan.step, tuple(s for s in sampled if s is not None), failed_loads=tuple(failed))
        for advance in self.scheduler.update(plan, result):
            if advance.state.request_id in self.states:
                if advance.fault:
                    self.end_request(advance.state.leader or advance.state)
                elif advance.finish_reason:
                    self.end(advance.state)
        for search in self.scheduler.search():
            if search.ended:
                width = search.leader.request.branching.beam_width
                assert len(self.scheduler.hypotheses(search.leader)) == width
                self.end_request(search.leader)

    def check_forks(self, rows: tuple[ScheduledRequest, ...]) -> None:
        """They stand behind rows of their own requests that draw a first token too."""
        before: dict[int, ScheduledRequest] = {}
        for row in rows:
            if row.forked_from is not None:
                leader, state = before[row.forked_from], self.states[row.request_id]
                assert leader.samples and leader.forked_from is None and state.leader is self.states[row.forked_from]
                prompt_len = len(state.request.prompt_token_ids)
                assert row.num_computed_tokens == prompt_len == leader.num_computed_tokens + leader.num_scheduled_tokens
            before[row.request_id] = row

    def check_nobody_was_passed_over(self, started: RequestState) -> None:
        """Within a tenant, by a request that starts; but for who awaits something, and its other sequences."""
        for state in self.states.values():
            others = state.running or state.salt != started.salt or self.rests(state)
            awaits = (state.leader if state.waits_for_leader else state) in self.awaiting
            assert others or awaits or state.rank > started.rank, "passed over"

    def _write(self, row: ScheduledRequest) -> None:
        """What an executor does with a row's block table and tokens."""
        table, state = self.tables[row.request_id], self.states[row.request_id]
        for first, added in zip(row.first_new_blocks, row.new_block_ids, strict=True):
            table[first:] = added
        end = row.num_computed_tokens + row.num_scheduled_tokens
        if row.given_token_ids:
            self.tokens[row.request_id][row.first_given :] = row.given_token_ids
        assert tuple(self.tokens[row.request_id]) == state.token_ids(0, state.num_tokens), "others than it has"
        assert (row.num_scheduled_tokens > 0) == (row.forked_from is None)
        assert len(table) == -(-end // BLOCK), "more or fewer blocks than tokens need"
        for position in range(row.num_computed_tokens, end):
            self.memory[table[position // BLOCK]][position % BLOCK] = state.token_ids(0, position + 1)

    def _carry_out(self, op: KVOp, failing: int) -> str | None:
        """What an executor does to the memory; the name of what it could not read."""
        match op:
            case CopyBlock(source, target):
                self.memory[target] = list(self.memory[source])
            case SwapOut(block, host_block):
                self.host_memory[host_block] = list(self.memory[block])
            case SwapIn(host_block, block):
                self.memory[block] = list(self.host_memory[host_block])
            case StoreBlock(key, block, on_host):
                if failing % 5:  # else the write failed
                    self.files[key.name] = list((self.host_memory if on_host else self.memory)[block])
                    assert tuple(prefix[-1] for prefix in self.files[key.name]) == key.token_ids
            case LoadBlock(key, block):
                self.num_loads += 1
                self.memory[block] = list(self.files.get(key.name, [()] * BLOCK))
                return None if key.name in self.files else key.name
        return None

    def _follow(self, row: ScheduledRequest, token: int, failing: int) -> SampledToken | None:
        """What it reads, after all rows have been written, and what it draws."""
        table, state = self.tables[row.request_id], self.states[row.request_id]
        end = row.num_computed_tokens + row.num_scheduled_tokens
        held = [self.memory[table[position // BLOCK]][position % BLOCK] for position in range(end)]
        tokens = state.token_ids(0, end)
        assert held == [tokens[: position + 1] for position in range(end)], "the blocks hold what is not its own"
        assert row.samples == (end == state.num_tokens)
        if not row.samples:
            return None
        fault = DrawFault.NOT_FINITE if failing == row.request_id % 31 else None
        if fault:
            return SampledToken(row.request_id, -1, fault)
        self.tokens[row.request_id].append(token)
        return SampledToken(row.request_id, token, None, _told(state, token))

    def end(self, state: RequestState) -> None:
        self.scheduler.finish(state)
        del self.states[state.request_id]

    def end_request(self, leader: RequestState) -> None:
        self.scheduler.end(leader)
        for state in (leader, *leader.siblings):
            self.states.pop(state.request_id, None)

    @stateful.precondition(lambda self: self.states)
    @stateful.rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        state = self.states[data.draw(st.sampled_from(sorted(self.states)))]
        self.end_request(state.leader or state)

    @stateful.precondition(lambda self: self.scheduler.num_running)
    @stateful.rule()
    def preempt(self) -> None:
        self.scheduler.preempt_worst()

    @stateful.invariant()
    def books_are_right(self) -> None:
        self.scheduler.check_integrity()
        assert {state.request_id for state in self.scheduler.requests()} == set(self.states)

    def teardown(self) -> None:
        # The front is computed by at least a token a step, and never anew: nobody comes to get before it. A beam may
        # be, once for each token.
        steps = 1
        for state in self.states.values():
            num_tokens = len(state.request.prompt_token_ids) + state.max_tokens
            steps += num_tokens * (state.max_tokens if state.request.branching.beam_width > 1 else 1)
        before = self.num_loads
        for _ in range(10_000):
            if steps + self.num_loads - before <= 0:
                break
            steps -= 1
            if self.scheduler.has_work:
                self.step(5, failing=-1)
        assert not self.states and not self.tables, "something never finished"
        assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks
        self.kv_cache.check_integrity()


def _told(state: RequestState, token: int) -> TokenLogprobs | None:
    """Where a step tells logprobs: of the most probable tokens, any ones."""
    if (count := state.request.sampling.logprobs) is None:
        return None
    rng = random.Random(str((state.token_ids(0, state.num_tokens), token)))
    logprobs = sorted((-rng.random() for _ in range(count)), reverse=True)
    return replace(
        TokenLogprobs(token, -9.0, 9), top=tuple(zip(rng.sample(range(count + 1), count), logprobs, strict=True))
    )


class TieredMachine(SchedulerMachine):
    """With blocks in the host's memory, and on a disk whose writes may fail."""

    NUM_HOST_BLOCKS, DISK = 6, True


class DiskMachine(SchedulerMachine):
    """With a disk and nothing between it and the device."""

    DISK = True


def _case(machine: type[SchedulerMachine]) -> type[unittest.TestCase]:
    case: type[unittest.TestCase] = machine.TestCase
    case.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)  # type: ignore[attr-defined]
    return case


TestSchedulerMachine = _case(SchedulerMachine)
TestTieredMachine = _case(TieredMachine)
TestDiskMachine = _case(DiskMachine)
