"""copy_blocks, gather_blocks, scatter_blocks: whole blocks of the KV pool copied, byte by byte, whatever they hold.

Copy-on-write needs copies within the pool; offload needs blocks gathered into one piece of memory, and scattered back.
A pool is [blocks, ...] of any dtype; each block is contiguous, and blocks may be strided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import block_ops as cpu
from nereid_kernels.launch import run


def copy_blocks(pool: Tensor, pairs: Tensor, *, backend: str = "auto") -> None:
    """Copy blocks within the pool, in place.

    pairs: [n, 2] int64, source and destination; no destination is named twice, and none is a source as well. A pair
    with a number below 0 is padding.
    Raises ValueError or TypeError, which name the argument; block ids are not checked.
    """
    check_shapes({}, pairs=(pairs, ("n", 2)))
    check_dtypes((torch.int64,), pairs=pairs)
    _check_blocks(pool=pool)
    if pick(check_same_device(pool=pool, pairs=pairs), backend) == "cpu":
        cpu.copy_blocks(pool, pairs)
    else:
        _copy_blocks(pool, pairs)


def gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor, *, backend: str = "auto") -> None:
    """Copy block block_ids[i] of the pool to out[i], in place.

    block_ids: [n] int64; below 0 is padding, whose row of `out` is left as it is.  out: [n, ...], of the pool's dtype
    and the shape of its blocks, in other memory.  Raises as `copy_blocks` does.
    """
    device = _check_rows(pool, block_ids, "out", out)
    if pick(device, backend) == "cpu":
        cpu.gather_blocks(pool, block_ids, out)
    else:
        _gather_blocks(pool, block_ids, out)


def scatter_blocks(pool: Tensor, block_ids: Tensor, source: Tensor, *, backend: str = "auto") -> None:
    """Copy source[i] to block block_ids[i] of the pool, in place.

    block_ids: [n] int64, none named twice; below 0 is padding.  source: [n, ...], as `out` of `gather_blocks`.
    Raises as `copy_blocks` does.
    """
    device = _check_rows(pool, block_ids, "source", source)
    if pick(device, backend) == "cpu":
        cpu.scatter_blocks(pool, block_ids, source)
    else:
        _scatter_blocks(pool, block_ids, source)


def _check_rows(pool: Tensor, block_ids: Tensor, name: str, rows: Tensor) -> torch.device:
    check_shapes({}, block_ids=(block_ids, ("n",)))
    check_dtypes((torch.int64,), block_ids=block_ids)
    _check_blocks(pool=pool)
    check_shapes({}, **{name: (rows, (block_ids.shape[0], *pool.shape[1:]))})
    check_dtypes((pool.dtype,), **{name: rows})
    _check_blocks(**{name: rows})
    return check_same_device(pool=pool, block_ids=block_ids, **{name: rows})


def _check_blocks(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}, strides {tensor.stride()}; allowed: [blocks, ...] whose "
                "blocks are contiguous"
            )


@torch.library.custom_op("nereid_kernels::copy_blocks", mutates_args=("pool",))
def _copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    from nereid_kernels.triton_lang.block_ops import launch_copy_blocks

    run(launch_copy_blocks(pool, pairs))


@torch.library.custom_op("nereid_kernels::gather_blocks", mutates_args=("out",))
def _gather_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    from nereid_kernels.triton_lang.block_ops import launch_gather_blocks

    run(launch_gather_blocks(pool, block_ids, out))


@torch.library.custom_op("nereid_kernels::scatter_blocks", mutates_args=("pool",))
def _scatter_blocks(pool: Tensor, block_ids: Tensor, source: Tensor) -> None:
    from nereid_kernels.triton_lang.block_ops import launch_scatter_blocks

    run(launch_scatter_blocks(pool, block_ids, source))


@_copy_blocks.register_fake
def _(pool: Tensor, pairs: Tensor) -> None:
    return None


@_gather_blocks.register_fake
def _(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    return None


@_scatter_blocks.register_fake
def _(pool: Tensor, block_ids: Tensor, source: Tensor) -> None:
    return None
