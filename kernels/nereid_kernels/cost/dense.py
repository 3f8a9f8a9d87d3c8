"""Formulas of kernels whose work follows from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereid_kernels.cost.cost import Cost


def rms_norm(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    rows, width = grid[0], a["WIDTH"]
    tensor = rows * width * a["x_ptr"].element_size() * (1 if a["residual_ptr"] is None else 2)
    weight = width * a["weight_ptr"].element_size()
    return Cost(tensor + rows * weight, tensor, 2 * tensor + min(rows, 1) * weight)


def matmul(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    weight = a["OUT"] * a["IN"] * a["weight_ptr"].element_size()
    weight += 0 if a["bias_ptr"] is None else a["OUT"] * a["bias_ptr"].element_size()
    return _product(a, a["BLOCK_K"], weight, weight)


def matmul_int8(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    groups, scale = a["NUM_GROUPS"], a["OUT"] * a["scales_ptr"].element_size()
    loads = 1 if groups == 1 else -(-a["IN"] // a["BLOCK_K"])
    weight = a["OUT"] * a["IN"]
    return _product(a, a["BLOCK_K"], weight + loads * scale, weight + groups * scale)


def matmul_int4(a: Mapping[str, Any], grid: tuple[int, ...]) -> Cost:
    of_group = a["scales_ptr"].element_size() + (0 if a["zero_points_ptr"] is None else 1)
    weight = a["OUT"] * (a["IN"] // 2 + a["IN"] // a["GROUP"] * of_group)
    return _product(a, a["GROUP"], weight, weight)


def _product(a: Mapping[str, Any], step: int, loaded: int, distinct: int) -> Cost:
    """step: of the loop over IN.  loaded, distinct: bytes of all weights, as one row of tiles loads them, and once."""
    rows, out, width, block_m, block_n = a["rows"], a["OUT"], a["IN"], a["BLOCK_M"], a["BLOCK_N"]
    row_tiles, out_tiles = -(-rows // block_m), -(-out // block_n)
    x, stored = rows * width * a["x_ptr"].element_size(), rows * out * a["out_ptr"].element_size()
    flops = 2 * row_tiles * block_m * out_tiles * block_n * -(-width // step) * step
    return Cost(out_tiles * x + row_tiles * loaded, stored, x + min(rows, 1) * distinct + stored, flops)
