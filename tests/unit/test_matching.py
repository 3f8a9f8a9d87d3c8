"""How much of a sequence is found where blocks are missing: against the plain definition, and how long it takes."""

from __future__ import annotations

import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nereid.batch import BlockGroup
from nereid.kv_cache.layout import BlockLayout
from nereid.kv_cache.matching import find_match
from nereid.kv_cache.prefix_cache import CacheRoot, Node, PrefixCache

ROOT = CacheRoot("")
GROUPS = st.builds(BlockGroup, st.sampled_from([0, 0, 1, 2, 5, 9, 40]), st.integers(0, 9))


def make_path(held: list[list[int]], size: int) -> tuple[PrefixCache, list[Node], list[int]]:
    """A tree with one path. held: by node and group, where its block is: 0 nowhere, 1 on the device, 2 on the host."""
    tree = PrefixCache(len(held[0]))
    nodes, node = [], tree.root(ROOT)
    for number, of_node in enumerate(held):
        node = tree.child(node, (number,) * size)
        node.blocks = [1 if place == 1 else 0 for place in of_node]
        node.host_blocks = [1 if place == 2 else 0 for place in of_node]
        nodes.append(node)
    return tree, nodes, [number for number in range(len(held) + 1) for _ in range(size)]


def longest(held: list[list[int]], layout: BlockLayout) -> int:
    """The definition: the most blocks behind which the next token finds all that it looks back at."""
    for count in range(len(held), 0, -1):
        seen = [(i, g) for g in range(len(layout.groups)) for i in layout.live(g, count, count * layout.block_size)]
        if all(held[index][group] for index, group in seen):
            return count
    return 0


@given(st.data(), st.lists(GROUPS, min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 30))
def test_as_many_blocks_are_found_as_the_definition_says(
    data: st.DataObject, groups: list[BlockGroup], size: int, num_nodes: int
) -> None:
    layout = BlockLayout(size, tuple(groups))
    places = st.sampled_from(data.draw(st.sampled_from([[0, 1], [0, 1, 1, 2], [0, *[1, 2] * 8]])))
    held = [[data.draw(places) for _ in groups] for _ in range(num_nodes)]
    tree, nodes, tokens = make_path(held, size)
    assert find_match(tree, ROOT, tokens, layout).nodes == tuple(nodes[: longest(held, layout)])


def num_calls(window_blocks: int, num_nodes: int = 2000) -> int:
    """How many functions a search calls where no window has all its blocks."""
    size = 4
    layout = BlockLayout(size, (BlockGroup(), BlockGroup(window_blocks * size)))
    held = [[1, int(index % window_blocks > 0)] for index in range(num_nodes)]
    tree, _, tokens = make_path(held, size)
    events = Counter[str]()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        match = find_match(tree, ROOT, tokens, layout)
    finally:
        sys.setprofile(None)
    assert not match.nodes
    return events["call"] + events["c_call"]


def test_a_search_takes_no_longer_for_a_larger_window() -> None:
    assert num_calls(500) <= 1.2 * num_calls(10)
