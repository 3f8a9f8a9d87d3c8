"""What a launch costs: bytes and operations, by formulas over its arguments. Pure functions; nothing is run.

Always holds: the formulas equal what the interpreter counts when it runs the same launch (tests/kernels/triton_lang/
test_cost.py). Left out are indices (int32 and int64: lengths, block tables, slots, positions), a few bytes each. No
formula have kernels that sample, verify drafts, mask and bias, since values decide what those read and write.
Lengths decide what attention does, so those tensors must have values: on the CPU, while all others may be meta.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from nereid_kernels.cost import attention, dense, elementwise
from nereid_kernels.cost.cost import Cost, Formula
from nereid_kernels.launch import Launch

__all__ = ["Cost", "count", "has_formula"]

_FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "rms_norm": dense.rms_norm,
        "matmul": dense.matmul,
        "matmul_int8": dense.matmul_int8,
        "matmul_int4": dense.matmul_int4,
        "gated_activation": elementwise.gated_activation,
        "kv_write": elementwise.kv_write,
        "qk_norm_rope_kv_write": elementwise.qk_norm_rope_kv_write,
        "copy_blocks": elementwise.copy_blocks,
        "penalties": elementwise.penalties,
        "paged_attention": attention.paged_attention,
        "paged_attention_reduce": attention.paged_attention_reduce,
        "mla_attention": attention.mla_attention,
        "mla_attention_reduction": attention.mla_attention_reduction,
    }
)


def has_formula(launch: Launch) -> bool:
    return launch.name in _FORMULAS


def count(launches: Iterable[Launch]) -> Cost:
    """The sum over launches. Raises ValueError for a kernel without a formula."""
    total = Cost()
    for launch in launches:
        if not has_formula(launch):
            raise ValueError(f"kernel: got {launch.name}; allowed: {', '.join(sorted(_FORMULAS))}")
        total += _FORMULAS[launch.name](launch.arguments, launch.grid)
    return total
