"""WeightStore: tensors made of one model at load, on disk, so that they are made once.

A safetensors file for each key, in a directory of this user alone, of which those longest unused give way. Always
holds: `load` gives the tensors that `save` took under the same key, bit for bit, or none; what goes wrong on the disk
costs a warning and time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nereid.kv_memory.disk_folder import DiskFolder

_LOG = logging.getLogger(__name__)
_ENDING = ".safetensors"
_MAX_BYTES = 16 << 30  # of all files together
_MAX_THREADS = 16
_DTYPES = {
    torch.float32: "F32",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}  # the widest first: each starts aligned


class WeightStore:
    """The file of one key. Any number of processes may share the directory; a file appears whole, by renaming."""

    def __init__(self, directory: Path, key: str, max_bytes: int = _MAX_BYTES) -> None:
        """directory: made where it is missing.  key: 16 to 128 hexadecimal digits, of all that the bits depend on."""
        self._key = key
        self._folder: DiskFolder | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = DiskFolder(directory, max_bytes, _ENDING)
        except OSError as error:
            _LOG.warning("weights are made at each load, since %s cannot be used: %s", directory, error.strerror)

    def load(self, place: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, Tensor]:
        """By name; empty where there are none, or not the right ones. place: copies each to where it is to lie, in the
        order of the numbers that names begin with."""
        if self._folder is None or not (path := self._folder.path(self._key)).exists():
            return {}
        start = time.monotonic()
        try:
            with safe_open(str(path), framework="pt") as file:  # mapped
                metadata = file.metadata() or {}
                # Out of the mapping: what is computed with is then what was checked.
                tensors = {name: place(file.get_tensor(name)) for name in sorted(file.keys(), key=_number)}
        except (OSError, SafetensorError) as error:
            return self._refused(path, str(error))
        if metadata != self._metadata(tensors):
            own = metadata.get("key") == self._key
            return self._refused(path, "its checksum is wrong" if own else "it is of another key")
        self._folder.touch(self._key, time.time_ns())
        _LOG.info("took the weights that %s keeps in %.1f s", path, time.monotonic() - start)
        return tensors

    def _refused(self, path: Path, fault: str) -> dict[str, Tensor]:
        _LOG.warning("%s is not used, and its weights are made anew: %s", path, fault)
        return {}

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep them for the next load, in the place of what is there."""
        if self._folder is None:
            return
        start, path = time.monotonic(), self._folder.path(self._key)
        try:
            self._folder.write(self._key, _file(tensors, self._metadata(tensors)), time.time_ns())
        except OSError as error:
            _LOG.warning("weights are not kept in %s, so that they are made at each load: %s", path, error.strerror)
        else:
            _LOG.info("keeps weights in %s, in %.1f s", path, time.monotonic() - start)

    def _metadata(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        return {"key": self._key, "checksum": _checksum(tensors)}


def _number(name: str) -> int:
    first = name.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Of names, dtypes, shapes and bytes."""
    names = sorted(tensors)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        digests = threads.map(lambda name: hashlib.sha256(_bytes(tensors[name])).hexdigest(), names)
        described = [
            (name, str(tensors[name].dtype), list(tensors[name].shape), digest)
            for name, digest in zip(names, digests, strict=True)
        ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """A safetensors file in parts, the tensors' memory not copied."""
    order = sorted(tensors, key=lambda name: list(_DTYPES).index(tensors[name].dtype))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for name in order:
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(_bytes(tensors[name]) for name in order)]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data
