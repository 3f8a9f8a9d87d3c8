"""A reply's values as arrays: the shapes that each kind of deployment's outputs have."""

from __future__ import annotations

import numpy as np
import pytest

from nereid.server.arrays import OutputShape, array_of, output_shapes
from nereid.server.reply import Rows
from nereid.server.tensors import OUTPUTS

ROWS = Rows(((7, 5), (4,)), 9)


@pytest.mark.parametrize(("size", "expected"), [(0, [1, 1, 2]), (4, [1, 2, 3])])
def test_a_text_has_no_leading_dimension_as_tensorrt_llms_clients_expect(size: int, expected: list[int]) -> None:
    outputs = [spec.as_config(optional=False) for spec in OUTPUTS]
    shapes = output_shapes({"max_batch_size": size, "output": outputs})
    assert [shapes[name].num_dims for name in ("text_output", "output_ids", "output_log_probs")] == expected
    assert [shapes[name].has_rows for name in ("text_output", "output_ids", "output_log_probs")] == [False, False, True]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (OutputShape(1, has_rows=False), [7, 5, 4]),
        (OutputShape(2, has_rows=False), [[7, 5, 4]]),
        (OutputShape(2, has_rows=True), [[7, 5], [4, 9]]),
        (OutputShape(3, has_rows=True), [[[7, 5], [4, 9]]]),
    ],
)
def test_rows_are_filled_where_there_is_a_dimension_for_them(shape: OutputShape, expected: object) -> None:
    array = array_of("output_ids", ROWS, shape)
    assert array.tolist() == expected and array.dtype == np.int32


@pytest.mark.parametrize("rows", [((),), ((), ()), ((), (3,))])
def test_a_sequence_without_tokens_is_a_row_all_the_same(rows: tuple[tuple[int, ...], ...]) -> None:
    array = array_of("output_ids", Rows(rows, 0), OutputShape(3, has_rows=True))
    assert array.shape == (1, len(rows), max(map(len, rows)))


def test_other_values_are_one_element_a_sequence() -> None:
    assert array_of("text_output", ["é", "b\0"], OutputShape(1, has_rows=False)).tolist() == ["é".encode(), b"b\0"]
    array = array_of("cum_log_probs", [-1.0, -2.5], OutputShape(2, has_rows=False))
    assert array.tolist() == [[-1.0, -2.5]] and array.dtype == np.float32
    assert array_of("sequence_index", [0, 1], OutputShape(1, has_rows=False)).dtype == np.int32
