"""PrefixCache: an exact tree over the full blocks that are kept, so that no prompt's beginning is computed twice.

A node stands for the tokens of one block behind those of its parent, and holds its KV: a block for each KV cache group,
or none where that was given up. Roots are told apart by CacheRoot. Tokens are compared, never their hashes alone, so a
hit is exact; children are kept in order, so that the one that shares most tokens with a prompt is found by bisection.

The tree is one owner of each block that it holds; a block that has no other can be evicted, and is while it stands in
the order of eviction. Invariants: that order is from the least recently used one on, and leaves come before their
parents, since whoever gives blocks up gives up the last ones first; a node is kept while it has a block, a child or a
pin. Every change costs O(1) a block, beside the bisection among siblings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nereid.kv_cache.block_pool import NULL_BLOCK

TokenIds = tuple[int, ...]

_MOST_LOOKED_AT = 32


@dataclass(frozen=True, slots=True)
class CacheRoot:
    """Whose prefixes may be shared: those of requests with the same salt and adapter. None is not the empty text."""

    salt: str
    adapter: str | None = None


class Node:
    """One block of tokens. Changed by the prefix cache and the tiers behind it alone.

    blocks, host_blocks: by KV cache group, on the device and in the host's memory; NULL_BLOCK: none.  num_pins: of the
    sequences of which it is the last node.  detached: nobody finds it any more.  name: see BlockKey; made where it is
    needed.
    """

    __slots__ = (
        "blocks", "children", "detached", "host_blocks", "name", "num_pins", "order", "parent", "root", "token_ids",
    )  # fmt: skip

    def __init__(self, parent: Node | None, root: CacheRoot, token_ids: TokenIds, num_groups: int) -> None:
        self.parent = parent
        self.root = root
        self.token_ids = token_ids
        self.children: dict[TokenIds, Node] = {}
        self.order: list[TokenIds] = []  # the children's tokens, sorted
        self.blocks = [NULL_BLOCK] * num_groups
        self.host_blocks = [NULL_BLOCK] * num_groups
        self.num_pins = 0
        self.detached: bool = parent is not None and parent.detached
        self.name: str | None = None

    @property
    def idle(self) -> bool:
        """Nothing needs it."""
        return not (self.children or self.num_pins or any(self.blocks) or any(self.host_blocks))

    @property
    def linked(self) -> bool:
        """Whether it was neither removed nor detached, so that it is found; then so are those before it."""
        return not self.detached and self.parent is not None and self.parent.children.get(self.token_ids) is self

    def closest_child(self, token_ids: Sequence[int], fits: Callable[[Node], bool]) -> tuple[Node | None, int]:
        """Of the children that fit, the one that shares most leading tokens with `token_ids`, and how many.

        Of those that share some, no more than the _MOST_LOOKED_AT closest are looked at.
        """
        wanted = tuple(token_ids)
        right = bisect_left(self.order, wanted)
        left = right - 1
        for _ in range(_MOST_LOOKED_AT):  # in sorted order, nobody shares more than a neighbour
            before = _num_common(self.order[left], wanted) if left >= 0 else 0
            behind = _num_common(self.order[right], wanted) if right < len(self.order) else 0
            if not (before or behind):
                break
            left, right, place = (left - 1, right, left) if before >= behind else (left, right + 1, right)
            if fits(child := self.children[self.order[place]]):
                return child, max(before, behind)
        return None, 0


def _num_common(a: TokenIds, b: TokenIds) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class PrefixCache:
    """The trees of all roots."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._roots: dict[CacheRoot, Node] = {}
        self._places: dict[int, tuple[Node, int]] = {}  # node and group by block
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        """Whether the tree holds a block of the device."""
        return block in self._places

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody but the tree owns."""
        return len(self._evictable)

    @property
    def evictable(self) -> set[int]:
        """Those blocks."""
        return set(self._evictable)

    @property
    def cached(self) -> list[tuple[Node, int, int]]:
        """(node, group, block) of all blocks of the device that can be found; what was published last comes first."""
        return [(node, group, block) for block, (node, group) in reversed(self._places.items()) if not node.detached]

    @property
    def blocks(self) -> Iterator[int]:
        """All blocks of the device that the tree holds."""
        return iter(self._places)

    def root(self, key: CacheRoot) -> Node:
        """The root of a tree, which is made where there is none; to be pinned, or it is lost at the next removal."""
        node = self._roots.get(key)
        if node is None:
            node = self._roots[key] = Node(None, key, (), self._num_groups)
        return node

    def walk(
        self, key: CacheRoot, token_ids: Sequence[int], block_size: int, before: Sequence[Node] = ()
    ) -> list[Node]:
        """The nodes of the full blocks that `token_ids` begins with, as far as they are known. before: the first of
        them at an earlier time."""
        nodes = list(before)
        while nodes and not nodes[-1].linked:
            nodes.pop()
        node = nodes[-1] if nodes else self._roots.get(key)
        for start in range(len(nodes) * block_size, len(token_ids) - block_size + 1, block_size):
            node = node.children.get(tuple(token_ids[start : start + block_size])) if node else None
            if node is None:
                break
            nodes.append(node)
        return nodes

    def find_root(self, key: CacheRoot) -> Node | None:
        return self._roots.get(key)

    def child(self, parent: Node, token_ids: TokenIds) -> Node:
        """The child of `parent` with these tokens, which is made where there is none."""
        node = parent.children.get(token_ids)
        if node is None:
            node = parent.children[token_ids] = Node(parent, parent.root, token_ids, self._num_groups)
            insort(parent.order, token_ids)
        return node

    def pin(self, node: Node) -> None:
        node.num_pins += 1

    def unpin(self, node: Node) -> None:
        node.num_pins -= 1
        self.prune(node)

    def attach(self, node: Node, group: int, block: int) -> None:
        """The node holds a block from now on, which somebody else owns too; the caller counts the tree as an owner."""
        node.blocks[group] = block
        self._places[block] = (node, group)

    def place_of(self, block: int) -> tuple[Node, int]:
        return self._places[block]

    def now_used(self, block: int) -> None:
        """Somebody beside the tree owns a block of the tree now."""
        self._evictable.pop(block, None)

    def now_unused(self, block: int) -> None:
        """Nobody but the tree owns it any more."""
        self._evictable[block] = None

    def evict(self) -> tuple[Node, int, int]:
        """Take away the block that is to go first: its node and group, and the block. `prune` is to follow."""
        block, _ = self._evictable.popitem(last=False)
        node, group = self._places.pop(block)
        node.blocks[group] = NULL_BLOCK
        return node, group, block

    def prune(self, node: Node | None) -> None:
        """Remove a node that nothing needs, and its parents likewise."""
        while node is not None and node.idle:
            if node.parent is None:
                if self._roots.get(node.root) is node:
                    del self._roots[node.root]
            else:
                self._unlink(node)
            node = node.parent

    @staticmethod
    def _unlink(node: Node) -> None:
        parent = node.parent
        if parent is not None and parent.children.get(node.token_ids) is node:
            del parent.children[node.token_ids]
            del parent.order[bisect_left(parent.order, node.token_ids)]

    def detach(self, node: Node) -> tuple[list[Node], list[int]]:
        """Let nobody find a node, nor what is below it, any more. Returns all these nodes, and the blocks that only the
        tree owned, which it gives up; what is in use stays so, and is given up like others."""
        self._unlink(node)
        self.prune(node.parent)
        nodes, given_up = [node], []
        for node in nodes:  # which grows
            node.detached = True
            nodes += node.children.values()
            for group, block in enumerate(node.blocks):
                if block in self._evictable:
                    del self._evictable[block], self._places[block]
                    node.blocks[group] = NULL_BLOCK
                    given_up.append(block)
        return nodes, given_up

    def check_integrity(self) -> None:
        """Raise AssertionError where nodes and books disagree. Of detached nodes only the blocks are looked at."""
        for block, (node, group) in self._places.items():
            assert node.blocks[group] == block, f"block {block} is not its node's"
        assert set(self._evictable) <= set(self._places), "an evictable block is in no node"
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            assert sorted(node.children) == node.order, "children out of order"
            assert not node.idle and not node.detached, f"an idle or detached node is kept: {node.token_ids}"
            for tokens, child in node.children.items():
                assert child.parent is node and child.token_ids == tokens, "a child is not its parent's"
            for group, block in enumerate(node.blocks):
                assert block == NULL_BLOCK or self._places[block] == (node, group), f"block {block} is nowhere"
            nodes += node.children.values()
