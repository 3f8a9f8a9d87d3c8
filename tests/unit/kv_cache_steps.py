"""Sequences computed at one go on a KV cache manager, without a scheduler or an executor."""

from __future__ import annotations

from collections.abc import Iterable

from nereid.batch import BlockGroup
from nereid.kv_cache.disk_index import DiskIndex
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.manager import KVCacheManager
from nereid.kv_cache.matching import Match
from nereid.kv_cache.prefix_cache import CacheRoot

ROOT = CacheRoot("")
SIZE = 4


class Tokens:
    """A sequence of given tokens."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        return self._token_ids[start:stop]


def make_cache(
    num_blocks: int, *groups: BlockGroup, on_host: int = 0, on_disk: Iterable[str] | None = None
) -> KVCacheManager:
    """num_blocks, on_host: those that can be handed out.  on_disk: names of blocks."""
    layout = BlockLayout(SIZE, groups or (BlockGroup(),))
    disk = None if on_disk is None else DiskIndex("a model", on_disk)
    return KVCacheManager(num_blocks + 1, layout, on_host + 1, disk)


def compute(cache: KVCacheManager, request_id: int, tokens: Tokens, root: CacheRoot | None = ROOT) -> int:
    """Admit a sequence, compute and publish all of it. Returns how many tokens were found."""
    found = cache.admit(request_id, root, tokens, cache.match(root, tokens))
    assert cache.grow(request_id, found, tokens.num_tokens) is not None
    cache.publish(request_id, tokens, tokens.num_tokens)
    return found


def num_found(cache: KVCacheManager, tokens: Tokens) -> int:
    return cache.match(ROOT, tokens).num_tokens


def take(cache: KVCacheManager, num_blocks: int) -> None:
    """Let somebody else write so many blocks."""
    cache.admit(99, None, Tokens(0), Match())
    assert cache.grow(99, 0, num_blocks * SIZE) is not None
    cache.free(99)
