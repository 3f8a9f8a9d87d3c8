"""The block pool and the block tables over it."""

from __future__ import annotations

import pytest

from nereid.batch import BlockGroup
from nereid.kv_cache.block_pool import NULL_BLOCK, BlockPool
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.matching import Match


def test_allocates_all_blocks_but_the_null_block() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    assert blocks is not None and sorted(blocks) == [1, 2, 3, 4] and NULL_BLOCK not in blocks
    assert pool.num_free == 0 and pool.num_in_use == 4


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(5)
    pool.allocate(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1) or ()
    pool.share(block)
    pool.release([block])
    assert pool.num_in_use == 1
    pool.release([block])
    assert pool.num_in_use == 0


def test_releasing_or_sharing_a_free_block_is_an_error() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="block 1"):
        pool.release([1])
    with pytest.raises(ValueError, match="block 1"):
        pool.share(1)


def test_integrity_sees_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="1 owners counted, 0 exist"):
        pool.check_integrity([])


class Tokens:
    """A sequence with the tokens 0, 1, 2 ..."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(range(start, stop))


def test_a_table_grows_by_exactly_the_blocks_it_needs() -> None:
    kv_cache = KVCacheManager(10, BlockLayout(4))
    kv_cache.admit(7, None, Tokens(1), Match())
    sizes = []
    for num_tokens in range(1, 13):
        sizes.append(kv_cache.grow(7, num_tokens - 1, num_tokens))
        kv_cache.check_integrity()
    assert sizes == [1, 0, 0, 0] * 3
    kv_cache.free(7)
    assert kv_cache.num_free_blocks == kv_cache.num_blocks


def test_groups_have_tables_of_their_own_over_one_pool() -> None:
    kv_cache = KVCacheManager(10, BlockLayout(4, (BlockGroup(), BlockGroup())))
    for request_id in (1, 2):
        kv_cache.admit(request_id, None, Tokens(12), Match())
    assert kv_cache.grow(1, 0, 9) == 6
    assert kv_cache.grow(2, 0, 9) is None  # three blocks are left, six are needed
    kv_cache.check_integrity()
    assert kv_cache.max_tokens == 16
