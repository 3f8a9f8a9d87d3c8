"""What the pool is said to hold, it holds: in every arrangement of groups a request of the largest length runs to its
end alone in the pool and among others, and one token more is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from nereid.batch import BlockGroup
from nereid.config import EngineConfig
from nereid.errors import InvalidRequestError
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.request import Branching, FinishReason
from nereid.scheduler import Scheduler
from nereid.sequences import sequences_of
from tests.unit.scheduler_steps import EOS, make_request, run_step

FULL = BlockGroup()
GROUPS = {
    "full": (FULL,),
    "two full": (FULL, FULL),
    "full and window": (FULL, BlockGroup(window=9)),
    "full and windows": (FULL, BlockGroup(window=3), BlockGroup(window=3)),
    "window with sinks": (FULL, BlockGroup(window=5, num_sink_tokens=3)),
}
LONGEST = 60


def scheduler_of(
    groups: tuple[BlockGroup, ...], block_size: int, num_blocks: int, budget: int
) -> tuple[Scheduler, int]:
    """With the effective maximum length: the lesser of LONGEST and what the pool holds."""
    kv_cache = KVCacheManager(num_blocks, BlockLayout(block_size, groups, budget))
    limit = min(LONGEST, kv_cache.max_tokens)
    config = EngineConfig(model="x", block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=budget)
    return Scheduler(config, kv_cache, limit, (EOS,)), limit


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_requests_up_to_the_limit_end_and_longer_ones_are_refused(
    groups: tuple[BlockGroup, ...], block_size: int, budget: int
) -> None:
    """With short requests behind each long one."""
    least = 1 + BlockLayout(block_size, groups, budget).most_blocks_of_all(2)
    limits = set()
    for num_blocks in range(least, least + 25):
        scheduler, limit = scheduler_of(groups, block_size, num_blocks, budget)
        assert limit >= 2
        limits.add(limit)
        expected, ends = {}, {}
        request_id = 0
        for prompt_len in {max(1, limit - 2), limit - 1, limit, limit + 1, LONGEST + 1}:
            for max_tokens in (1, 2):
                request_id += 2
                request = make_request(request_id, prompt_len, max_tokens=max_tokens)
                if prompt_len < limit:
                    scheduler.add(request)
                    expected[request_id] = min(max_tokens, limit - prompt_len)
                else:
                    with pytest.raises(InvalidRequestError, match=f"at most {limit - 1} tokens"):
                        scheduler.add(request)
                scheduler.add(make_request(request_id + 1, 1, max_tokens=1))
                expected[request_id + 1] = 1
        for _ in range(2000):
            for advance in run_step(scheduler)[1]:
                if advance.finish_reason:
                    assert advance.finish_reason is FinishReason.LENGTH
                    ends[advance.state.request_id] = len(advance.state.output_token_ids)
            if not scheduler.has_work:
                break
        assert ends == expected
    assert len(limits) > 1


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_sequences_that_share_a_prompt_end_in_a_pool_for_one_of_them(
    groups: tuple[BlockGroup, ...], block_size: int
) -> None:
    """Each draws tokens of its own, so that none can share what follows."""
    least = 1 + BlockLayout(block_size, groups, 16).most_blocks_of_all(4)
    new_ids = itertools.count(-1, -1)
    for num_blocks in range(least, least + 8):
        scheduler, limit = scheduler_of(groups, block_size, num_blocks, 16)
        for prompt_len in (1, limit // 2, limit - 2, limit - 1):
            request = replace(make_request(prompt_len, prompt_len, max_tokens=limit), branching=Branching(3, 3))
            own, *others = sequences_of(request, new_ids, (EOS,))
            leader = scheduler.add(own, others)
            while scheduler.has_work:
                run_step(scheduler, draw=lambda request_id: 200 - request_id)
            states = [leader, *leader.siblings]
            assert [len(state.output_token_ids) for state in states] == [limit - prompt_len] * 3
