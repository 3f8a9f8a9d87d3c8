"""find_match: how much of a sequence the prefix cache holds, to the token. Reads the tree, changes nothing.

A sequence may go on behind n full blocks where every layer has all that the next token looks back at: all blocks in a
group of full attention, the window's in a group with a window. Behind them, the tokens that the next block shares with
a known one are had by copying that block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nereid.kv_cache.block_pool import NULL_BLOCK
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.prefix_cache import CacheRoot, Node, PrefixCache, TokenIds


@dataclass(frozen=True, slots=True)
class Match:
    """nodes: of the full blocks that are found, from the first on.  partial: the node whose block is to be copied for
    its first num_partial tokens.  num_tokens: found in all.  next_block: (node behind which it stands, tokens) of the
    first full block that is not found, where the sequence has one to compute."""

    nodes: tuple[Node, ...] = ()
    partial: Node | None = None
    num_partial: int = 0
    num_tokens: int = 0
    next_block: tuple[Node, TokenIds] | None = None


def find_match(
    tree: PrefixCache, root: CacheRoot, token_ids: Sequence[int], layout: BlockLayout, before: Match | None = None
) -> Match:
    """token_ids: of the sequence; at least its last one is left to compute. What is in the host's memory counts too.

    before: what was found earlier of the same tokens, so that they are not compared again.
    """
    size, wanted = layout.block_size, token_ids[:-1]
    walked = tree.walk(root, wanted, size, before.nodes if before else ())
    count = _longest(walked, layout)
    nodes = walked[:count]
    last = nodes[-1] if nodes else tree.find_root(root)
    if last is None:
        return Match()
    rest = tuple(wanted[count * size : (count + 1) * size])
    groups = range(len(layout.groups))
    partial, num_partial = last.closest_child(rest, lambda child: all(_has(child, group) for group in groups))
    next_block = (last, rest) if len(rest) == size else None
    return Match(tuple(nodes), partial, num_partial, count * size + num_partial, next_block)


def found_blocks(match: Match, layout: BlockLayout, position: int) -> Iterator[tuple[Node, int, int]]:
    """(node, group, index) of the full blocks that tokens from `position` on look back at."""
    for group in range(len(layout.groups)):
        for index in layout.live(group, len(match.nodes), position):
            yield match.nodes[index], group, index


def _has(node: Node, group: int) -> bool:
    return node.blocks[group] != NULL_BLOCK or node.host_blocks[group] != NULL_BLOCK


def _longest(nodes: list[Node], layout: BlockLayout) -> int:
    """How many of the first nodes a sequence can go on behind. Each node is looked at once for each group."""
    most = len(nodes)
    for group, rule in enumerate(layout.groups):
        if not rule.window:
            most = next((index for index in range(most) if not _has(nodes[index], group)), most)
    num_held = {
        group: [0, *accumulate(_has(node, group) for node in nodes[:most])]  # of the first nodes, by how many
        for group, rule in enumerate(layout.groups)
        if rule.window
    }
    fits = (count for count in range(most, 0, -1) if all(_sees_all(layout, *of, count) for of in num_held.items()))
    return next(fits, 0)


def _sees_all(layout: BlockLayout, group: int, num_held: list[int], count: int) -> bool:
    """Whether the token behind `count` blocks has all blocks that it looks back at, those of sink tokens too."""
    first = layout.first_seen(group, count * layout.block_size)
    num_sinks = min(layout.num_sink_blocks(group), first)
    return num_held[num_sinks] == num_sinks and num_held[count] - num_held[first] == count - first
