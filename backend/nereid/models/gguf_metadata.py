"""Metadata: the key-value pairs of a GGUF file, read by key; and JSON as Hugging Face directories hold it.

Always holds: a key that is missing, or has a value that is not supported, is a ModelLoadError that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from nereid.errors import ModelLoadError


class Metadata:
    """The key-value pairs of a GGUF file, read by key."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self._file = file

    @classmethod
    def of(cls, reader: gguf.GGUFReader, file: str) -> Metadata:
        return cls({name: field.contents() for name, field in reader.fields.items()}, file)

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise ModelLoadError(f"{self._file}: key {key} is missing") from None

    def require(self, key: str, supported: tuple[str, ...], default: str | None = None) -> str:
        """The value of `key`. Raises ModelLoadError unless it is one of `supported`."""
        value = self.get(key, default)
        if value not in supported:
            raise ModelLoadError(f"{self._file}: {key} {value!r} is not supported; supported: {', '.join(supported)}")
        return str(value)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as Hugging Face's own files are written."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
