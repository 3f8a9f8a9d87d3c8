"""The block pool and the block tables over it."""

from __future__ import annotations

import pytest

from nereid.kv_cache.block_pool import NULL_BLOCK, BlockPool
from nereid.kv_cache.manager import KVCacheManager


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


def test_a_table_grows_by_exactly_the_blocks_it_needs() -> None:
    kv_cache = KVCacheManager(10, (4,))
    sizes = []
    for num_tokens in range(1, 13):
        added = kv_cache.grow(7, num_tokens)
        assert added is not None
        sizes.append(len(added[0]))
        kv_cache.check_integrity()
    assert sizes == [1, 0, 0, 0] * 3
    kv_cache.free(7)
    assert kv_cache.usage == 0.0


def test_groups_have_tables_of_their_own_over_one_pool() -> None:
    kv_cache = KVCacheManager(10, (4, 8))
    added = kv_cache.grow(1, 9)
    assert added is not None and [len(blocks) for blocks in added] == [3, 2]
    assert kv_cache.grow(2, 9) is None  # four blocks are left, five are needed
    kv_cache.check_integrity()
    assert kv_cache.max_tokens == 16
