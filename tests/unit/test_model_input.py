"""From a plan to where a step's tokens are written and what they see, at every length around the edges of blocks."""

from __future__ import annotations

import math

import pytest
import torch

from nereid.batch import BlockGroup, NewRequest, ScheduledRequest, SchedulerOutput
from nereid.kv_memory.groups import KVCacheGroup
from nereid.kv_memory.storage import KVCacheStorage
from nereid.model_input import BatchState, ModelInput
from nereid.request import SamplingParams

SIZE = 4
LENGTHS = range(1, 4 * SIZE + 1)
SPARE = 9  # a block behind those that a sequence needs, which it was given ahead of time
TABLES = {1: (7, 3, 8, 2), 2: (5, 6, 1, 4)}
STORAGE = KVCacheStorage((KVCacheGroup((0,), BlockGroup(), 1, 2, SIZE, torch.float32),), 10, torch.device("cpu"))


def table_of(request_id: int, num_tokens: int) -> tuple[int, ...]:
    return (*TABLES[request_id][: math.ceil(num_tokens / SIZE)], SPARE)


def slots_of(request_id: int, positions: range) -> list[int]:
    return [TABLES[request_id][position // SIZE] * SIZE + position % SIZE for position in positions]


def build(*rows: tuple[int, int, int, tuple[int, ...]]) -> ModelInput:
    """rows: request, computed tokens, scheduled ones, its block table."""
    state = BatchState(1, "cpu")
    prompt = tuple(range(100, 100 + 6 * SIZE))
    new = tuple(NewRequest(row[0], prompt, SamplingParams()) for row in rows)
    scheduled = tuple(
        ScheduledRequest(request_id, computed, count, True, (0,), (table,))
        for request_id, computed, count, table in rows
    )
    state.apply(SchedulerOutput(1, new, scheduled, ()))
    return state.build(scheduled, STORAGE)


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_go_to_the_slots_of_their_positions_and_see_their_own_blocks(length: int) -> None:
    """Whole and as a last token alone, beside another sequence, whose row is not met."""
    other = LENGTHS[-1] - length + 1
    for computed in {0, length - 1}:
        rows = (1, computed, length - computed), (2, other - 1, 1)
        made = build(*((*row, table_of(row[0], row[1] + row[2])) for row in rows))
        written = [slot for row in rows for slot in slots_of(row[0], range(row[1], row[1] + row[2]))]
        (group,) = made.groups
        assert group.kv_write.slot_mapping.tolist() == written
        assert made.positions.tolist() == [*range(computed, length), other - 1]
        assert made.token_ids.tolist() == [100 + position for position in (*range(computed, length), other - 1)]
        assert made.hidden_rows.tolist() == [length - computed - 1, length - computed]
        assert group.attention.seq_lens.tolist() == [length, other]
        for row, (request_id, num_tokens) in zip(group.attention.block_tables, ((1, length), (2, other)), strict=True):
            needed = math.ceil(num_tokens / SIZE)
            assert row.tolist() == [*TABLES[request_id][:needed], *[0] * (len(row) - needed)]


@pytest.mark.parametrize("length", LENGTHS[::SIZE])
def test_a_position_behind_its_block_table_is_an_error_and_not_another_sequences_slot(length: int) -> None:
    table = TABLES[1][: length // SIZE]
    with pytest.raises(IndexError):
        build((1, length - 1, 1, table), (2, 0, 1, TABLES[2]))
