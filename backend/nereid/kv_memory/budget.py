"""PoolBudget: how many blocks the pool gets, from the settings and from what of the memory is taken. Pure arithmetic.

The first of these settings that is given decides: num_blocks, kv_cache_bytes, gpu_memory_utilization. Where none is, a
GPU is used up to DEFAULT_GPU_UTILIZATION, and a pool in the machine's own memory, which others use too, gets
DEFAULT_HOST_BYTES, or less where there is not as much.

Invariant: a pool has room for a prompt of one token and one token of output, in every group, beside the null block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nereid.batch import Capacity
from nereid.config import EngineConfig
from nereid.errors import ConfigError
from nereid.kv_cache.layout import BlockLayout

DEFAULT_GPU_UTILIZATION = 0.9
DEFAULT_HOST_BYTES = 1 << 30
_LEAST_TOKENS = 2
_BOOK_BYTES, _TOKEN_BYTES = 1024, 64  # of the machine's memory: what is kept of a block, and of each token in it
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A device's memory before there is a pool, in bytes.

    total, available: as in MemoryReading.  held: by this process, the model's weights included.  to_come: what it will
    hold beyond that, and beside the pool, by what for.
    """

    total: int
    available: int
    held: int
    to_come: tuple[tuple[str, int], ...]

    @property
    def taken(self) -> int:
        return self.held + sum(size for _, size in self.to_come)

    @property
    def spare(self) -> int:
        """What is left of `available` when all has come; below zero where that is too little."""
        return self.available - sum(size for _, size in self.to_come)

    def __str__(self) -> str:
        parts = [("this process with the model's weights", self.held), *self.to_come]
        takers = ", ".join(f"{as_gib(size)} by {name}" for name, size in parts)
        return f"taken of {as_gib(self.total)}: {takers}; available now: {as_gib(self.available)}"


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks: the null block included.  decided_by: the setting, or "the default".  warning: where not all is as it
    was asked for, or may not stay so."""

    num_blocks: int
    decided_by: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """page_bytes: size of a block.  on_gpu: whether the pool lies in a GPU's memory."""

    config: EngineConfig
    layout: BlockLayout
    page_bytes: int
    on_gpu: bool

    @property
    def least_blocks(self) -> int:
        """The null block, and what a request needs that can run at all."""
        return 1 + self.layout.most_blocks_of_all(_LEAST_TOKENS)

    def asked_blocks(self) -> int | None:
        """What the settings say without a look at the memory. Raises ConfigError where that is too little."""
        config, least = self.config, self.least_blocks
        if config.num_blocks is not None:
            if config.num_blocks < least:
                raise ConfigError(f"num_blocks: got {config.num_blocks}; allowed: at least {least}{self._least_why}")
            return config.num_blocks
        if config.kv_cache_bytes is not None:
            asked = config.kv_cache_bytes // self.page_bytes
            if asked < least:
                allowed = f"at least {least * self.page_bytes}, {least} blocks of {self.page_bytes} bytes"
                got = f"{config.kv_cache_bytes}, which is {asked} blocks"
                raise ConfigError(f"kv_cache_bytes: got {got}; allowed: {allowed}{self._least_why}")
            return asked
        return None

    def max_model_len(self, trained_len: int) -> int:
        """Most tokens of a request that the settings allow, the pool's size included where they say it; it may turn out
        smaller. Raises ConfigError where that is too little."""
        asked, length = self.asked_blocks(), self.config.model_len(trained_len)
        return length if asked is None else min(length, self.layout.max_tokens(asked - 1))

    def size(self, memory: MemoryUse) -> PoolSize:
        """The pool that is to be made. Raises ConfigError where there is no room for it."""
        if self.config.host_cache_bytes and not self.on_gpu:
            memory = replace(memory, to_come=(*memory.to_come, ("host_cache_bytes", self.config.host_cache_bytes)))
        if (asked := self.asked_blocks()) is not None:
            return self._asked_size(asked, memory)
        share = self.config.gpu_memory_utilization
        decided_by = "the default" if share is None else f"gpu_memory_utilization {share}"
        if share is None and self.on_gpu:
            share = DEFAULT_GPU_UTILIZATION
        cost = self.page_bytes
        if share is None:
            wanted = DEFAULT_HOST_BYTES
        else:
            wanted = math.floor(memory.total * share) - memory.taken
            cost += 0 if self.on_gpu else _BOOK_BYTES + _TOKEN_BYTES * self.layout.block_size
        num_blocks = min(wanted, memory.spare) // cost
        if num_blocks < self.least_blocks:
            raise ConfigError(self._too_little(wanted, self.least_blocks * cost, memory))
        return PoolSize(num_blocks, decided_by, _more_than_spare(decided_by, wanted, memory))

    def _asked_size(self, num_blocks: int, memory: MemoryUse) -> PoolSize:
        name = "kv_cache_bytes" if self.config.num_blocks is None else "num_blocks"
        size, most = num_blocks * self.page_bytes, memory.total - memory.taken
        if size > most:
            unit = self.page_bytes if name == "num_blocks" else 1
            raise ConfigError(f"{name}: got {getattr(self.config, name)}; allowed: at most {most // unit}; {memory}")
        warning = _more_than_spare(name, size, memory)
        return PoolSize(num_blocks, name, warning and f"{warning}; when the pool fills, the system may end a process")

    def _too_little(self, wanted: int, least: int, memory: MemoryUse) -> str:
        left = f"left for the KV cache: {min(wanted, memory.spare)} bytes; allowed: at least {least}{self._least_why}"
        share = self.config.gpu_memory_utilization
        if share is None:
            return f"no room for a KV cache; {memory}; {left}"
        least_share = math.ceil((memory.taken + least) / memory.total * 1000) / 1000
        hint = f", gpu_memory_utilization {least_share:g}" if least <= memory.spare else ""
        return f"gpu_memory_utilization: got {share}; {memory}; {left}{hint}"

    @property
    def _least_why(self) -> str:
        return f" (the null block and a request of {_LEAST_TOKENS} tokens)"


def _more_than_spare(setting: str, size: int, memory: MemoryUse) -> str:
    """The warning; empty where there is no reason for one."""
    if size <= memory.spare:
        return ""
    return f"{setting} stands for {as_gib(size)}, but there is room for {as_gib(memory.spare)}: {memory}"


def describe_pool(capacity: Capacity, layout: BlockLayout, max_model_len: int) -> str:
    """The pool in a line: its blocks without the null block, the tokens that they hold in all groups, its bytes, and
    how many requests of max_model_len tokens it has room for at once where they share nothing."""
    num_blocks = capacity.num_blocks - 1
    num_tokens = num_blocks // len(layout.groups) * layout.block_size
    tenths = num_blocks * 10 // layout.most_blocks_of_all(max_model_len)
    return (
        f"KV cache: {num_blocks:,} blocks of {layout.block_size} tokens = {num_tokens:,} tokens, "
        f"{as_gib(capacity.num_blocks * capacity.bytes_per_block)}; "
        f"{tenths / 10:,.1f} requests of {max_model_len:,} tokens at once"
    )


def as_gib(size: int) -> str:
    """Bytes for people; small sizes in MiB."""
    return f"{size / _GIB:.2f} GiB" if abs(size) >= _GIB // 10 else f"{size / 2**20:.2f} MiB"
