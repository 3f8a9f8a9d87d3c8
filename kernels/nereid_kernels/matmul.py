"""matmul: x times weight transposed, batch invariant: a row's result has the same bits whatever rows are beside it.

That is what makes a deterministic server possible (He and Thinking Machines Lab, "Defeating Nondeterminism in LLM
Inference", 2025): ordinary products choose tiles and splits by the number of rows, so a request's results depend on
who else is served. Here they are fixed; sums are kept in float32 (on the CPU, as its libraries keep them).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import FLOATS, check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import matmul as cpu
from nereid_kernels.launch import run


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cpu_tiles: tuple[int, ...] = (cpu.BASE_TILE,),
    backend: str = "auto",
) -> Tensor:
    """x @ weight.T + bias, [rows, out] of x's dtype. float32 is multiplied in full precision, not in TF32.

    x: [rows, in] float16, bfloat16 or float32; rows may be strided.  weight: [out, in] of x's dtype, contiguous.
    bias: [out] of x's dtype.  cpu_tiles: of `nereid_kernels.cpu.matmul.row_tiles`; the default is right, and slower.
    Raises ValueError or TypeError, which name the argument.
    """
    device = _check(x, weight, bias)
    if pick(device, backend) == "cpu":
        return cpu.matmul(x, weight, bias, cpu_tiles)
    out: Tensor = _matmul(x, weight, bias)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.device:
    tensors = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    sizes: dict[str, int] = {}
    check_shapes(sizes, x=(x, ("rows", "in")), weight=(weight, ("out", "in")))
    if bias is not None:
        check_shapes(sizes, bias=(bias, ("out",)))
    check_dtypes(FLOATS, x=x)
    check_dtypes((x.dtype,), **tensors)
    check_contiguous_rows(**tensors)
    if not weight.is_contiguous():
        raise ValueError(f"weight: got strides {weight.stride()}; allowed: contiguous")
    return check_same_device(**tensors)


@torch.library.custom_op("nereid_kernels::matmul", mutates_args=())
def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from nereid_kernels.triton_lang.matmul import launch_matmul

    out = _empty(x, weight)
    run(launch_matmul(x, weight, bias, out))
    return out


@_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _empty(x, weight)


def _empty(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
