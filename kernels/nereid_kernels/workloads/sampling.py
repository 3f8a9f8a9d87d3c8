"""Launches of what happens to a step's logits and to draft tokens; Llama-3.1-8B's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nereid_kernels.launch import Launch

_VOCAB = 128256


def sample(
    device: torch.device, architecture: str | None = None, *, rows: int, temperature: float, top_p: float
) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.sample import launch_sample

    logits, zeros = 4 * torch.randn(rows, _VOCAB, device=device), torch.zeros(rows, device=device)
    keys, tokens = torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    chosen = (zeros + temperature, zeros, zeros.int(), zeros + top_p)
    return [launch_sample(logits, *chosen, keys, tokens, zeros.bool(), architecture)]


def penalties(device: torch.device, architecture: str | None = None, *, rows: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.penalties import launch_penalties

    logits, zeros = torch.randn(rows, _VOCAB, device=device), torch.zeros(rows, device=device)
    counts = torch.ones(rows, _VOCAB, dtype=torch.int32, device=device)
    return [launch_penalties(logits, counts, counts.bool(), zeros + 1.1, zeros + 0.1, zeros + 0.1, architecture)]


def apply_bias(device: torch.device, architecture: str | None = None, *, rows: int, entries: int) -> Sequence[Launch]:
    """entries: of each row."""
    from nereid_kernels.triton_lang.penalties import launch_bias

    logits, values = torch.randn(rows, _VOCAB, device=device), torch.ones(rows * entries, device=device)
    bias_rows = entries * torch.arange(rows + 1, dtype=torch.int32, device=device)
    ids = torch.arange(rows * entries, dtype=torch.int32, device=device) % _VOCAB
    return [launch_bias(logits, bias_rows, ids, values, architecture)]


def grammar_mask(device: torch.device, architecture: str | None = None, *, rows: int) -> Sequence[Launch]:
    from nereid_kernels.triton_lang.grammar_mask import launch_grammar_mask

    bitmask = torch.zeros(rows, -(-_VOCAB // 32), dtype=torch.int32, device=device)
    return [launch_grammar_mask(torch.randn(rows, _VOCAB, device=device), bitmask, None, architecture)]


def verify_draft(
    device: torch.device, architecture: str | None = None, *, seqs: int, draft_len: int
) -> Sequence[Launch]:
    """Of drafters that say how probable they held each token."""
    from nereid_kernels.triton_lang.verify_draft import launch_chain

    target = torch.full((seqs * (draft_len + 1), _VOCAB), 1 / _VOCAB, device=device)
    drafts = torch.arange(seqs * draft_len, dtype=torch.int32, device=device)
    offsets = draft_len * torch.arange(seqs + 1, dtype=torch.int32, device=device)
    keys, accepted = torch.arange(len(target), device=device), torch.zeros(seqs, dtype=torch.int32, device=device)
    ids = torch.zeros(seqs, draft_len + 1, dtype=torch.int64, device=device)
    return [launch_chain(target, target[: len(drafts)], drafts, offsets, keys, None, accepted, ids, architecture)]


def verify_coupled(
    device: torch.device, architecture: str | None = None, *, seqs: int, draft_len: int
) -> Sequence[Launch]:
    """Where every row's token is drawn first, and drafts stand that equal it."""
    from nereid_kernels.triton_lang.verify_draft import launch_chain, launch_draw

    target = torch.full((seqs * (draft_len + 1), _VOCAB), 1 / _VOCAB, device=device)
    drafts = torch.arange(seqs * draft_len, dtype=torch.int32, device=device)
    offsets = draft_len * torch.arange(seqs + 1, dtype=torch.int32, device=device)
    keys, accepted = torch.arange(len(target), device=device), torch.zeros(seqs, dtype=torch.int32, device=device)
    drawn, ids = keys.int(), torch.zeros(seqs, draft_len + 1, dtype=torch.int64, device=device)
    draw = launch_draw(target, keys, drawn, architecture)
    return [draw, launch_chain(target, None, drafts, offsets, keys, drawn, accepted, ids, architecture)]


def verify_tree(device: torch.device, architecture: str | None = None, *, seqs: int, nodes: int) -> Sequence[Launch]:
    """nodes: of each sequence's tree, which is binary; its first is the token that was accepted last."""
    from nereid_kernels.triton_lang.verify_draft import launch_tree

    target = torch.full((seqs * nodes, _VOCAB), 1 / _VOCAB, device=device)
    node_ids = torch.arange(seqs * nodes, dtype=torch.int32, device=device)
    parents = (torch.arange(nodes, dtype=torch.int32, device=device) - 1).div(2, rounding_mode="floor").repeat(seqs)
    offsets, keys = nodes * torch.arange(seqs + 1, dtype=torch.int32, device=device), node_ids.long()
    depth = nodes.bit_length()
    ids = torch.zeros(seqs, depth, dtype=torch.int64, device=device)
    path, accepted = ids[:, 1:].int().contiguous(), ids[:, 0].int()
    return [launch_tree(target, node_ids, parents, offsets, keys, None, accepted, ids, path, architecture)]
