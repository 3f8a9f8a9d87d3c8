"""Who may import whom: the arrows of ARCHITECTURE.md, read from the code's own import statements."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "backend" / "nereid"

# Room -> rooms of Nereid that it may import. A room is a module, or a folder by its name.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "paths": set(),
    "native": {"config", "errors", "paths"},
    "request": {"errors"},
    "batch": {"request"},
    "statistics": {"request"},
    "config": {"errors"},
    "model_config": {"errors"},
    "packages": {"errors", "paths"},
    "memory": set(),
    "processes": set(),
    "kv_cache": {"batch"},
    "kv_memory": {"batch", "config", "errors", "kv_cache", "model_config"},
    "tokenization": {"errors"},
    "sampling": {"batch", "request"},
    "guided": {"errors", "request", "tokenization"},
    "output_processor": {"batch", "request", "tokenization"},
    "scheduling": {"batch", "config", "errors", "kv_cache", "request"},
    "scheduler": {"batch", "config", "kv_cache", "request", "scheduling"},
    "sequences": {"request", "scheduling"},
    "executor": {"batch", "errors"},
    "model_input": {"batch", "kv_memory", "request"},
    "models": {"errors", "kv_memory", "model_config", "model_input", "packages", "paths"},
    "tiers": {"batch", "config", "errors", "kv_memory", "models"},
    "profiling": {"batch", "config", "errors", "kv_cache", "kv_memory", "memory", "request"},
    "model_runner": {
        "batch", "config", "errors", "kv_cache", "kv_memory", "memory", "model_config", "model_input", "models",
        "native", "profiling", "request", "sampling", "tiers",
    },
    "request_tracker": {
        "batch", "errors", "guided", "output_processor", "request", "scheduler", "scheduling", "sequences",
        "statistics",
    },
    "engine_core": {
        "batch", "config", "errors", "executor", "guided", "kv_cache", "model_config", "output_processor",
        "request", "request_tracker", "scheduler", "scheduling", "statistics", "tokenization",
    },
    "engine": {
        "batch", "config", "engine_core", "errors", "executor", "guided", "model_config", "request",
        "request_tracker", "statistics", "tokenization",
    },
    "build": {
        "batch", "config", "engine", "executor", "guided", "kv_cache", "kv_memory", "model_config", "model_runner",
        "models", "tokenization",
    },
    "server": {"batch", "build", "config", "engine", "errors", "request", "statistics", "tokenization"},
    "gateway": {"errors"},
    "bench": {
        "build", "config", "errors", "model_config", "models", "packages", "paths", "processes", "request",
        "tokenization",
    },
}  # fmt: skip
# Rooms that must not load torch, for they decide and do not compute.
WITHOUT_TORCH = [
    "batch",
    "config",
    "engine",
    "engine_core",
    "errors",
    "request",
    "request_tracker",
    "scheduler",
    "scheduling",
    "sequences",
    "statistics",
    "guided/compiler",
    "guided/tracker",
    "kv_cache",
    "kv_memory/disk_folder",
    "kv_memory/disk_store",
    "kv_memory/budget",
    "profiling",
]


def imports_of(path: Path) -> set[str]:
    """Every dotted name that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def room_of(path: Path) -> str:
    return path.relative_to(BACKEND).with_suffix("").parts[0]


SOURCES = sorted(p for p in BACKEND.rglob("*.py") if p.parent != BACKEND or p.name != "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(BACKEND)))
def test_dependencies_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room == "cli":
        return  # the command line may use everything; nothing uses it
    used = {name.split(".")[1] for name in imports_of(path) if name.startswith("nereid.")}
    assert used - {room} <= ALLOWED[room], f"{room} must not import {sorted(used - {room} - ALLOWED[room])}"


def test_every_room_is_listed() -> None:
    assert {room_of(path) for path in SOURCES} - {"cli"} == set(ALLOWED)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_deciding_rooms_see_no_tensor(name: str) -> None:
    paths = list((BACKEND / name).glob("*.py")) or [BACKEND / f"{name}.py"]
    names = set().union(*map(imports_of, paths))
    assert not {n for n in names if n.split(".")[0] in ("torch", "numpy", "nereid_kernels")}


def test_only_the_triton_face_imports_the_servers_module() -> None:
    users = {path.name for path in SOURCES if "triton_python_backend_utils" in imports_of(path)}
    assert users <= {"model.py", "triton_io.py", "metrics.py"}


def test_kernels_stand_on_torch_numpy_and_triton_alone() -> None:
    for path in (ROOT / "kernels" / "nereid_kernels").rglob("*.py"):
        foreign = {n.split(".")[0] for n in imports_of(path)} - {"torch", "numpy", "triton", "nereid_kernels"}
        assert foreign <= sys.stdlib_module_names, f"{path.name}: {foreign}"


def test_a_definition_is_imported_by_nothing_that_it_judges() -> None:
    """Nor do kernels and their twins on the CPU share code. verify_draft has no twin but its definition."""
    kernels = ROOT / "kernels" / "nereid_kernels"
    implementations = {"reference", "cpu", "triton_lang"}
    for path in [*kernels.rglob("*.py"), *SOURCES]:
        room = path.relative_to(kernels).parts[0] if kernels in path.parents else "backend"
        others = implementations - {room} if room in implementations else {"reference"}
        used = {name.split(".")[1] for name in imports_of(path) if name.startswith("nereid_kernels.")}
        assert room == "verify_draft.py" or not used & others, f"{path}: {used & others}"


def test_the_gateway_stands_on_its_libraries_alone() -> None:
    """It may run on a machine without an engine; and no other room needs what it brings."""
    own = {"fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "grpc"}
    others = {"nereid", "numpy", "tritonclient"}
    for path in SOURCES:
        foreign = {n.split(".")[0] for n in imports_of(path)} - sys.stdlib_module_names
        assert foreign <= own | others if room_of(path) == "gateway" else not foreign & (own - {"grpc"}), path


def test_serving_does_not_import_transformers() -> None:
    users = {path.name for path in SOURCES if any(n.split(".")[0] == "transformers" for n in imports_of(path))}
    assert not users
