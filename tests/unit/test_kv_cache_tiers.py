"""What goes to the host's memory and to disk, what comes back from there, and in which order it is done."""

from __future__ import annotations

import pytest

from nereid.batch import BlockGroup, LoadBlock, StoreBlock, SwapOut
from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.matching import Match
from tests.unit.kv_cache_steps import ROOT, Tokens, compute, make_cache, num_found, take


def test_a_block_that_takes_its_own_childs_place_on_the_host_is_found_there() -> None:
    cache = make_cache(3, on_host=1)
    tokens = Tokens(*range(9))
    compute(cache, 1, tokens)
    cache.free(1)
    take(cache, 2)
    assert num_found(cache, tokens) == 8, "one block on the device, the one behind it on the host"
    take(cache, 3)
    assert num_found(cache, tokens) == 4


WINDOWED = (BlockGroup(), BlockGroup(window=4))


def test_a_sequence_that_is_swapped_in_holds_nothing_that_has_left_its_window() -> None:
    cache = make_cache(10, *WINDOWED, on_host=10)
    tokens = Tokens(*range(9))
    cache.admit(1, ROOT, tokens, Match())
    cache.grow(1, 0, 7)
    cache.publish(1, tokens, 7)
    cache.preempt(1, tokens, 7)
    assert cache.admit(1, ROOT, tokens, cache.match(ROOT, tokens)) == 7
    assert cache.num_blocks - cache.num_free_blocks == 3, "two with all tokens, and one with the window's"


def test_what_the_next_token_does_not_look_at_is_not_swapped_out() -> None:
    cache = make_cache(10, *WINDOWED, on_host=10)
    tokens = Tokens(*range(9))
    cache.admit(1, None, tokens, Match())
    cache.grow(1, 0, 8)
    cache.preempt(1, tokens, 8)
    assert len(cache.take_ops()) == 3
    assert cache.admit(1, None, tokens, Match()) == 8
    assert cache.num_blocks - cache.num_free_blocks == 3, "two with all tokens, and one with the window's"


def test_without_room_a_sequence_starts_with_what_is_on_the_device_alone() -> None:
    cache = make_cache(7, *WINDOWED, on_host=10)
    compute(cache, 1, Tokens(*range(9)))
    cache.grow(1, 8, 9)
    take(cache, 1)  # the first block of the second group goes to the host
    compute(cache, 2, Tokens(50), root=None)
    assert cache.num_free_blocks == 0
    tokens = Tokens(*range(7), 50, 51)
    match = cache.match(ROOT, tokens)
    assert match.num_tokens == 7, "the copy of a block would do, without the one on the host"
    assert cache.admit(3, ROOT, tokens, match) == 0
    cache.check_integrity()


def names_on_disk(tokens: Tokens) -> list[str]:
    """Of all full blocks of a sequence."""
    cache = make_cache(10, on_disk=())
    compute(cache, 1, tokens)
    return [op.key.name for op in cache.store_all() if isinstance(op, StoreBlock)]


def test_what_is_read_from_disk_does_not_push_out_what_it_goes_on_from() -> None:
    tokens = Tokens(*range(9))
    cache = make_cache(3, on_disk=names_on_disk(tokens))
    compute(cache, 1, Tokens(*range(4)))
    cache.free(1)
    compute(cache, 2, Tokens(*range(50, 58)), root=None)
    match = cache.match(ROOT, tokens)
    assert match.num_tokens == 4 and cache.num_free_blocks == 1, "all is in use but what was found"
    assert not cache.restore(ROOT, tokens, match)
    assert num_found(cache, tokens) == 4
    cache.free(2)
    assert cache.restore(ROOT, tokens, match)
    cache.loaded(())
    assert num_found(cache, tokens) == 8


def test_what_is_read_from_disk_does_not_push_out_of_the_hosts_memory_what_it_goes_on_from() -> None:
    tokens = Tokens(*range(9))
    cache = make_cache(3, on_host=1, on_disk=names_on_disk(tokens))
    compute(cache, 1, Tokens(*range(4)))
    cache.free(1)
    take(cache, 3)  # its block goes to the host
    compute(cache, 2, Tokens(*range(50, 54)))
    cache.free(2)
    compute(cache, 3, Tokens(*range(60, 68)), root=None)
    match = cache.match(ROOT, tokens)
    assert match.num_tokens == 4 and cache.num_free_blocks == 1, "what is left could go to the host"
    assert cache.restore(ROOT, tokens, match)
    cache.loaded(())
    cache.check_integrity()
    cache.free(3)
    assert num_found(cache, tokens) == 8


def test_what_was_read_behind_a_block_that_could_not_be_is_found_again_with_it() -> None:
    """It waits among the blocks that can be evicted until the one before it is computed, by whomever."""
    tokens = Tokens(*range(17))
    names = names_on_disk(tokens)
    cache = make_cache(6, on_disk=names)
    assert cache.restore(ROOT, tokens, cache.match(ROOT, tokens))
    cache.loaded({next(op.key.name for op in cache.take_ops() if isinstance(op, LoadBlock))})
    assert num_found(cache, tokens) == 0 and cache.num_free_blocks == 6
    assert not cache.restore(ROOT, tokens, cache.match(ROOT, tokens)), "it is read again, or what is there already"
    compute(cache, 1, Tokens(*range(5)))
    assert num_found(cache, tokens) == 16
    cache.free(1)
    take(cache, 6)
    cache.check_integrity()
    assert num_found(cache, tokens) == 0 and not cache._pool.tree.find_root(ROOT), "what is out of reach is kept"


def kinds(cache: KVCacheManager) -> list[str]:
    """Of the operations since the last call."""
    return [type(op).__name__ for op in cache.take_ops()]


def test_the_room_of_a_swapped_tail_is_there_again_when_its_sequence_ends() -> None:
    cache, tokens = make_cache(4, on_host=1), Tokens(0, 1, 2)
    for request_id in range(2):
        compute(cache, request_id, tokens, root=None)
        cache.preempt(request_id, tokens, 3)
        assert kinds(cache) == ["SwapOut"]
        cache.free(request_id)
        cache.check_integrity()
    assert cache.admit(1, None, tokens, Match()) == 0, "it goes on with a tail of a sequence that has ended"


def test_a_host_block_that_was_copied_can_go_again() -> None:
    cache = make_cache(3, on_host=1)
    compute(cache, 1, Tokens(0, 1, 2, 3))
    cache.free(1)
    take(cache, 3)
    assert compute(cache, 2, Tokens(0, 1, 9)) == 2 and kinds(cache) == ["SwapOut", "SwapIn"]
    cache.check_integrity()
    cache.free(2)
    compute(cache, 3, Tokens(4, 5, 6, 7))
    cache.free(3)
    take(cache, 3)
    assert num_found(cache, Tokens(4, 5, 6, 7, 8)) == 4, "its room on the host was not to be had"
    assert num_found(cache, Tokens(0, 1, 2, 3, 8)) == 0


@pytest.mark.parametrize("swaps", [False, True], ids=["evicted", "preempted"])
def test_what_makes_room_on_the_host_is_written_to_disk_first(swaps: bool) -> None:
    cache = make_cache(3, on_host=1, on_disk=())
    compute(cache, 1, Tokens(0, 1, 2, 3))
    cache.free(1)
    take(cache, 3)
    assert kinds(cache) == ["SwapOut"]
    tokens = Tokens(4, 5, 6, 7)
    compute(cache, 2, tokens, root=None if swaps else ROOT)
    if swaps:
        cache.preempt(2, tokens, 4)
    else:
        cache.free(2)
        take(cache, 3)
    store, swap = cache.take_ops()
    assert isinstance(store, StoreBlock) and store.on_host and store.key.token_ids == (0, 1, 2, 3)
    assert isinstance(swap, SwapOut) and swap.host_block == store.block
    cache.check_integrity()


def test_a_block_is_written_to_disk_once() -> None:
    cache, tokens = make_cache(3, on_disk=()), Tokens(*range(9))
    for expected in (["StoreBlock"] * 2, []):
        compute(cache, 1, tokens)
        cache.free(1)
        take(cache, 3)
        assert kinds(cache) == expected
    assert not cache.store_all()


def test_what_could_not_be_read_is_not_read_again() -> None:
    tokens = Tokens(*range(9))
    names = names_on_disk(tokens)
    cache = make_cache(3, on_disk=names)
    assert cache.restore(ROOT, tokens, cache.match(ROOT, tokens))
    cache.loaded(names)
    assert not cache.restore(ROOT, tokens, cache.match(ROOT, tokens))
    compute(cache, 1, tokens)
    assert len(cache.store_all()) == 2, "it is not written again"


def test_what_was_read_behind_blocks_in_doubt_is_not_kept() -> None:
    tokens = Tokens(*range(9))
    cache = make_cache(3, on_disk=names_on_disk(tokens))
    compute(cache, 1, Tokens(*range(4)))
    assert cache.restore(ROOT, tokens, cache.match(ROOT, tokens))
    cache.discard(1)
    cache.loaded(())
    assert cache.held_blocks == set(cache.tables[1][0])
    cache.check_integrity()
