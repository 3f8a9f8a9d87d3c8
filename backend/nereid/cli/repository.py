"""A model repository as the launcher sees it: which models it holds, and what Nereid's own ones need before serving.

Always holds: a model whose model.py does not import Nereid's class is not Nereid's; it is served, and left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nereid.config import SETTINGS_FILE, EngineConfig
from nereid.errors import ConfigError, ModelLoadError
from nereid.models.source import resolve
from nereid.paths import Progress

_CLASS = "nereid.server.model"


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model of Nereid's and the Hugging Face directory that it serves."""

    name: str
    directory: Path


def choose_models(repository: Path, wanted: Sequence[str]) -> tuple[str, ...]:
    """The models to load: `wanted`, or all. Raises ConfigError, which names what is missing."""
    if not repository.is_dir():
        raise ConfigError(f"--model-repository {repository}: no such folder")
    there = sorted(folder.name for folder in repository.iterdir() if _versions(folder))
    if not there:
        raise ConfigError(f"--model-repository {repository}: holds no model (NAME/1/model.py)")
    for name in wanted:
        if name not in there:
            raise ConfigError(f"--model {name}: not in {repository}; there are: {', '.join(there)}")
    return tuple(dict.fromkeys(wanted)) or tuple(there)


def prepare_models(repository: Path, names: Sequence[str], progress: Progress) -> list[PreparedModel]:
    """Fetch and convert what the models of Nereid among `names` need, so that loading them does not wait for it.

    Raises ConfigError for wrong settings and ModelLoadError.
    """
    prepared = []
    for name in names:
        for version in _versions(repository / name):
            if _is_nereids(version):
                prepared.append(PreparedModel(name, _prepare(version, progress)))
    return prepared


def _is_nereids(version: Path) -> bool:
    source = version / "model.py"
    return (version / SETTINGS_FILE).is_file() or (source.is_file() and _CLASS in source.read_text("utf-8", "replace"))


def _prepare(version: Path, progress: Progress) -> Path:
    settings = version / SETTINGS_FILE
    model = EngineConfig.load(settings).model
    try:
        return resolve(model, version, progress)
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"{settings}: {error}") from error


def _versions(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(version for version in folder.iterdir() if version.name.isdigit() and version.is_dir())
