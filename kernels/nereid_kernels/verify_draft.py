"""verify_draft and verify_tree: which draft tokens the target model keeps, and the token after them. Exact: whatever
was drafted, the tokens that come out are distributed as the target's own.

Rule "rejection" (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318): a draft token x is
accepted with probability min(1, p(x) / q(x)); at the first that is not, the recovered token is drawn from the
normalised max(p - q, 0); where all are accepted, a bonus token is drawn from p. Without draft_probs q(x) is 1.
Children of one node of a tree are fixed, and tried in their order: each is a certain draft against what is left of p.

Rule "coupled": the target's token at a position is argmax(log p + Gumbel noise), the noise a pure function of (key,
token id) as in `sample`; draft tokens are accepted while they equal it. What comes out is then what plain sampling with
the same keys gives, not only in distribution, as long as log p and sampling's scores round alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.launch import run
from nereid_kernels.reference import verify_draft as reference

RULES = ("rejection", "coupled")


def verify_draft(
    target_probs: Tensor,
    draft_ids: Tensor,
    cu_draft_lens: Tensor,
    keys: Tensor,
    max_draft_len: int,
    *,
    draft_probs: Tensor | None = None,
    rule: str = "rejection",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(accepted [seqs] int32, ids [seqs, max_draft_len + 1] int64): how many draft tokens of each sequence stand, and
    these, the token after them, then -1. That token is -1 as well where its probabilities are not sound (NaN, all 0).

    draft_ids: [drafts] int32, all sequences' draft tokens after each other.  cu_draft_lens: [seqs + 1] int32, where
    each sequence's begin; a sequence may have none, and has at most max_draft_len.
    target_probs: [drafts + seqs, vocab] float32; a sequence with k draft tokens has k + 1 rows, one for each of them
    and one for the bonus token.
    keys: [drafts + seqs] int64, of the noise of each such row.  draft_probs: [drafts, vocab] float32, with rule
    "rejection" only.  On the CPU the definition itself runs.  Raises ValueError or TypeError, which name the argument.
    """
    seqs, drafts = cu_draft_lens.numel() - 1, draft_ids.numel()
    sizes: dict[str, int] = {}
    check_shapes(sizes, cu_draft_lens=(cu_draft_lens, (max(seqs, 0) + 1,)), draft_ids=(draft_ids, (drafts,)))
    tensors = {"draft_ids": draft_ids, "cu_draft_lens": cu_draft_lens}
    device = _check(sizes, drafts + seqs, target_probs, keys, rule, tensors)
    if draft_probs is not None:
        check_shapes(sizes, draft_probs=(draft_probs, (drafts, "vocab")))
        check_dtypes((torch.float32,), draft_probs=draft_probs)
        check_contiguous_rows(draft_probs=draft_probs)
        check_same_device(target_probs=target_probs, draft_probs=draft_probs)
        if rule == "coupled":
            raise ValueError("draft_probs: got a tensor; allowed: None with rule 'coupled', which asks for no q")
    _check_length("max_draft_len", max_draft_len)
    on_cpu = pick(device, backend) == "cpu"
    verify = reference.verify_draft if on_cpu else _verify_draft
    return verify(target_probs, draft_probs, draft_ids, cu_draft_lens, keys, max_draft_len, rule)


def verify_tree(
    target_probs: Tensor,
    node_ids: Tensor,
    parents: Tensor,
    cu_nodes: Tensor,
    keys: Tensor,
    max_depth: int,
    *,
    rule: str = "rejection",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(accepted [seqs] int32, ids [seqs, max_depth + 1] int64, path [seqs, max_depth] int32): how many draft tokens of
    each tree stand; these and the token after them; their nodes. Padded with -1, see `verify_draft`.

    A sequence's tree is one row of nodes: first its last confirmed token, then draft tokens, each after its parent.
    node_ids: [nodes] int32, tokens; siblings have different ones.  parents: [nodes] int32, index of the parent within
    the tree, -1 for the first node.  cu_nodes: [seqs + 1] int32, where each tree begins; none is empty.
    target_probs: [nodes, vocab] float32, of the token after each node.  keys: [nodes] int64, of the noise of that
    token.  max_depth: at least the number of draft tokens on the longest path.
    On the CPU the definition itself runs.  Raises ValueError or TypeError, which name the argument.
    """
    seqs, nodes = cu_nodes.numel() - 1, node_ids.numel()
    sizes: dict[str, int] = {}
    check_shapes(sizes, cu_nodes=(cu_nodes, (max(seqs, 0) + 1,)), node_ids=(node_ids, (nodes,)))
    check_shapes(sizes, parents=(parents, (nodes,)))
    tensors = {"node_ids": node_ids, "parents": parents, "cu_nodes": cu_nodes}
    device = _check(sizes, nodes, target_probs, keys, rule, tensors)
    _check_length("max_depth", max_depth)
    verify = reference.verify_tree if pick(device, backend) == "cpu" else _verify_tree
    return verify(target_probs, node_ids, parents, cu_nodes, keys, max_depth, rule)


def _check(
    sizes: dict[str, int], rows: int, target_probs: Tensor, keys: Tensor, rule: str, integers: dict[str, Tensor]
) -> torch.device:
    check_shapes(sizes, target_probs=(target_probs, (rows, "vocab")), keys=(keys, (rows,)))
    check_dtypes((torch.float32,), target_probs=target_probs)
    check_dtypes((torch.int64,), keys=keys)
    check_dtypes((torch.int32,), **integers)
    check_contiguous_rows(target_probs=target_probs, keys=keys, **integers)
    if rule not in RULES:
        raise ValueError(f"rule: got {rule!r}; allowed: {', '.join(RULES)}")
    return check_same_device(target_probs=target_probs, keys=keys, **integers)


def _check_length(name: str, value: int) -> None:
    if not 0 <= value < 1024:
        raise ValueError(f"{name}: got {value}; allowed: 0 to 1023")


@torch.library.custom_op("nereid_kernels::verify_draft", mutates_args=())
def _verify_draft(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_ids: Tensor,
    cu_draft_lens: Tensor,
    keys: Tensor,
    max_draft_len: int,
    rule: str,
) -> tuple[Tensor, Tensor]:
    from nereid_kernels.triton_lang import verify_draft as triton_lang

    accepted, ids, _ = _outputs(target_probs, cu_draft_lens, max_draft_len)
    drawn = _drawn(target_probs, keys) if rule == "coupled" else None
    run(triton_lang.launch_chain(target_probs, draft_probs, draft_ids, cu_draft_lens, keys, drawn, accepted, ids))
    return accepted, ids


@_verify_draft.register_fake
def _(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_ids: Tensor,
    cu_draft_lens: Tensor,
    keys: Tensor,
    max_draft_len: int,
    rule: str,
) -> tuple[Tensor, Tensor]:
    return _outputs(target_probs, cu_draft_lens, max_draft_len)[:2]


@torch.library.custom_op("nereid_kernels::verify_tree", mutates_args=())
def _verify_tree(
    target_probs: Tensor, node_ids: Tensor, parents: Tensor, cu_nodes: Tensor, keys: Tensor, max_depth: int, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    from nereid_kernels.triton_lang import verify_draft as triton_lang

    accepted, ids, path = _outputs(target_probs, cu_nodes, max_depth)
    drawn = _drawn(target_probs, keys) if rule == "coupled" else None
    run(triton_lang.launch_tree(target_probs, node_ids, parents, cu_nodes, keys, drawn, accepted, ids, path))
    return accepted, ids, path


@_verify_tree.register_fake
def _(
    target_probs: Tensor, node_ids: Tensor, parents: Tensor, cu_nodes: Tensor, keys: Tensor, max_depth: int, rule: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(target_probs, cu_nodes, max_depth)


def _drawn(target_probs: Tensor, keys: Tensor) -> Tensor:
    """The target's token of every row [rows]; all at once, though only those up to the first that differs count."""
    from nereid_kernels.triton_lang.verify_draft import launch_draw

    drawn = torch.empty(keys.shape, dtype=torch.int32, device=keys.device)
    run(launch_draw(target_probs, keys, drawn))
    return drawn


def _outputs(like: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    seqs = offsets.shape[0] - 1
    accepted = torch.empty(seqs, dtype=torch.int32, device=like.device)
    ids = torch.empty(seqs, length + 1, dtype=torch.int64, device=like.device)
    return accepted, ids, torch.empty(seqs, length, dtype=torch.int32, device=like.device)
