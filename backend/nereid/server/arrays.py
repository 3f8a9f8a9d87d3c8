"""A reply's values -> arrays of the types and shapes that a deployment's outputs have. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from nereid.server.reply import Rows
from nereid.server.tensors import OUTPUTS

# TensorRT-LLM's clients take the first element of the text as it is, though their models have a leading dimension.
_WITHOUT_LEADING = "text_output"
_DTYPES = {"TYPE_STRING": np.object_, "TYPE_UINT32": np.uint32, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64,
           "TYPE_FP32": np.float32}  # fmt: skip
_OUTPUT_DTYPES = {spec.name: _DTYPES[spec.data_type] for spec in OUTPUTS}


@dataclass(frozen=True, slots=True)
class OutputShape:
    """num_dims: of the tensor, a leading one included.  has_rows: the last but one is that of sequences."""

    num_dims: int
    has_rows: bool


def output_shapes(model_config: Mapping[str, object]) -> dict[str, OutputShape]:
    """Of each output in Triton's configuration of a model."""
    leading = 1 if model_config.get("max_batch_size") else 0
    outputs = model_config["output"]
    assert isinstance(outputs, list)
    own = {output["name"]: len(output["dims"]) for output in outputs}
    return {
        name: OutputShape(dims + (leading if name != _WITHOUT_LEADING else 0), dims > 1) for name, dims in own.items()
    }


def array_of(name: str, values: Sequence[object] | Rows, shape: OutputShape) -> npt.NDArray[np.generic]:
    """The output `name`, with leading dimensions of 1 as `shape` wants them.

    Rows are [sequences, longest row] where the output has a dimension for that; elsewhere one comes after the other.
    """
    if isinstance(values, Rows) and shape.has_rows:
        longest = max(map(len, values.rows))
        elements = list[object](chain.from_iterable(_filled(row, longest, values.fill) for row in values.rows))
        own: tuple[int, ...] = (len(values.rows), longest)
    else:
        elements = list(chain.from_iterable(values.rows) if isinstance(values, Rows) else values)
        own = (len(elements),)
    encoded = [element.encode("utf-8") if isinstance(element, str) else element for element in elements]
    array = np.array(encoded, dtype=_OUTPUT_DTYPES[name])
    return array.reshape((*(1,) * (shape.num_dims - len(own)), *own))


def _filled(row: Sequence[float], length: int, fill: float) -> list[float]:
    return [*row, *[fill] * (length - len(row))]
