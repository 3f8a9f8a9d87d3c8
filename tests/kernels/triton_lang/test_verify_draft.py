"""verify_draft and verify_tree: token for token their definition, and exact in distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nereid_kernels import verify_draft as ops
from nereid_kernels.reference import verify_draft as reference
from nereid_kernels.reference.sample import sample
from tests.kernels.triton_lang.devices import to_default_device

TRIALS = pytest.mark.parametrize("trials", [240, pytest.param(4000, marks=pytest.mark.slow)])
SIGNIFICANCE = 1e-3  # of each comparison; seeds are fixed, so it either holds or does not
TREE = [-1, 0, 0, 1, 1, 2, 3, 0]  # a parent comes before its children; siblings need not be neighbours


def normal(*shape: int) -> Tensor:
    return to_default_device(torch.randn(shape, device="cpu"))


def random_probs(rows: int, vocab: int) -> Tensor:
    return (2 * normal(rows, vocab)).softmax(-1)


def random_keys(rows: int) -> Tensor:
    return to_default_device(torch.randint(-(2**63), 2**63 - 1, (rows,), device="cpu"))


def draws(probs: Tensor) -> Tensor:
    """One token of each row [rows, vocab], int32."""
    return to_default_device(torch.multinomial(probs.cpu(), 1)[:, 0].int())


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def assert_drawn_from(tokens: Tensor, probs: Tensor) -> None:
    """Pearson's chi-square test of tokens [n] against probs [vocab]."""
    expected = probs.double() * len(tokens)
    statistic = ((tokens.bincount(minlength=len(probs)) - expected) ** 2 / expected).sum()
    p_value = torch.special.gammaincc(torch.tensor((len(probs) - 1) / 2).double(), statistic / 2)
    assert p_value > SIGNIFICANCE, f"chi-square {statistic:.1f} of {len(tokens)} tokens, p {p_value:.2g}"


@pytest.mark.parametrize("drafter", ["with_probs", "certain", "coupled"])
@pytest.mark.parametrize("vocab", [5, 150])
def test_a_chain_equals_its_definition(vocab: int, drafter: str) -> None:
    lengths = [3, 0, 1, 4, 2, 2, 4, 1]
    drafts, seqs = sum(lengths), len(lengths)
    q = random_probs(drafts, vocab)
    draft_ids = draws(q)
    target, keys, cu_draft_lens = random_probs(drafts + seqs, vocab), random_keys(drafts + seqs), offsets(lengths)
    for draft in range(0, drafts, 2):  # so that some are accepted
        seq = int((cu_draft_lens[1:] <= draft).sum())
        target[draft + seq] = 0.05 * target[draft + seq] + 0.95 * torch.eye(vocab)[int(draft_ids[draft])]
    target[1] = q[1]  # nothing is left of p - q
    draft_probs, rule = q if drafter == "with_probs" else None, "coupled" if drafter == "coupled" else "rejection"
    found = ops.verify_draft(
        target, draft_ids, cu_draft_lens, keys, 4, draft_probs=draft_probs, rule=rule, backend="triton_lang"
    )
    wanted = reference.verify_draft(target, draft_probs, draft_ids, cu_draft_lens, keys, 4, rule)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert 0 < found[0].sum() < drafts
    assert torch.equal((found[1] >= 0).sum(1), found[0] + 1)


@pytest.mark.parametrize("rule", ops.RULES)
@pytest.mark.parametrize("vocab", [6, 150])
def test_a_tree_equals_its_definition(vocab: int, rule: str) -> None:
    lengths = [len(TREE), 1, 4, len(TREE), len(TREE)]
    nodes = sum(lengths)
    parents = torch.tensor([parent for length in lengths for parent in TREE[:length]]).int()
    node_ids = torch.cat([torch.randperm(vocab)[:6].repeat(2)[:length] for length in lengths]).int()
    target, keys, cu_nodes = random_probs(nodes, vocab), random_keys(nodes), offsets(lengths)
    for node in torch.nonzero(parents >= 0)[::2, 0].tolist():
        first = int(cu_nodes[cu_nodes <= node].max())
        parent = first + int(parents[node])
        target[parent] = 0.3 * target[parent] + 0.7 * torch.eye(vocab)[int(node_ids[node])]
    found = ops.verify_tree(target, node_ids, parents, cu_nodes, keys, 3, rule=rule, backend="triton_lang")
    wanted = reference.verify_tree(target, node_ids, parents, cu_nodes, keys, 3, rule)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert found[0].max() > 1
    assert torch.equal((found[2] >= 0).sum(1), found[0].long())


@TRIALS
@pytest.mark.parametrize("drafter", ["with_probs", "certain"])
def test_a_chains_tokens_are_distributed_as_the_targets(drafter: str, trials: int) -> None:
    p, q = normal(2, 5).softmax(-1), normal(1, 5).softmax(-1)
    draft_probs = q.repeat(trials, 1)
    draft_ids = draws(draft_probs)
    accepted, ids = ops.verify_draft(
        p.repeat(trials, 1),
        draft_ids,
        offsets([1] * trials),
        random_keys(2 * trials),
        1,
        draft_probs=draft_probs if drafter == "with_probs" else None,
        backend="triton_lang",
    )
    assert_drawn_from(ids[:, 0], p[0])
    assert_drawn_from(ids[accepted == 1, 1], p[1])  # the same whatever was accepted before it
    with pytest.raises(AssertionError, match="chi-square"):
        assert_drawn_from(ids[:, 0], q[0])  # the test can tell


@TRIALS
def test_a_trees_tokens_are_distributed_as_the_targets(trials: int) -> None:
    parents, node_ids = torch.tensor([-1, 0, 0, 1]).int(), torch.tensor([0, 3, 1, 2]).int()
    p = normal(4, 5).softmax(-1)
    _, ids, path = ops.verify_tree(
        p.repeat(trials, 1),
        node_ids.repeat(trials),
        parents.repeat(trials),
        offsets([4] * trials),
        random_keys(4 * trials),
        2,
        backend="triton_lang",
    )
    assert_drawn_from(ids[:, 0], p[0])
    for node in (1, 2):
        assert_drawn_from(ids[path[:, 0] == node, 1], p[node])


@TRIALS
def test_the_coupled_rule_draws_from_the_target(trials: int) -> None:
    p, none = normal(5).softmax(-1), torch.zeros(0).int()
    target = p.repeat(trials, 1)
    _, ids = ops.verify_draft(
        target, none, offsets([0] * trials), random_keys(trials), 0, rule="coupled", backend="triton_lang"
    )
    assert_drawn_from(ids[:, 0], p)


def test_the_coupled_rule_gives_the_tokens_of_plain_sampling() -> None:
    logits, keys = 3 * normal(24, 150), random_keys(24)
    ones, zeros = torch.ones(24), torch.zeros(24)
    plain, _ = sample(logits, ones, zeros, zeros.int(), ones, keys)
    drafts = plain.reshape(6, 4)[:, :3].clone()
    wrong = torch.tensor([0, 1, 2, 3, 3, 0])  # the first draft token of each that differs
    drafts[torch.arange(6), wrong.clamp(max=2)] += (wrong < 3).long()
    accepted, ids = ops.verify_draft(
        logits.softmax(-1), drafts.flatten().int(), offsets([3] * 6), keys, 3, rule="coupled", backend="triton_lang"
    )
    assert torch.equal(accepted.long(), wrong)
    assert all(torch.equal(i[: n + 1], p[: n + 1]) for i, n, p in zip(ids, wrong, plain.reshape(6, 4), strict=True))


def test_a_row_that_is_not_sound_gives_no_token() -> None:
    target = torch.full((2, 5), math.nan)
    for draft_probs in (None, random_probs(1, 5)):
        accepted, ids = ops.verify_draft(
            target,
            torch.tensor([1]).int(),
            offsets([1]),
            random_keys(2),
            2,
            draft_probs=draft_probs,
            backend="triton_lang",
        )
        assert accepted.tolist() == [0] and ids.tolist() == [[-1, -1, -1]]


def test_what_is_returned_is_as_long_as_asked_for() -> None:
    """A longer limit changes nothing but the padding, up to the longest that is allowed."""
    target, drafts, keys = random_probs(5, 7), torch.tensor([1, 2, 3]).int(), random_keys(5)
    nodes, parents = torch.tensor([1, 2, 3, 4, 5]).int(), torch.tensor([-1, 0, 1, -1, 0]).int()
    for limit in (3, 1023):
        chain = ops.verify_draft(target, drafts, offsets([2, 1]), keys, limit, backend="triton_lang")
        tree = ops.verify_tree(target, nodes, parents, offsets([3, 2]), keys, limit, backend="triton_lang")
        assert [out.shape[1] for out in (chain[1], tree[1], tree[2])] == [limit + 1, limit + 1, limit]
        for found, wanted in (
            (chain, reference.verify_draft(target, None, drafts, offsets([2, 1]), keys, limit, "rejection")),
            (tree, reference.verify_tree(target, nodes, parents, offsets([3, 2]), keys, limit, "rejection")),
        ):
            assert all(map(torch.equal, found, wanted))


def test_no_sequences() -> None:
    none = torch.zeros(0).int()
    accepted, ids = ops.verify_draft(torch.zeros(0, 5), none, offsets([]), none.long(), 2, backend="triton_lang")
    assert accepted.shape == (0,) and ids.shape == (0, 3)


def test_what_they_refuse() -> None:
    target, drafts, keys = random_probs(3, 5), torch.tensor([1, 2]).int(), random_keys(3)
    with pytest.raises(ValueError, match=r"target_probs: got shape \[3, 5\]; allowed: \[4, vocab"):
        ops.verify_draft(target, drafts, offsets([1, 1]), keys, 2)
    with pytest.raises(ValueError, match=r"rule: got 'typical'; allowed: rejection, coupled"):
        ops.verify_draft(target, drafts, offsets([2]), keys, 2, rule="typical")
    with pytest.raises(ValueError, match=r"draft_probs: got a tensor; allowed: None"):
        ops.verify_draft(target, drafts, offsets([2]), keys, 2, draft_probs=target[:2], rule="coupled")
    with pytest.raises(ValueError, match=r"max_depth: got -1"):
        ops.verify_tree(target, keys.int(), keys.int(), offsets([3]), keys, -1)


def test_are_custom_operators() -> None:
    utilities = ("test_schema", "test_faketensor")
    target, drafts, keys = random_probs(3, 5), torch.tensor([1, 2]).int(), random_keys(3)
    chain = (target, None, drafts, offsets([2]), keys, 2, "coupled")
    torch.library.opcheck(ops._verify_draft, chain, test_utils=utilities)
    tree = (target, torch.tensor([0, 1, 2]).int(), torch.tensor([-1, 0, 1]).int(), offsets([3]), keys, 2, "rejection")
    torch.library.opcheck(ops._verify_tree, tree, test_utils=utilities)
