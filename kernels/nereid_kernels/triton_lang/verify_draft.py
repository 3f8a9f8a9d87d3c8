"""The kernels of verify_draft and verify_tree: one program a sequence, which reads single probabilities to decide what
is accepted, and then one row of the vocabulary for the token after it.

With rule "coupled" another kernel has drawn every row's token before, one program a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nereid_kernels.launch import Launch, architecture_of, choose
from nereid_kernels.triton_lang.noise import race, random_bits, uniform

# The longest row of tokens that the wrapper allows. The length of drafts changes from step to step, and no length may
# be compiled for while serving.
_BLOCK_OUT = 1024


@triton.jit
def _draw_token(
    p_ptr: tl.tensor,  # [vocab], the target's probabilities
    q_ptr: tl.tensor,  # [vocab], what is taken off them, or None
    ids_ptr: tl.tensor,  # draft tokens, of which those from begin to end are taken out, or None
    parents_ptr: tl.tensor,  # beside ids_ptr: only children of `parent` are taken out; None: all
    parent: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    vocab: tl.tensor,
    key: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """A token in proportion to what is left of p; -1 where nothing is."""
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        weights = tl.load(p_ptr + tokens, mask=tokens < vocab, other=0.0)
        if q_ptr is not None:
            weights -= tl.load(q_ptr + tokens, mask=tokens < vocab, other=0.0)
        if ids_ptr is not None:
            for draft in range(begin, end):
                token = tl.load(ids_ptr + draft)
                if parents_ptr is not None:
                    token = tl.where(tl.load(parents_ptr + draft) == parent, token, -1)
                weights = tl.where(tokens == token, 0.0, weights)
        scores = tl.where(weights > 0.0, tl.log(tl.where(weights > 0.0, weights, 1.0)), float("-inf"))
        best, winner = race(best, winner, scores, tokens, key)
    return winner


@triton.jit
def _draw(
    probs_ptr: tl.tensor,  # [rows, vocab]
    keys_ptr: tl.tensor,  # [rows]
    drawn_ptr: tl.tensor,  # [rows]
    probs_stride: tl.tensor,
    vocab: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys_ptr + row)
    token = _draw_token(probs_ptr + row * probs_stride, None, None, None, 0, 0, 0, vocab, key, BLOCK)
    tl.store(drawn_ptr + row, token)


@triton.jit(do_not_specialize=["out_len"])
def _verify_chain(
    p_ptr: tl.tensor,  # [drafts + seqs, vocab]
    q_ptr: tl.tensor,  # [drafts, vocab], or None
    draft_ids_ptr: tl.tensor,  # [drafts]
    cu_draft_lens_ptr: tl.tensor,  # [seqs + 1]
    keys_ptr: tl.tensor,  # [drafts + seqs]
    drawn_ptr: tl.tensor,  # [drafts + seqs] with rule "coupled", or None
    accepted_ptr: tl.tensor,  # [seqs]
    out_ptr: tl.tensor,  # [seqs, out_len], contiguous
    p_stride: tl.tensor,
    q_stride: tl.tensor,
    vocab: tl.tensor,
    out_len: tl.tensor,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_draft_lens_ptr + seq).to(tl.int64)
    draft_len = tl.load(cu_draft_lens_ptr + seq + 1) - first.to(tl.int32)
    positions = tl.arange(0, BLOCK_OUT)
    is_draft = positions < draft_len
    ids = tl.load(draft_ids_ptr + first + positions, mask=is_draft, other=-1)
    rows = first + seq + positions  # [BLOCK_OUT], of p, keys and drawn
    if drawn_ptr is not None:
        stands = tl.load(drawn_ptr + rows, mask=is_draft, other=-1) == ids
    else:
        p = tl.load(p_ptr + rows * p_stride + ids, mask=is_draft, other=0.0)
        threshold = uniform(random_bits(tl.load(keys_ptr + rows, mask=is_draft, other=0), tl.full([], -1, tl.int64)))
        if q_ptr is not None:
            q = tl.load(q_ptr + (first + positions) * q_stride + ids, mask=is_draft, other=0.0)
            threshold *= q.to(tl.float64)
        stands = threshold < p.to(tl.float64)
    accepted = tl.min(tl.where(is_draft & (stands == 0), positions, draft_len), axis=0)

    row = first + seq + accepted
    if drawn_ptr is not None:
        following = tl.load(drawn_ptr + row)
    else:
        key = tl.load(keys_ptr + row)
        p_row = p_ptr + row * p_stride
        draft = first + accepted
        following = tl.full([], -1, tl.int32)
        if accepted < draft_len:
            if q_ptr is not None:
                q_row = q_ptr + draft * q_stride
                following = _draw_token(p_row, q_row, None, None, 0, 0, 0, vocab, key, BLOCK)
            else:
                following = _draw_token(p_row, None, draft_ids_ptr, None, 0, draft, draft + 1, vocab, key, BLOCK)
        if following < 0:  # all accepted; or nothing is left but by rounding
            following = _draw_token(p_row, None, None, None, 0, 0, 0, vocab, key, BLOCK)
    out = tl.where(positions < accepted, ids, tl.where(positions == accepted, following, -1))
    tl.store(out_ptr + seq * out_len + positions, out.to(tl.int64), mask=positions < out_len)
    tl.store(accepted_ptr + seq, accepted)


@triton.jit(do_not_specialize=["out_len"])
def _verify_tree(
    p_ptr: tl.tensor,  # [nodes, vocab]
    node_ids_ptr: tl.tensor,  # [nodes]
    parents_ptr: tl.tensor,  # [nodes]
    cu_nodes_ptr: tl.tensor,  # [seqs + 1]
    keys_ptr: tl.tensor,  # [nodes]
    drawn_ptr: tl.tensor,  # [nodes] with rule "coupled", or None
    accepted_ptr: tl.tensor,  # [seqs]
    out_ptr: tl.tensor,  # [seqs, out_len], contiguous
    path_ptr: tl.tensor,  # [seqs, out_len - 1], contiguous
    p_stride: tl.tensor,
    vocab: tl.tensor,
    out_len: tl.tensor,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    seq = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_nodes_ptr + seq).to(tl.int64)
    num_nodes = tl.load(cu_nodes_ptr + seq + 1) - first.to(tl.int32)
    ids_ptr = node_ids_ptr + first
    tree_ptr = parents_ptr + first
    positions = tl.arange(0, BLOCK_OUT)
    out = tl.full([BLOCK_OUT], -1, tl.int32)
    path = tl.full([BLOCK_OUT], -1, tl.int32)
    current = tl.zeros([], tl.int32)  # the last node that stands
    depth = tl.zeros([], tl.int32)
    left = tl.full([], 1.0, tl.float64)  # of the mass of p at current, less the children that were tried
    tried = tl.zeros([], tl.int64)
    for node in range(1, num_nodes):  # children come after their parent: one pass sees them all
        if tl.load(tree_ptr + node) == current:
            token = tl.load(ids_ptr + node)
            row = first + current
            if drawn_ptr is not None:
                stands = tl.load(drawn_ptr + row) == token
            else:
                p = tl.load(p_ptr + row * p_stride + token).to(tl.float64)
                stands = uniform(random_bits(tl.load(keys_ptr + row), -1 - tried)) * left < p
                left -= p
                tried += 1
            if stands:
                out = tl.where(positions == depth, token, out)
                path = tl.where(positions == depth, node, path)
                current = node
                depth += 1
                left = tl.full([], 1.0, tl.float64)
                tried = tl.zeros([], tl.int64)

    row = first + current
    if drawn_ptr is not None:
        following = tl.load(drawn_ptr + row)
    else:
        key = tl.load(keys_ptr + row)
        p_row = p_ptr + row * p_stride
        following = _draw_token(p_row, None, ids_ptr, tree_ptr, current, current + 1, num_nodes, vocab, key, BLOCK)
        if following < 0:  # nothing is left but by rounding
            following = _draw_token(p_row, None, None, None, 0, 0, 0, vocab, key, BLOCK)
    out = tl.where(positions == depth, following, out)
    tl.store(out_ptr + seq * out_len + positions, out.to(tl.int64), mask=positions < out_len)
    tl.store(path_ptr + seq * (out_len - 1) + positions, path, mask=positions < out_len - 1)
    tl.store(accepted_ptr + seq, depth)


def launch_draw(probs: Tensor, keys: Tensor, drawn: Tensor, architecture: str | None = None) -> Launch:
    """probs: [rows, vocab].  keys, drawn: [rows].  architecture: as in `launch_rms_norm`."""
    rows, vocab = probs.shape
    config = choose("verify_draft", architecture or architecture_of(probs.device), size=vocab)
    arguments = {
        "probs_ptr": probs,
        "keys_ptr": keys,
        "drawn_ptr": drawn,
        "probs_stride": probs.stride(0),
        "vocab": vocab,
        **config.tiles,
    }
    return Launch(_draw, (rows,), arguments, config.num_warps, config.num_stages)


def launch_chain(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_ids: Tensor,
    cu_draft_lens: Tensor,
    keys: Tensor,
    drawn: Tensor | None,
    accepted: Tensor,
    ids: Tensor,
    architecture: str | None = None,
) -> Launch:
    """Shapes as in `_verify_chain`. drawn: by `launch_draw`, for rule "coupled"."""
    vocab = target_probs.shape[1]
    config = choose("verify_draft", architecture or architecture_of(target_probs.device), size=vocab)
    arguments = {
        "p_ptr": target_probs,
        "q_ptr": draft_probs,
        "draft_ids_ptr": draft_ids,
        "cu_draft_lens_ptr": cu_draft_lens,
        "keys_ptr": keys,
        "drawn_ptr": drawn,
        "accepted_ptr": accepted,
        "out_ptr": ids,
        "p_stride": target_probs.stride(0),
        "q_stride": 0 if draft_probs is None else draft_probs.stride(0),
        "vocab": vocab,
        "out_len": ids.shape[1],
        "BLOCK_OUT": _BLOCK_OUT,
        **config.tiles,
    }
    return Launch(_verify_chain, (ids.shape[0],), arguments, config.num_warps, config.num_stages)


def launch_tree(
    target_probs: Tensor,
    node_ids: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    keys: Tensor,
    drawn: Tensor | None,
    accepted: Tensor,
    ids: Tensor,
    path: Tensor,
    architecture: str | None = None,
) -> Launch:
    """Shapes as in `_verify_tree`. drawn: by `launch_draw`, for rule "coupled"."""
    vocab = target_probs.shape[1]
    config = choose("verify_draft", architecture or architecture_of(target_probs.device), size=vocab)
    arguments = {
        "p_ptr": target_probs,
        "node_ids_ptr": node_ids,
        "parents_ptr": parents,
        "cu_nodes_ptr": cu_nodes,
        "keys_ptr": keys,
        "drawn_ptr": drawn,
        "accepted_ptr": accepted,
        "out_ptr": ids,
        "path_ptr": path,
        "p_stride": target_probs.stride(0),
        "vocab": vocab,
        "out_len": ids.shape[1],
        "BLOCK_OUT": _BLOCK_OUT,
        **config.tiles,
    }
    return Launch(_verify_tree, (ids.shape[0],), arguments, config.num_warps, config.num_stages)
