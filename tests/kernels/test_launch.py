"""Launching: which configuration a kernel gets, and on which device it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nereid_kernels import launch
from nereid_kernels.launch import Launch, choose, run


class Kernel:
    """Notes the device that was current when it was launched."""

    def __init__(self, current: list[int]) -> None:
        self.fn = SimpleNamespace(__name__="_kernel")
        self.current, self.launched_on = current, list[int]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.launched_on.append(self.current[0])


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current CUDA device of a machine with several; -1 selects none."""
    current = [0]

    def exchange(device: int) -> int:
        before = current[0]
        if device >= 0:
            current[0] = device
        return before

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    return current


@pytest.mark.parametrize(("device", "wanted"), [("cuda:1", 1), ("cuda:0", 0), ("cpu", 0)])
def test_a_kernel_runs_where_its_tensors_are(current: list[int], device: str, wanted: int) -> None:
    kernel = Kernel(current)
    with FakeTensorMode():
        arguments = {"scale": 1.0, "sinks_ptr": None, "x_ptr": torch.empty(2, device=device)}
        run(Launch(kernel, (1,), arguments, 4, 1))
        run(Launch(kernel, (0,), arguments, 4, 1))
    assert kernel.launched_on == [wanted] and current == [0]


def test_the_table_is_searched_once_for_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose("matmul", "sm_90", itemsize=2, size=4096)
    monkeypatch.setattr(launch, "_table", lambda: pytest.fail("searched again"))
    assert choose("matmul", "sm_90", itemsize=2, size=4096) is found


@pytest.mark.parametrize(
    ("kernel", "architecture", "itemsize"),
    [("matmul", "sm_70", 1), ("paged_attention", "sm_90", 2), ("no_kernel", "sm_90", 0)],
)
def test_what_the_table_lacks_is_named(kernel: str, architecture: str, itemsize: int) -> None:
    with pytest.raises(ValueError, match=f"{kernel}: launch_table.csv has no row for {architecture}"):
        choose(kernel, architecture, itemsize=itemsize)
