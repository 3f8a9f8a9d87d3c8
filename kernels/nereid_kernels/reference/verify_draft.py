"""verify_draft and verify_tree by their definition: one sequence after the other, in plain Python."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nereid_kernels.draw_noise import gumbel, uniform


def verify_draft(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_ids: Tensor,
    cu_draft_lens: Tensor,
    keys: Tensor,
    max_draft_len: int,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """See `nereid_kernels.verify_draft` for shapes."""
    bounds = cu_draft_lens.tolist()
    all_kept = []
    for seq, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        kept: list[int] = []
        for draft in range(first, end):
            row = draft + seq
            token, p = int(draft_ids[draft]), target_probs[row]
            q = torch.eye(len(p))[token] if draft_probs is None else draft_probs[draft]
            if rule == "coupled":
                following = _draw(p, keys[row])
                is_accepted = following == token
            else:
                is_accepted = bool(_uniform(keys[row], -1) * q[token].double() < p[token])
                following = -1 if is_accepted else _draw(p - q, keys[row], otherwise=p)
            if not is_accepted:
                break
            kept.append(token)
        else:
            following = _draw(target_probs[end + seq], keys[end + seq])
        all_kept.append([*kept, following])
    return _counts(all_kept), _padded(all_kept, max_draft_len + 1).long()


def verify_tree(
    target_probs: Tensor, node_ids: Tensor, parents: Tensor, cu_nodes: Tensor, keys: Tensor, max_depth: int, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See `nereid_kernels.verify_draft` for shapes."""
    bounds = cu_nodes.tolist()
    all_kept, all_paths = [], []
    for first, end in zip(bounds, bounds[1:], strict=False):
        tokens, tree = node_ids[first:end].tolist(), parents[first:end].tolist()
        path = [0]
        while True:
            p, key = target_probs[first + path[-1]], keys[first + path[-1]]
            children = [node for node in range(len(tree)) if tree[node] == path[-1]]
            coupled = _draw(p, key) if rule == "coupled" else None
            child = _try_children(p, key, {node: tokens[node] for node in children}, coupled)
            if child is None:
                break
            path.append(child)
        following = coupled
        if following is None:
            rest = p.clone()
            rest[[tokens[node] for node in children]] = 0.0
            following = _draw(rest, key, otherwise=p)
        all_kept.append([*(tokens[node] for node in path[1:]), following])
        all_paths.append(path[1:])
    return _counts(all_kept), _padded(all_kept, max_depth + 1).long(), _padded(all_paths, max_depth)


def _try_children(p: Tensor, key: Tensor, children: dict[int, int], coupled: int | None) -> int | None:
    """The child that is accepted. children: their tokens by node.  coupled: the target's token, by that rule."""
    left = torch.ones((), dtype=torch.float64)
    for tried, (node, token) in enumerate(children.items()):
        by_chance = bool(_uniform(key, -1 - tried) * left < p[token])
        if token == coupled or (coupled is None and by_chance):
            return node
        left = left - p[token].double()
    return None


def _uniform(key: Tensor, number: int) -> Tensor:
    return uniform(key, torch.tensor(number))


def _draw(weights: Tensor, key: Tensor, otherwise: Tensor | None = None) -> int:
    """A token in proportion to its weight [vocab], where that is positive; from `otherwise` where none is."""
    if not (weights > 0).any():
        return -1 if otherwise is None else _draw(otherwise, key)
    scores = torch.where(weights > 0, weights.log(), -math.inf).double()
    return int((scores + gumbel(key, torch.arange(len(weights)))).argmax())


def _counts(all_kept: list[list[int]]) -> Tensor:
    return torch.tensor([len(kept) - 1 for kept in all_kept], dtype=torch.int32)


def _padded(rows: list[list[int]], width: int) -> Tensor:
    padded = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32).reshape(len(rows), width)
