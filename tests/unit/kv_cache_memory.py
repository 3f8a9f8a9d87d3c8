"""ModelMemory: what every slot on the device, in the host's memory and in files holds, as an executor would leave it.

Plain Python beside the KV cache manager: carries out its operations one by one, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nereid.batch import CopyBlock, KVOp, LoadBlock, StoreBlock, SwapIn, SwapOut

Tokens = tuple[int, ...]
Written = tuple[int, object, Tokens]  # what a slot holds: KV cache group, whose, all tokens up to that one
Block = dict[int, Written]  # by offset; slots that were never written are not there


class ModelMemory:
    """`events` counts operations by kind."""

    def __init__(self, events: Counter[str]) -> None:
        self.device: dict[int, Block] = {}
        self.host: dict[int, Block] = {}
        self.files: dict[str, Block] = {}  # by the name of a BlockKey
        self._events = events

    def carry_out(self, ops: Iterable[KVOp], *, writes_fail: bool) -> set[str]:
        """Returns the names of what could not be read. writes_fail: no file is written, and nobody hears of it."""
        return {name for op in ops if (name := self._carry_out(op, writes_fail))}

    def _carry_out(self, op: KVOp, writes_fail: bool) -> str | None:
        self._events[type(op).__name__] += 1
        match op:
            case CopyBlock(source, target):
                self.device[target] = dict(self.device.get(source, {}))
            case SwapOut(block, host_block):
                self.host[host_block] = dict(self.device.get(block, {}))
            case SwapIn(host_block, block):
                self.device[block] = dict(self.host.get(host_block, {}))
            case StoreBlock(key, block, on_host):
                if not writes_fail:
                    self.files[key.name] = dict((self.host if on_host else self.device).get(block, {}))
            case LoadBlock(key, block):
                self.device[block] = dict(self.files.get(key.name, {}))
                return None if key.name in self.files else key.name
        return None

    def write(self, block: int, offset: int, written: Written) -> None:
        self.device.setdefault(block, {})[offset] = written

    def read(self, block: int, offset: int) -> Written | None:
        return self.device.get(block, {}).get(offset)
