"""Weights in the order in which the native library's products read them, with fewer bits where that is asked for.

Owns which product gets how many bits. Quantised weights are made once and kept on disk; always holds: what comes from
there has the bits that making it again would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nereid.model_config import ModelConfig
from nereid.models.family import Family
from nereid.models.registry import load_family
from nereid.models.weight_store import WeightStore
from nereid.models.weights import model_fingerprint
from nereid.paths import cache_dir
from nereid_kernels.native.memory import Arena
from nereid_kernels.native.packing import (
    REVISION,
    PackedWeight,
    QuantisedWeight,
    pack,
    pack_gated,
    pack_quantised,
    pack_quantised_gated,
)

Weight = PackedWeight | QuantisedWeight
_BITS = {"int8": 8, "int4": 4}
_HEAD_BITS = 8  # at least: logits are what is drawn from


@dataclass(frozen=True, slots=True)
class Packing:
    """tile: the library's.  quantization: `none`, `int8` or `int4`.  groups: inputs that share a scale, by bits of
    a weight."""

    tile: int
    quantization: str
    groups: Mapping[int, int]

    @property
    def facts(self) -> tuple[str, ...]:
        """What the weights' bits depend on beside the model; none where they stay as they are."""
        return (repr(self), str(REVISION)) if self.quantization != "none" else ()


def load_packed(directory: Path, config: ModelConfig, dtype: torch.dtype, packing: Packing) -> Family[Weight]:
    """The model in `directory` for the native library. Raises ModelLoadError, which names the file or tensor."""
    if packing.quantization == "none":
        return load_family(directory, config, dtype, PackedWeights(packing.tile))
    store = WeightStore(cache_dir() / "weights", model_fingerprint(directory, _facts(dtype, packing)))
    arena = Arena()
    weights = QuantisedWeights(packing, store.load(arena.place), arena)
    family = load_family(directory, config, dtype, weights)
    if weights.made_any:
        store.save(weights.tensors)
    return family


def _facts(dtype: torch.dtype, packing: Packing) -> tuple[str, ...]:
    """What the bits of quantised weights depend on beside the model's files. PyTorch sums up the errors of scales."""
    computed_by = torch.__version__, torch.backends.cpu.get_cpu_capability()
    return ("packed weights", *packing.facts, str(dtype), *computed_by)


class PackedWeights:
    """Weights as they are; see `Weights`."""

    def __init__(self, tile: int) -> None:
        self._tile = tile
        self._arena = Arena()

    def keep(self, weight: Tensor) -> PackedWeight:
        return pack(weight, self._tile, self._arena.place)

    def keep_head(self, weight: Tensor) -> PackedWeight:
        return self.keep(weight)

    def keep_gated(self, gate: Tensor, up: Tensor) -> PackedWeight:
        return pack_gated(gate, up, self._tile, self._arena.place)


class QuantisedWeights:
    """Weights of fewer bits; see `Weights`. Those that are stored are taken as they come, the others are made."""

    def __init__(self, packing: Packing, stored: Mapping[str, Tensor], arena: Arena) -> None:
        """stored: the `tensors` of an earlier one for the same model and packing; any of them may be missing.  arena:
        where those that are made are to lie."""
        self._packing = packing
        self._place = arena.place
        self._bits = _BITS[packing.quantization]
        self._stored = stored
        self.tensors: dict[str, Tensor] = {}
        """Of all weights so far, by their place in the family, kind and shape."""
        self.made_any = False

    def keep(self, weight: Tensor) -> QuantisedWeight:
        return self._keep("plain", weight, self._bits)

    def keep_head(self, weight: Tensor) -> QuantisedWeight:
        return self._keep("head", weight, max(self._bits, _HEAD_BITS))

    def _keep(self, kind: str, weight: Tensor, bits: int) -> QuantisedWeight:
        form, (tile, group) = _Form(kind, bits, *weight.shape), (self._packing.tile, self._packing.groups[bits])
        return self._kept(form, lambda: pack_quantised(weight, tile, bits, group, self._place))

    def keep_gated(self, gate: Tensor, up: Tensor) -> QuantisedWeight:
        form, bits = _Form("gated", self._bits, 2 * gate.shape[0], gate.shape[1]), self._bits
        tile, group = self._packing.tile, self._packing.groups[bits]
        return self._kept(form, lambda: pack_quantised_gated(gate, up, tile, bits, group, self._place))

    def _kept(self, form: _Form, make: Callable[[], QuantisedWeight]) -> QuantisedWeight:
        name = f"{len(self.tensors) // 2}.{form.kind}.{form.out_features}x{form.in_features}"
        codes, scales = (self._stored.get(f"{name}.{part}") for part in ("codes", "scales"))
        if codes is None or scales is None:
            weight = make()
            self.made_any = True
        else:
            weight = QuantisedWeight(
                codes, scales, form.bits, self._packing.groups[form.bits], form.out_features, form.in_features,
                gated=form.kind == "gated",
            )  # fmt: skip
        self.tensors |= {f"{name}.codes": weight.codes, f"{name}.scales": weight.scales}
        return weight


@dataclass(frozen=True, slots=True)
class _Form:
    kind: str
    bits: int
    out_features: int
    in_features: int
