"""BlockLayout: which blocks of a table hold what a token looks back at. Pure arithmetic on counts."""

from __future__ import annotations

from dataclasses import dataclass

from nereid.batch import BlockGroup


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """block_size: tokens a block.  groups: rules by KV cache group.  max_step_tokens: most tokens of a request that one
    step computes."""

    block_size: int
    groups: tuple[BlockGroup, ...] = (BlockGroup(),)
    max_step_tokens: int = 1 << 30

    def num_blocks(self, num_tokens: int) -> int:
        """The length of a table with slots for so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_sink_blocks(self, group: int) -> int:
        """The first blocks of a table that are kept for its sink tokens."""
        return self.num_blocks(self.groups[group].num_sink_tokens)

    def keeps(self, group: int, index: int) -> bool:
        """Whether the block of this index never lies behind the window."""
        return not self.groups[group].window or index < self.num_sink_blocks(group)

    def first_seen(self, group: int, position: int) -> int:
        """Index of the first block, sink tokens aside, that a token at `position` or a later one looks at."""
        window = self.groups[group].window
        return max(0, position - window + 1) // self.block_size if window else 0

    def leaves_at(self, group: int, num_left: int) -> int:
        """The position from which on the block of index `num_left` lies behind a group's window, and more than the sink
        tokens."""
        return (max(num_left, self.num_sink_blocks(group)) + 1) * self.block_size + self.groups[group].window - 1

    def live(self, group: int, num_blocks: int, position: int) -> list[int]:
        """Which of a table's first `num_blocks` blocks tokens from `position` on look at."""
        first = min(self.first_seen(group, position), num_blocks)
        return [*range(min(self.num_sink_blocks(group), first)), *range(first, num_blocks)]

    def most_blocks(self, group: int, num_tokens: int, num_computed: int = 0) -> int:
        """Most blocks that a request holds at once in one group, while its tokens from `num_computed` on up to
        `num_tokens` are computed."""
        whole, window = self.num_blocks(num_tokens), self.groups[group].window
        if not window:
            return whole
        step = min(self.max_step_tokens, num_tokens - num_computed)
        seen = self.num_blocks(window - 1 + step) + 1  # they may start in mid-block
        return min(whole, self.num_sink_blocks(group) + seen)

    def most_blocks_of_all(self, num_tokens: int) -> int:
        """The same over all groups."""
        return sum(self.most_blocks(group, num_tokens) for group in range(len(self.groups)))

    def max_tokens(self, num_blocks: int) -> int:
        """Most tokens of a request for which `num_blocks` blocks are surely enough."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.most_blocks_of_all(middle) <= num_blocks else (low, middle - 1)
        return low
