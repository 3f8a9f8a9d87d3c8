"""A Hypothesis state machine: random submissions, steps, cancellations, preemptions and ends against the block pool.

Requests have priorities and tenants; the pool is too small for them. After each rule the books are checked whole; at
the end everything is finished, within as many steps as there were tokens to compute, and every block is free.
"""

from __future__ import annotations

import pickle

from hypothesis import settings, stateful
from hypothesis import strategies as st

from nereid.batch import DrawFault, SampledToken, ScheduledRequest, StepResult
from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError, QueueFullError
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import Request, SamplingParams
from nereid.scheduler import RequestState, Scheduler

BLOCK, NUM_BLOCKS, BUDGET, MAX_SEQS, MAX_QUEUE, MAX_LEN, EOS = 4, 12, 10, 4, 6, 36, 2
AGEING_S = 2.0


class SchedulerMachine(stateful.RuleBasedStateMachine):
    """The model beside it: for each request, the tokens that it must have, and what the executor was told."""

    def __init__(self) -> None:
        super().__init__()
        config = EngineConfig(
            model="x", block_size=BLOCK, max_num_batched_tokens=BUDGET, max_num_seqs=MAX_SEQS, max_queue_size=MAX_QUEUE,
            priority_ageing_ms=int(AGEING_S * 1000),
        )  # fmt: skip
        self.kv_cache = KVCacheManager(NUM_BLOCKS, (BLOCK,))
        self.scheduler = Scheduler(config, self.kv_cache, MAX_LEN, (EOS,))
        self.next_id = 0
        self.states: dict[int, RequestState] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    @stateful.rule(
        prompt_len=st.integers(0, MAX_LEN + 1),
        max_tokens=st.integers(1, 20),
        ignore_eos=st.booleans(),
        salt=st.sampled_from(["", "b", "c"]),
        priority=st.sampled_from([0, 0, 0, -1, 1, 3, -100, 100]),
    )
    def submit(self, prompt_len: int, max_tokens: int, ignore_eos: bool, salt: str, priority: int) -> None:
        self.next_id += 1
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        request = Request(
            self.next_id, tuple(range(prompt_len)), sampling, float(self.next_id), None, priority, cache_salt=salt
        )
        places = MAX_QUEUE + MAX_SEQS - self.scheduler.num_running - self.scheduler.num_waiting
        refusable = self.refusable(salt) if places <= 0 else set()
        try:
            self.states[self.next_id] = self.scheduler.add(request)
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
            self.end(displaced)

    def refusable(self, salt: str) -> set[RequestState]:
        """Who may be refused in the stead of a new request of `salt` where the queue is full; nobody: the new one."""
        waiting: dict[str, list[RequestState]] = {}
        for state in self.states.values():
            if not state.known_to_executor:
                waiting.setdefault(state.salt, []).append(state)
        share = max(1, MAX_QUEUE // len({salt, *(state.salt for state in self.states.values())}))
        most = max(map(len, waiting.values()), default=0)
        if len(waiting.get(salt, ())) >= share or most <= share:
            return set()
        return {max(states, key=lambda state: state.rank) for states in waiting.values() if len(states) == most}

    def front(self) -> int:
        """Of the best-ranked request of each tenant, the one that arrived first."""
        best: dict[str, tuple[float, int]] = {}
        for request_id, state in self.states.items():
            request = state.request
            rank = (request.arrival_time + request.priority * AGEING_S, request_id)
            best[request.cache_salt] = min(rank, best.get(request.cache_salt, rank))
        return min(request_id for _, request_id in best.values())

    @stateful.precondition(lambda self: self.scheduler.has_work)
    @stateful.rule(token=st.sampled_from([EOS, 5, 6, 7, 8]), failing=st.integers(0, 30))
    def step(self, token: int, failing: int) -> None:
        front = self.front() if self.states else None
        streams = {i for i, s in self.states.items() if s.running and s.num_tokens == s.num_computed_tokens + 1}
        plan = self.scheduler.schedule()
        assert pickle.loads(pickle.dumps(plan)) == plan
        assert plan.num_scheduled_tokens <= BUDGET
        scheduled = {row.request_id for row in plan.scheduled}
        assert front is None or front in scheduled, "the front must advance"
        assert {i for i in streams if self.states[i].running} <= scheduled, "a prompt stalls a stream"
        for request_id in plan.finished_ids:
            del self.computed[request_id], self.tables[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self.computed, "a request was sent whole twice"
            self.computed[new.request_id], self.tables[new.request_id] = 0, []
            self.check_nobody_was_passed_over(self.states[new.request_id])
        sampled = [self._follow(row, token, failing) for row in plan.scheduled]
        result = StepResult(plan.step, tuple(s for s in sampled if s is not None))
        for advance in self.scheduler.update(plan, result):
            if advance.finish_reason or advance.fault:
                self.end(advance.state)

    def check_nobody_was_passed_over(self, started: RequestState) -> None:
        """Within a tenant, by a request that starts."""
        for state in self.states.values():
            assert state.running or state.salt != started.salt or state.rank > started.rank, "passed over"

    def _follow(self, row: ScheduledRequest, token: int, failing: int) -> SampledToken | None:
        """What an executor does with a row, on counts alone."""
        if row.restarted:
            self.computed[row.request_id], self.tables[row.request_id] = 0, []
        assert row.num_computed_tokens == self.computed[row.request_id] and row.num_scheduled_tokens > 0
        self.computed[row.request_id] += row.num_scheduled_tokens
        table = self.tables[row.request_id]
        table += row.new_block_ids[0]
        assert len(table) == -(-self.computed[row.request_id] // BLOCK), "more or fewer blocks than tokens need"
        assert row.samples == (self.computed[row.request_id] == self.states[row.request_id].num_tokens)
        if not row.samples:
            return None
        fault = DrawFault.NOT_FINITE if failing == row.request_id % 31 else None
        return SampledToken(row.request_id, -1 if fault else token, fault)

    def end(self, state: RequestState) -> None:
        self.scheduler.finish(state)
        del self.states[state.request_id]

    @stateful.precondition(lambda self: self.states)
    @stateful.rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(self.states[data.draw(st.sampled_from(sorted(self.states)))])

    @stateful.precondition(lambda self: self.scheduler.num_running)
    @stateful.rule()
    def preempt(self) -> None:
        self.scheduler.preempt_worst()

    @stateful.invariant()
    def books_are_right(self) -> None:
        self.scheduler.check_integrity()
        assert {state.request_id for state in self.scheduler.requests()} == set(self.states)

    def teardown(self) -> None:
        # The front is computed by at least a token a step, and never anew: nobody comes to get before it.
        steps = sum(len(s.request.prompt_token_ids) + s.max_tokens for s in self.states.values()) + 1
        for _ in range(steps):
            if self.scheduler.has_work:
                self.step(5, failing=-1)
        assert not self.states and not self.computed, "something never finished"
        assert self.kv_cache.usage == 0.0
        self.kv_cache.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
