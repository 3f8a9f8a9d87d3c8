"""Launches of verify_draft and verify_tree that are compiled ahead of time."""

from __future__ import annotations

import torch

from nereid_kernels.launch import Launch
from nereid_kernels.triton_lang.verify_draft import launch_chain, launch_draw, launch_tree
from tests.kernels.aot.cases import FULLY


def launches(architecture: str) -> dict[str, Launch]:
    """By name of the case; the tensors lie on the meta device."""
    probs = torch.empty(48, 128256, device="meta")  # 8 sequences, 5 draft tokens each
    rows, seqs = torch.empty(48, dtype=torch.int32, device="meta"), torch.empty(9, dtype=torch.int32, device="meta")
    accepted, out, path = seqs[:8], seqs.long()[:8, None].expand(8, 6), seqs[:8, None].expand(8, 5)
    draws = (rows[:40], seqs, rows.long())
    found = {
        "draw": launch_draw(probs, rows.long(), rows, architecture),
        "chain": launch_chain(probs, probs[:40], *draws, None, accepted, out, architecture),
    }
    if architecture in FULLY:
        tree = (rows, rows, seqs, rows.long(), None, accepted, out, path)
        found["chain_without_q"] = launch_chain(probs, None, *draws, None, accepted, out, architecture)
        found["chain_coupled"] = launch_chain(probs, None, *draws, rows, accepted, out, architecture)
        found["tree"] = launch_tree(probs, *tree, architecture)
    return found
