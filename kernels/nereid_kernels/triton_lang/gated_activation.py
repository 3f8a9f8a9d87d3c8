"""The kernel of gated_activation: one program a tile of a row, each element read and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose


@triton.jit
def _gated_activation(
    gate_up_ptr: tl.tensor,  # [rows, 2 * WIDTH]
    out_ptr: tl.tensor,  # [rows, WIDTH], contiguous
    gate_up_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "silu", "gelu" or "gelu_tanh"
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gate_ptrs = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        activated = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z), where z is sqrt(2 / pi) (x + 0.044715 x^3)
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * WIDTH + columns, (activated * up).to(out_ptr.dtype.element_ty), mask=mask)


def launch_gated_activation(gate_up: Tensor, out: Tensor, activation: str, architecture: str | None = None) -> Launch:
    """gate_up: [rows, 2 n].  out: [rows, n], contiguous.  architecture: as in `launch_rms_norm`."""
    rows, width = out.shape
    architecture = architecture or architecture_of(gate_up.device)
    config = choose("gated_activation", architecture, itemsize=gate_up.element_size(), size=width)
    arguments = {
        "gate_up_ptr": gate_up,
        "out_ptr": out,
        "gate_up_stride": gate_up.stride(0),
        "WIDTH": width,
        "ACTIVATION": activation,
        **config.tiles,
    }
    grid = (rows, triton.cdiv(width, config.tiles["BLOCK"]))
    return Launch(_gated_activation, grid, arguments, config.num_warps, config.num_stages)
