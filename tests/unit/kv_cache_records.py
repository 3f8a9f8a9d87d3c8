"""Records: which published blocks are there to be found, on the device and on the host, by the model's account.

Plain Python beside the KV cache manager: a list of what was published and not evicted since, searched by trying all.
"""

from __future__ import annotations

from collections.abc import Iterable

from nereid.kv_cache.layout import BlockLayout

Tokens = tuple[int, ...]
Found = tuple[object, Tokens, int]  # what a block is found by: root, all tokens up to its last, group
Age = tuple[int, int, int]  # when it fell out of use, and in which order of what did at once


class Records:
    """A published content lies on the device or on the host, never on both."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout, self._size = layout, layout.block_size
        self._groups = range(len(layout.groups))
        self.device: dict[Found, int] = {}
        self.on_device: dict[int, Found] = {}  # the same the other way round
        self.unused_since: dict[int, Age] = {}  # of blocks of the device that no sequence uses
        self.host: dict[Found, int] = {}  # the least recently used first
        self.on_host: dict[int, Found] = {}

    def __contains__(self, found: Found) -> bool:
        return found in self.device or found in self.host

    # ---- what can be found

    def visible(self, group: int, index: int, position: int) -> bool:
        """Whether the token at `position` looks at one of a table's block `index`."""
        rule, first = self._layout.groups[group], index * self._size
        return not rule.window or first + self._size > position + 1 - rule.window or first < rule.num_sink_tokens

    def needed(self, root: object, tokens: Tokens, count: int, position: int) -> list[Found]:
        """What the token at `position` looks at of the first `count` blocks."""
        return [
            (root, tokens[: (index + 1) * self._size], group)
            for group in self._groups
            for index in range(count)
            if self.visible(group, index, position)
        ]

    def longest_hit(self, root: object, tokens: Tokens) -> tuple[int, int]:
        """(full blocks, further tokens) of the longest beginning that need not be computed."""
        for count in range((len(tokens) - 1) // self._size, 0, -1):
            if all(found in self for found in self.needed(root, tokens, count, count * self._size)):
                return count, self._best_part(root, tokens, count * self._size)
        return 0, self._best_part(root, tokens, 0)

    def _best_part(self, root: object, tokens: Tokens, start: int) -> int:
        rest = tokens[start:-1][: self._size]
        siblings = {
            path
            for other, path, _ in [*self.device, *self.host]
            if other == root and len(path) == start + self._size and path[:start] == tokens[:start]
        }
        whole = [path for path in siblings if all((root, path, group) in self for group in self._groups)]
        return max(
            (n for path in whole for n in range(len(rest) + 1) if path[start : start + n] == rest[:n]), default=0
        )

    def node_exists(self, root: object, path: Tokens) -> bool:
        """Whether anything is kept of these tokens or of more behind them."""
        return any(other == root and known[: len(path)] == path for other, known, _ in [*self.device, *self.host])

    # ---- changes

    def publish(self, found: Found, block: int) -> None:
        """A block of the device holds it now, and the host need not."""
        assert found not in self.device, "one content is published twice"
        assert block not in self.on_device, "one block holds two contents"
        self.device[found] = block
        self.on_device[block] = found
        if found in self.host:
            self.forget_host(self.host[found])

    def forget(self, block: int) -> None:
        """A block of the device holds nothing that can be found."""
        self.unused_since.pop(block, None)
        if found := self.on_device.pop(block, None):
            del self.device[found]

    def offload(self, block: int, host_block: int) -> None:
        """What a block of the device held is on the host from now on, in the stead of what was there."""
        found = self.on_device[block]
        self.forget(block)
        self.forget_host(host_block)
        assert found not in self.host, "one content is on the host twice"
        self.host[found] = host_block
        self.on_host[host_block] = found

    def forget_host(self, host_block: int) -> None:
        if found := self.on_host.pop(host_block, None):
            del self.host[found]

    def now_used(self, blocks: Iterable[int]) -> None:
        """Somebody uses these blocks of the device."""
        for block in blocks:
            self.unused_since.pop(block, None)

    def touch(self, found: Found, now: int) -> None:
        """It was copied, which makes it the most recently used one."""
        if found in self.host:
            self.host[found] = self.host.pop(found)
        elif self.device[found] in self.unused_since:
            self.unused_since[self.device[found]] = (now, 0, 0)

    def detach(self, root: object, first_block: Tokens, used: set[int], nowhere: object) -> None:
        """What begins with a block is found no more; what is in use is kept in a place of its own."""
        for found in [*self.device, *self.host]:
            if found[0] != root or found[1][: self._size] != first_block:
                continue
            if found in self.host:
                self.forget_host(self.host[found])
                continue
            block = self.device[found]
            self.forget(block)
            if block in used:
                self.publish((nowhere, *found[1:]), block)
