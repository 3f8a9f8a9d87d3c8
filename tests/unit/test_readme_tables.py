"""README's tables of fields and outputs say what the table of fields says: each row is made from it and looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereid.server.field import Field, Group
from nereid.server.fields import FIELDS
from nereid.server.tensors import OUTPUTS, TensorSpec

README = (Path(__file__).resolve().parents[2] / "README.md").read_text("utf-8")


def type_of(data_type: str, dims: tuple[int, ...]) -> str:
    return f"{data_type.removeprefix('TYPE_')} {list(dims)}"


def row_of(field: Field) -> str:
    """A field whose tensor only some deployments have stands in parentheses."""
    names = ", ".join(f"`{name}`" for name in (field.name, *field.aliases))
    kind = type_of(field.data_type, field.dims)
    return f"| {names} | {kind if field.always_declared else f'({kind})'} | {field.meaning} |"


def output_row_of(spec: TensorSpec) -> str:
    kind = type_of(spec.data_type, spec.dims)
    return f"| `{spec.name}` | {f'({kind})' if spec.only_batched else kind} | {spec.meaning} |"


@pytest.mark.parametrize("group", Group, ids=lambda group: group.value)
def test_fields_are_described_in_readme_as_in_their_table(group: Group) -> None:
    rows = [row_of(field) for field in FIELDS if field.group is group]
    assert "\n".join(rows) in README, "\n".join(["README's table should be:", *rows])


def test_outputs_are_described_in_readme_as_in_their_table() -> None:
    rows = [output_row_of(spec) for spec in OUTPUTS]
    assert "\n".join(rows) in README, "\n".join(["README's table should be:", *rows])
