"""WeightReader: the tensors of a Hugging Face directory, memory-mapped, each read exactly once.

Owns the open files. Invariant: `close` raises unless every tensor was read, so that nothing is dropped in silence.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from nereid.errors import ModelLoadError
from nereid.kv_memory.fingerprint import fingerprint

_LOG = logging.getLogger(__name__)
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class WeightReader:
    """A context manager over `model.safetensors`, or over the shards that its index names."""

    def __init__(self, directory: Path, ignored: frozenset[str] = frozenset()) -> None:
        """ignored: names that may be present and are not needed. Raises ModelLoadError, which names the file."""
        self._directory = directory
        self._ignored = ignored
        self._file_of = self._read_index()
        self._handles = {name: self._open(name) for name in sorted(set(self._file_of.values()))}
        self._unread = set(self._file_of)

    def _read_index(self) -> dict[str, str]:
        """Which file holds each tensor."""
        index = self._directory / _INDEX
        if (self._directory / _SINGLE).exists():
            with self._open(_SINGLE) as handle:
                return dict.fromkeys(handle.keys(), _SINGLE)
        try:
            weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except FileNotFoundError as error:
            raise ModelLoadError(f"{self._directory}: neither {_SINGLE} nor {_INDEX} is there") from error
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index}: {type(error).__name__}: {error}") from error

    def _open(self, name: str) -> safe_open:
        path = self._directory / name
        try:
            return safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{path}: {error}") from error

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that hold the tensors."""
        return tuple(self._directory / name for name in self._handles)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, a view of the mapped file. Raises ModelLoadError where it is missing or misshaped."""
        if name not in self._unread:
            raise ModelLoadError(f"{self._directory}: tensor {name} is {'read twice' if name in self else 'missing'}")
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._handles[file].get_tensor(name)  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise ModelLoadError(f"{self._directory / file}: tensor {name}: {error}") from error
        if tensor.shape != shape:
            raise ModelLoadError(f"{self._directory / file}: tensor {name} is {list(tensor.shape)}, not {list(shape)}")
        self._unread.discard(name)
        return tensor

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        if error is None and (left := self._unread - self._ignored):
            raise ModelLoadError(
                f"{self._directory}: tensors that this model has no use for: {', '.join(sorted(left)[:5])}"
            )


def model_fingerprint(directory: Path, facts: Sequence[str]) -> str:
    """See `fingerprint`.  facts: all but the model's files. Raises ModelLoadError where they cannot be read."""
    start = time.monotonic()
    try:
        found = fingerprint([directory / "config.json", *WeightReader(directory).files], facts)
    except OSError as error:
        raise ModelLoadError(f"{directory}: {error}") from error
    _LOG.info(
        "read all of the model in %.1f s, to tell what is stored of it from other models'", time.monotonic() - start
    )
    return found
