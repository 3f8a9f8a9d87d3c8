"""What goes when blocks run out: the least recently used first, leaves before their parents, nothing that is in use."""

from __future__ import annotations

import pytest

from nereid.batch import BlockGroup
from tests.unit.kv_cache_steps import ROOT, Tokens, compute, make_cache, num_found, take


def test_what_a_truncation_gives_up_goes_last_block_first() -> None:
    cache = make_cache(4)
    tokens = Tokens(*range(13))
    compute(cache, 1, tokens)
    cache.truncate(1, 0)
    assert num_found(cache, tokens) == 12
    take(cache, 2)
    assert num_found(cache, tokens) == 8, "a block in the middle went before the one behind it"


@pytest.mark.parametrize("on_host", [0, 2])
def test_every_block_that_is_left_is_found(on_host: int) -> None:
    """Evictions take the last blocks, of what was released first: none costs more than itself."""
    branches = [(*range(8), *range(100 * branch, 100 * branch + 8)) for branch in (1, 2)]
    for num_taken in range(1, 7):
        cache = make_cache(6, on_host=on_host)
        for request_id, tokens in enumerate(branches):
            compute(cache, request_id, Tokens(*tokens))
        for request_id in range(2):
            cache.free(request_id)
        take(cache, num_taken)
        found = {node for tokens in branches for node in cache.match(ROOT, Tokens(*tokens, 9)).nodes}
        assert len(found) == 6 - num_taken + min(num_taken, on_host)
        assert cache.num_free_blocks == 6
        cache.check_integrity()


def test_what_was_found_before_is_not_taken_for_found() -> None:
    cache = make_cache(4)
    tokens = Tokens(*range(13))
    compute(cache, 1, tokens)
    found = cache.match(ROOT, tokens)
    cache.discard(1)  # while the sequence still uses the blocks
    assert found.num_tokens == 12 and cache.match(ROOT, tokens, found).num_tokens == 0
    cache.free(1)
    compute(cache, 2, tokens)
    found = cache.match(ROOT, tokens)
    cache.free(2)
    take(cache, 4)
    assert found.num_tokens == 12 and cache.match(ROOT, tokens, found).num_tokens == 0
    compute(cache, 3, Tokens(*range(9)))
    assert cache.match(ROOT, tokens, found).nodes == cache.match(ROOT, tokens).nodes != found.nodes[:2]


def test_where_the_closest_block_has_gone_in_one_group_the_next_one_is_copied() -> None:
    cache = make_cache(9, BlockGroup(), BlockGroup(window=4))
    compute(cache, 1, Tokens(0, 1, 2, 3, 4, 5, 6, 7, 8))
    cache.grow(1, 8, 9)  # in the second group, the first block is behind the window now
    compute(cache, 2, Tokens(0, 1, 9, 9))
    take(cache, 1)
    assert num_found(cache, Tokens(0, 1, 2, 3, 4)) == 2
