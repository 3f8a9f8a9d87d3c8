"""The KV operations of a plan: exact bytes, in order, and no page touched that none names."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereid.batch import BlockGroup, CopyBlock, KVOp, LoadBlock, StoreBlock, SwapIn, SwapOut
from nereid.kv_memory.disk_store import DiskStore
from nereid.kv_memory.groups import KVCacheGroup
from nereid.kv_memory.storage import KVCacheStorage
from nereid.kv_memory.transfer import BlockTransfer, joined, swap_rates
from tests.unit.disk_blocks import FINGERPRINT, make_key

BLOCKS, HOST_BLOCKS = 6, 4
KEYS = [make_key(number) for number in range(4)]


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def make_storage(
    dtype: torch.dtype = torch.bfloat16, blocks: int = BLOCKS, head_dim: int = 6, device: str = "cpu"
) -> KVCacheStorage:
    """Full of random bits, NaN of every kind among them."""
    group = KVCacheGroup((0, 1), BlockGroup(), 1, head_dim, 5, dtype)
    storage = KVCacheStorage((group,), blocks, torch.device(device))
    storage.pages.copy_(torch.randint(256, storage.pages.shape, dtype=torch.uint8))
    return storage


def open_disk(directory: Path, storage: KVCacheStorage) -> DiskStore:
    return DiskStore(directory, 1 << 30, FINGERPRINT, storage.pages.shape[1])


def bits(page: torch.Tensor) -> bytes:
    return page.cpu().numpy().tobytes()


@dataclass
class Model:
    """Pages as plain bytes, operations one after the other. None: nobody knows what lies there."""

    pages: list[bytes]
    host: list[bytes | None] = field(default_factory=lambda: [None] * HOST_BLOCKS)
    disk: dict[str, bytes] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def carry_out(self, op: KVOp) -> None:
        match op:
            case CopyBlock(source, target):
                self.pages[target] = self.pages[source]
            case SwapOut(block, host_block):
                self.host[host_block] = self.pages[block]
            case SwapIn(host_block, block):
                self.pages[block] = self.host[host_block] or b""
            case StoreBlock(key, block, on_host):
                self.disk.setdefault(key.name, (self.host[block] or b"") if on_host else self.pages[block])
            case LoadBlock(key, block):
                if key.name in self.disk:
                    self.pages[block] = self.disk[key.name]
                else:
                    self.failed.append(key.name)


_BLOCK, _HOST, _KEY = st.integers(0, BLOCKS - 1), st.integers(0, HOST_BLOCKS - 1), st.sampled_from(KEYS)
_OPS = st.one_of(
    st.builds(CopyBlock, _BLOCK, _BLOCK),
    st.builds(SwapOut, _BLOCK, _HOST),
    st.builds(SwapIn, _HOST, _BLOCK),
    st.builds(StoreBlock, _KEY, _BLOCK, st.just(False)),
    st.builds(StoreBlock, _KEY, _HOST, st.just(True)),
    st.builds(LoadBlock, _KEY, _BLOCK),
)
_FILL: list[KVOp] = [
    SwapOut(block, block) for block in range(HOST_BLOCKS)
]  # what lies on the host is known from then on


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(plans=st.lists(st.lists(_OPS, max_size=12), max_size=4))
def test_plans_do_what_their_operations_do_one_by_one(device: str, dtype: torch.dtype, plans: list[list[KVOp]]) -> None:
    storage = make_storage(dtype, device=device)
    model = Model([bits(page) for page in storage.pages])
    with tempfile.TemporaryDirectory() as folder:
        disk = open_disk(Path(folder), storage)
        transfer = BlockTransfer(storage, HOST_BLOCKS, disk)
        for plan in [_FILL, *plans]:
            model.failed.clear()
            for op in plan:
                model.carry_out(op)
            assert transfer.run(plan) == tuple(model.failed)
            assert [bits(page) for page in storage.pages] == model.pages
        back = [SwapIn(host_block, host_block) for host_block in range(HOST_BLOCKS)]
        assert transfer.run(back) == ()
        assert [bits(page) for page in storage.pages[:HOST_BLOCKS]] == model.host
        transfer.close()
        again = open_disk(Path(folder), storage)
        assert again.names() == set(model.disk)
        for key in KEYS:
            found = again.load(key)
            assert (None if found is None else bytes(found)) == model.disk.get(key.name)
        again.close(30)


@given(st.lists(_OPS, max_size=20))
def test_only_copies_that_do_not_touch_each_other_are_joined(ops: list[KVOp]) -> None:
    """A device may carry out a list of them in any order."""
    flat: list[KVOp] = []
    for step in joined(ops):
        if isinstance(step, list):
            targets, sources = [op.target for op in step], {op.source for op in step}
            assert len(set(targets)) == len(targets) and not sources & set(targets)
            flat += step
        else:
            flat.append(step)
    assert flat == [op for op in ops if not (isinstance(op, CopyBlock) and op.source == op.target)]


def test_copies_that_do_not_touch_each_other_are_one_launch() -> None:
    copies = [CopyBlock(1, 4), CopyBlock(1, 5), CopyBlock(2, 6)]
    swap = SwapOut(4, 0)
    assert list(joined([*copies, swap, *copies])) == [copies, swap, copies]
    assert list(joined([*copies, CopyBlock(6, 7), CopyBlock(3, 8)])) == [copies, [CopyBlock(6, 7), CopyBlock(3, 8)]]


def test_a_chain_of_copies_moves_one_block_along() -> None:
    storage = make_storage()
    first = bits(storage.pages[0])
    BlockTransfer(storage, 0).run([CopyBlock(block, block + 1) for block in range(BLOCKS - 1)])
    assert all(bits(page) == first for page in storage.pages)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_of_every_kind_survives_every_way(device: str, tmp_path: Path) -> None:
    """All 65,536 patterns of bfloat16, signalling NaN among them."""
    storage = make_storage(torch.bfloat16, blocks=3, head_dim=3277, device=device)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    page = storage.pages[1]
    page[: len(patterns)] = patterns
    expected = bits(page)
    transfer = BlockTransfer(storage, 1, open_disk(tmp_path, storage))
    ways: list[list[KVOp]] = [
        [CopyBlock(1, 2)],
        [SwapOut(1, 0), SwapIn(0, 2)],
        [StoreBlock(KEYS[0], 1, False), LoadBlock(KEYS[0], 2)],
        [SwapOut(1, 0), StoreBlock(KEYS[1], 0, True), LoadBlock(KEYS[1], 2)],
    ]
    for way in ways:
        storage.pages[2] = 0
        assert transfer.run(way) == ()
        assert bits(storage.pages[2]) == expected and bits(storage.pages[1]) == expected


def test_a_block_is_stored_as_it_was_then(tmp_path: Path) -> None:
    storage = make_storage()
    transfer = BlockTransfer(storage, 0, open_disk(tmp_path, storage))
    expected = bits(storage.pages[1])
    transfer.run([StoreBlock(KEYS[0], 1, False), CopyBlock(2, 1)])
    storage.pages.zero_()
    assert transfer.run([LoadBlock(KEYS[0], 3)]) == ()
    assert bits(storage.pages[3]) == expected


def test_a_damaged_block_reaches_no_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = make_storage()
    disk = open_disk(tmp_path, storage)
    transfer = BlockTransfer(storage, 0, disk)
    transfer.run([StoreBlock(key, block, False) for block, key in enumerate(KEYS)])
    assert disk.flush(30)
    for key in KEYS[1:3]:
        path = tmp_path / key.name[:2] / f"{key.name}.kv"
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
    before = [bits(page) for page in storage.pages]
    assert transfer.run([LoadBlock(key, 5 - block) for block, key in enumerate(KEYS)]) == (KEYS[1].name, KEYS[2].name)
    assert [bits(page) for page in storage.pages] == [*before[:2], before[3], before[3], before[4], before[0]]
    assert caplog.text.count("its checksum is wrong") == 2


def test_without_a_disk_loads_fail_and_stores_are_nothing() -> None:
    storage = make_storage()
    before = storage.pages.clone()
    transfer = BlockTransfer(storage, 0)
    ops: list[KVOp] = [StoreBlock(KEYS[0], 1, False), LoadBlock(KEYS[0], 2), LoadBlock(KEYS[1], 3)]
    assert transfer.run(ops) == (KEYS[0].name, KEYS[1].name)
    assert torch.equal(storage.pages, before)


def test_of_blocks_loaded_together_the_last_are_the_first_to_go(tmp_path: Path) -> None:
    """A block is of no use without those before it."""
    storage = make_storage()
    disk = open_disk(tmp_path, storage)
    transfer = BlockTransfer(storage, 0, disk)
    transfer.run([StoreBlock(key, 0, False) for key in KEYS])
    assert disk.flush(30)
    transfer.run([LoadBlock(key, 1) for key in KEYS])
    used = [(tmp_path / key.name[:2] / f"{key.name}.kv").stat().st_mtime_ns for key in KEYS]
    assert used == sorted(used, reverse=True) and len(set(used)) == len(KEYS)


def test_measuring_leaves_the_pages_as_they_are() -> None:
    storage = make_storage()
    before = storage.pages.clone()
    rates = swap_rates(BlockTransfer(storage, HOST_BLOCKS))
    assert rates is not None and all(1e5 < rate < 1e13 for rate in rates)
    assert torch.equal(storage.pages, before)
    assert swap_rates(BlockTransfer(storage, 0)) is None


def test_the_hosts_pages_take_no_memory_before_they_are_used() -> None:
    storage = make_storage(blocks=2, head_dim=1 << 15)
    before = resident_bytes()
    transfer = BlockTransfer(storage, (2 << 30) // storage.pages.shape[1])
    transfer.run([SwapOut(1, transfer.num_host_blocks - 1)])
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
