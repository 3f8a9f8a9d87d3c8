"""What requests share of each other's prompts, through the scheduler: how much is computed, and that it is theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nereid.batch import SampledToken, SchedulerOutput, StepResult
from nereid.config import EngineConfig
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.prefix_cache import CacheRoot
from nereid.request import Request, SamplingParams
from nereid.scheduler import Scheduler

BLOCK = 16
HASH_PERIOD = 2**61 - 1  # integers that differ by it have one hash in CPython


def make_scheduler(num_blocks: int = 400, **settings: int) -> Scheduler:
    config = EngineConfig.from_mapping({"model": "x", "block_size": BLOCK, **settings})
    return Scheduler(config, KVCacheManager(num_blocks, BlockLayout(BLOCK)), 4096, ())


def make_request(request_id: int, prompt: tuple[int, ...], salt: str = "", max_tokens: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id, prompt, sampling, float(request_id), cache_salt=salt)


def run_step(scheduler: Scheduler) -> SchedulerOutput:
    plan = scheduler.schedule()
    sampled = tuple(SampledToken(row.request_id, 7) for row in plan.scheduled if row.samples)
    for advance in scheduler.update(plan, StepResult(plan.step, sampled)):
        if advance.finish_reason:
            scheduler.finish(advance.state)
    scheduler.check_integrity()
    return plan


def num_computed(scheduler: Scheduler) -> int:
    """Tokens computed until everything has ended."""
    count = 0
    for _ in range(1000):
        count += run_step(scheduler).num_scheduled_tokens
        if not scheduler.has_work:
            return count
    raise AssertionError("it does not end")


def num_cached(scheduler: Scheduler, request: Request) -> int:
    """Tokens found of a request that runs alone."""
    state = scheduler.add(request)
    num_computed(scheduler)
    return state.num_cached_tokens


@pytest.mark.parametrize("budget", [64, 512, 2048])
def test_a_prompt_that_comes_sixteen_times_at_once_is_computed_once(budget: int) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    shared = tuple(range(1000))
    for index in range(16):
        own = tuple(range(10_000 * (index + 1), 10_000 * (index + 1) + 32))
        scheduler.add(make_request(index, shared + own))
    assert num_computed(scheduler) <= 1000 + 16 * (32 + BLOCK)


def test_who_waits_for_a_prompt_takes_it_over_where_the_first_one_leaves() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    first = scheduler.add(make_request(1, tuple(range(640))))
    scheduler.add(make_request(2, tuple(range(700))))
    for _ in range(3):
        assert {row.request_id for row in run_step(scheduler).scheduled} == {1}
    scheduler.finish(first)
    assert num_computed(scheduler) == 700 - 3 * 64


@pytest.mark.parametrize("budget", range(1, BLOCK + 2))
def test_what_is_found_at_every_length_is_counted_to_the_token(budget: int) -> None:
    """However the prompt was cut: what is full of it, and all but its last token. What is not found is computed."""
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    for length in range(1, 2 * BLOCK + 2):
        prompt, salt = tuple(range(length)), str(length)
        assert num_cached(scheduler, make_request(3 * length, prompt, salt)) == 0
        found = min(length // BLOCK * BLOCK, length - 1)
        again = scheduler.add(make_request(3 * length + 1, prompt, salt))
        assert (num_computed(scheduler), again.num_cached_tokens) == (length - found, found)


@pytest.mark.parametrize("same", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_of_a_prompt_that_goes_on_otherwise_what_is_the_same_is_counted(same: int) -> None:
    scheduler = make_scheduler()
    for length in range(2 * BLOCK + 1, 3 * BLOCK + 2):
        for own in range(1, BLOCK + 2):
            salt = f"{length} {own}"
            scheduler.add(make_request(1, tuple(range(length)), salt))
            num_computed(scheduler)
            found = min(same, length // BLOCK * BLOCK)
            assert num_cached(scheduler, make_request(2, (*range(same), *range(1000, 1000 + own)), salt)) == found


def test_equal_hashes_are_not_equal_tokens() -> None:
    scheduler = make_scheduler()
    prompt = tuple(range(3, 67))
    other = (*prompt[:20], prompt[20] + HASH_PERIOD, *prompt[21:])
    assert hash(other) == hash(prompt) and other != prompt
    scheduler.add(make_request(1, prompt))
    num_computed(scheduler)
    assert num_cached(scheduler, make_request(2, other)) == 20
    assert num_cached(scheduler, make_request(3, prompt)) == 63


def test_ids_that_are_equal_modulo_256_are_others() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(1, (65,) * 40))
    num_computed(scheduler)
    assert num_cached(scheduler, make_request(2, (321,) * 40)) == 0


def test_what_was_evicted_while_a_request_waited_is_not_taken_for_found() -> None:
    scheduler = make_scheduler(num_blocks=11, max_num_seqs=1)  # ten blocks
    scheduler.add(make_request(1, tuple(range(64))))
    num_computed(scheduler)
    scheduler.add(make_request(2, tuple(range(1000, 1150))))  # takes all blocks
    waiting = scheduler.add(make_request(3, tuple(range(64))))
    num_computed(scheduler)
    assert waiting.num_cached_tokens == 0


def test_salts_and_adapters_are_kept_apart_by_type() -> None:
    roots = [
        CacheRoot("org_1", "2345"), CacheRoot("org_12345", ""), CacheRoot("org_12345"), CacheRoot("", "x"),
        CacheRoot("x"), CacheRoot("x", ""),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)
    scheduler = make_scheduler()
    prompt = tuple(range(64))
    scheduler.add(make_request(1, prompt, salt="org_1"))
    num_computed(scheduler)
    assert num_cached(scheduler, make_request(2, prompt, salt="org_12")) == 0
    assert num_cached(scheduler, make_request(3, prompt, salt="org_1")) == 63


def test_a_prompt_is_found_again_after_its_answer_and_to_the_token() -> None:
    scheduler = make_scheduler()
    prompt = tuple(range(40))
    scheduler.add(make_request(1, prompt, max_tokens=30))
    num_computed(scheduler)  # it publishes 64 tokens: the prompt, and 24 of the output
    assert num_cached(scheduler, make_request(2, (*prompt, *[7] * 20, 8, 9))) == 60
    told = replace(make_request(3, prompt), sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert num_cached(scheduler, told) == 0, "every position of its prompt has to be computed"
