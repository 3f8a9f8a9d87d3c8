"""Which kernel tests this process can run: those in triton_lang/ need a GPU, or the interpreter of Triton-lang.

`test_interpreted.py` runs them in processes of their own. By hand:
    TRITON_INTERPRET=1 ./nereid test tests/kernels/triton_lang
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nereid_kernels.backends import is_interpreting

collect_ignore = [] if is_interpreting() or torch.cuda.is_available() else ["triton_lang"]


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """What is drawn in a test does not depend on those that ran before it: bounds on errors are met or not by draws."""
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads PyTorch computes with on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
