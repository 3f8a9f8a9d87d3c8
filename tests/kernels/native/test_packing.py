"""The bits of packed weights of 8 and 4 bits are those that the packing's revision stands for."""

from __future__ import annotations

import hashlib

import pytest
import torch

from nereid_kernels.native.packing import REVISION, pack_quantised, pack_quantised_gated

DIGESTS = {
    (3, 8): "0b1fb24d5921bf26beeda97f219f682a",
    (3, 4): "29f1716fc96768b9200024db9b5ebcab",
}  # by revision and bits: of what is stored under it


@pytest.mark.parametrize("bits", [8, 4])
def test_other_bits_have_another_revision(bits: int) -> None:
    weight = ((torch.arange(70 * 50) * 37 % 101 - 50) / 64).view(70, 50)
    packed = pack_quantised(weight, 16, bits, 8), pack_quantised_gated(weight, -weight / 2, 16, bits, 8)
    data = b"".join(part.numpy().tobytes() for weight in packed for part in (weight.codes, weight.scales))
    assert hashlib.sha256(data).hexdigest()[:32] == DIGESTS[REVISION, bits]
