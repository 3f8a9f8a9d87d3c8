"""BlockTransfer: carries out a plan's KV operations: copies of blocks on the device, to the host, to disk, and back.

Owns the host's pages and the disk store. Always holds: operations take effect as if one after the other, in the order
given; bytes are moved as they are; a load that fails changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from nereid.batch import BlockKey, CopyBlock, KVOp, LoadBlock, StoreBlock, SwapIn, SwapOut
from nereid.kv_memory.disk_store import DiskStore
from nereid.kv_memory.storage import KVCacheStorage
from nereid_kernels.block_ops import copy_blocks

_PATIENCE_S = 5.0  # of a store that waits for room
_CLOSE_S = 5.0  # for what still waits to be written at the end
_TRIAL_BYTES = 16 << 20  # of blocks that are swapped to measure how fast that goes
_TRIALS = 4
_TRIAL_S = 0.02  # none is begun after so long
_LOAD_AGE_NS = 1000  # a conversation's blocks are loaded first to last: the last ones are to be removed first


class BlockTransfer:
    """For one thread alone."""

    def __init__(
        self, storage: KVCacheStorage, num_host_blocks: int, disk: DiskStore | None = None, backend: str = "auto"
    ) -> None:
        """backend: which kernels copy blocks on the device."""
        self._pages = storage.pages
        # Pinned where the device is a GPU, which then copies by itself. Else it takes no memory before it is used.
        shape = (num_host_blocks, self._pages.shape[1])
        self._host = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pages.is_cuda)
        self._disk = disk
        self._backend = backend

    @property
    def num_blocks(self) -> int:
        return len(self._pages)

    @property
    def num_host_blocks(self) -> int:
        return len(self._host)

    @property
    def page_bytes(self) -> int:
        return self._pages.shape[1]

    def run(self, ops: Iterable[KVOp]) -> tuple[str, ...]:
        """Carry out `ops`. Returns the names of the loads that failed, whose blocks are as they were."""
        failed = []
        used_ns = time.time_ns()
        for step in joined(ops):
            match step:
                case SwapOut(block, host_block):
                    _move(self._host[host_block], self._pages[block])
                case SwapIn(host_block, block):
                    _move(self._pages[block], self._host[host_block])
                case StoreBlock():
                    self._store(step)
                case LoadBlock(key, block):
                    used_ns -= _LOAD_AGE_NS
                    if not self._load(key, block, used_ns):
                        failed.append(key.name)
                case _:
                    self._copy(step)
        return tuple(failed)

    def synchronize(self) -> None:
        """Wait for the copies that a GPU still makes by itself."""
        if self._pages.is_cuda:
            torch.cuda.current_stream(self._pages.device).synchronize()

    def close(self) -> None:
        """Write to disk what waits for it, within some seconds."""
        if self._disk:
            self._disk.close(_CLOSE_S)

    def _copy(self, copies: list[CopyBlock]) -> None:
        pairs = torch.tensor([(op.source, op.target) for op in copies], device=self._pages.device)
        copy_blocks(self._pages, pairs, backend=self._backend)

    def _store(self, op: StoreBlock) -> None:
        if self._disk:
            self.synchronize()  # the host's page may still be on its way
            page = (self._host if op.on_host else self._pages)[op.block]
            wait_s = _PATIENCE_S if op.patient else 0.0
            self._disk.store(op.key, lambda target: _move(_tensor(target), page, wait=True), wait_s)

    def _load(self, key: BlockKey, block: int, used_ns: int) -> bool:
        data = self._disk.load(key, used_ns) if self._disk else None
        if data is None:
            return False
        _move(self._pages[block], _tensor(data), wait=True)
        return True


def joined(ops: Iterable[KVOp]) -> Iterator[list[CopyBlock] | SwapOut | SwapIn | StoreBlock | LoadBlock]:
    """`ops` in order; copies on the device that follow each other as lists, in none of which one's target is named by
    another."""
    copies: list[CopyBlock] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for op in ops:
        copy = op if isinstance(op, CopyBlock) else None
        if copies and (copy is None or {copy.source, copy.target} & targets or copy.target in sources):
            yield copies
            copies, sources, targets = [], set(), set()
        if copy is None:
            yield op  # type: ignore[misc]  # it is no CopyBlock
        elif copy.source != copy.target:
            copies.append(copy)
            sources.add(copy.source)
            targets.add(copy.target)
    if copies:
        yield copies


def _move(target: torch.Tensor, source: torch.Tensor, *, wait: bool = False) -> None:
    """Copy one page. On a GPU in the order of its other work, unless the caller has to `wait`."""
    if target.is_cuda or source.is_cuda:
        target.copy_(source, non_blocking=not wait)
    else:
        # One plain copy: to wake torch's threads takes longer than a page does.
        target.numpy()[:] = source.numpy()


def _tensor(data: bytearray | memoryview) -> torch.Tensor:
    """The same memory."""
    return torch.frombuffer(data, dtype=torch.uint8)


def swap_rates(transfer: BlockTransfer) -> tuple[float, float] | None:
    """Bytes a second from the device to the host, and back; None where the host has no pages.

    Moves some blocks out and back in, which leaves all as it was but the host's pages: to be called before these are
    used. Takes 10 to 50 ms.
    """
    count = min(transfer.num_blocks, transfer.num_host_blocks, max(1, _TRIAL_BYTES // transfer.page_bytes))
    if not count:
        return None
    out, back = [SwapOut(i, i) for i in range(count)], [SwapIn(i, i) for i in range(count)]
    transfer.run([*out, *back])  # not to measure how long the system takes to find memory
    end = time.perf_counter() + _TRIAL_S
    times = [(_seconds(transfer, out), _seconds(transfer, back))]
    while len(times) < _TRIALS and time.perf_counter() < end:
        times.append((_seconds(transfer, out), _seconds(transfer, back)))
    out_s, back_s = map(min, zip(*times, strict=True))  # the least: whatever else the machine did is not in it
    return count * transfer.page_bytes / out_s, count * transfer.page_bytes / back_s


def _seconds(transfer: BlockTransfer, ops: Iterable[KVOp]) -> float:
    transfer.synchronize()
    start = time.perf_counter()
    transfer.run(ops)
    transfer.synchronize()
    return time.perf_counter() - start
