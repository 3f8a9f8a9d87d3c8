"""Tiers: where blocks are kept beside the device, opened as one configuration says: memory of the host, a directory.

Raises ConfigError at load for what can be known then; later a disk that fails costs blocks, never requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from nereid.batch import TransferRates
from nereid.config import EngineConfig
from nereid.kv_memory.disk_store import DiskStore
from nereid.kv_memory.groups import KVCacheGroup
from nereid.kv_memory.storage import KVCacheStorage, page_bytes
from nereid.kv_memory.transfer import BlockTransfer, swap_rates
from nereid.models.weights import model_fingerprint

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tiers:
    """What moves blocks, and what the scheduler's side hears of it.

    fingerprint, stored_names: as in Capacity; "" and None where nothing outlives the process.
    swap_rates: bytes a second out to the host and
    back in; None where it has no room.
    """

    transfer: BlockTransfer
    fingerprint: str
    stored_names: frozenset[str] | None
    swap_rates: tuple[float, float] | None

    def rates(self, prefill_tokens_per_s: float | None) -> TransferRates | None:
        """All that a choice between swapping and computing anew needs; None where a part of it was not measured."""
        if self.swap_rates is None or prefill_tokens_per_s is None:
            return None
        return TransferRates(*self.swap_rates, prefill_tokens_per_s)


def open_tiers(
    directory: Path,
    config: EngineConfig,
    groups: Sequence[KVCacheGroup],
    weight_dtype: torch.dtype,
    storage: KVCacheStorage,
    backend: str,
    computed_by: str,
) -> Tiers:
    """directory: the model's.  backend: which kernels run.  computed_by: what computes KV, and with which weights.

    Raises ConfigError or ModelLoadError.
    """
    block_bytes = page_bytes(tuple(groups))
    print_of_all, disk, names = "", None, None
    if config.disk_cache_dir is not None:
        facts = str(weight_dtype), *map(repr, groups), *_computed_by(config, computed_by)
        print_of_all = model_fingerprint(directory, facts)
        disk = DiskStore(Path(config.disk_cache_dir), config.disk_cache_bytes, print_of_all, block_bytes)
        names = disk.names()
        _LOG.info("disk: %s, %d blocks there, at most %.0f MiB",
                  config.disk_cache_dir, len(names), config.disk_cache_bytes / 2**20)  # fmt: skip
    transfer = BlockTransfer(storage, config.host_cache_bytes // block_bytes, disk, backend)
    if rates := swap_rates(transfer):
        count = transfer.num_host_blocks
        _LOG.info("host memory: %d blocks, %.0f MiB; out at %.1f GB/s, back at %.1f GB/s",
                  count, count * block_bytes / 2**20, rates[0] / 1e9, rates[1] / 1e9)  # fmt: skip
    return Tiers(transfer, print_of_all, names, rates)


def _computed_by(config: EngineConfig, computed_by: str) -> tuple[str, ...]:
    """What the bits of KV depend on beside the model: blocks are kept apart as strictly as `deterministic` promises."""
    facts = (computed_by, torch.__version__, torch.backends.cpu.get_cpu_capability())
    return (*facts, f"deterministic with {torch.get_num_threads()} threads") if config.deterministic else facts
