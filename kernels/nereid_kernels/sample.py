"""sample: one token a row of logits, each row by its own parameters. No wait for the host, no sort.

Truncation in the order temperature, min_p, top_k, top_p of what is left; ties at a bound survive. The token is
argmax(score + Gumbel noise) over the survivors (Gumbel 1954), the noise a pure function of (key, token id), so that a
row's token depends on its own logits, parameters and key alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nereid_kernels.backends import pick
from nereid_kernels.checks import check_contiguous_rows, check_dtypes, check_same_device, check_shapes
from nereid_kernels.cpu import sample as cpu
from nereid_kernels.launch import run

_PARAMETERS = (torch.float32, torch.float64)


def sample(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(token ids [rows] int64, sound [rows] bool). A row with a NaN, or whose largest logit is infinite, is not sound;
    its token is 0.

    logits: [rows, vocab] float32, not changed; rows may be strided.  temperature: [rows] float32; below 1e-5 a row is
    greedy: the lowest id of the largest logits, whatever the other parameters.  min_p: [rows] float32 or float64, from
    0 (off) to 1.  top_k: [rows] int32; off where it is 0, negative, or as large as the vocabulary.  top_p: [rows]
    float32 or float64; 1 is off.  keys: [rows] int64, of the noise.

    Reads of a row, each 4 * vocab bytes, the first from memory and the others from a cache that holds it: 1 greedy, 2
    random, and up to 8 for top_k and 9 for top_p (fewer as soon as the bound lies between two tokens).
    Raises ValueError or TypeError, which name the argument.
    """
    parameters = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p, "keys": keys}
    sizes: dict[str, int] = {}
    check_shapes(sizes, logits=(logits, ("rows", "vocab")))
    check_shapes(sizes, **{name: (tensor, ("rows",)) for name, tensor in parameters.items()})
    check_dtypes((torch.float32,), logits=logits, temperature=temperature)
    check_dtypes(_PARAMETERS, min_p=min_p, top_p=top_p)
    check_dtypes((torch.int32,), top_k=top_k)
    check_dtypes((torch.int64,), keys=keys)
    check_contiguous_rows(logits=logits, **parameters)
    _check_vocabulary(sizes["vocab"])
    if pick(check_same_device(logits=logits, **parameters), backend) == "cpu":
        return cpu.sample(logits, temperature, min_p, top_k, top_p, keys)
    drawn: tuple[Tensor, Tensor] = _sample(logits, temperature, min_p, top_k, top_p, keys)
    return drawn


def greedy(logits: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """As `sample` where every row is greedy, without its parameters: a step with few rows spends as long on making them
    as on the logits.

    logits: [rows, vocab] float32, not changed; rows may be strided.
    Raises ValueError or TypeError, which name the argument.
    """
    check_shapes({}, logits=(logits, ("rows", "vocab")))
    check_dtypes((torch.float32,), logits=logits)
    check_contiguous_rows(logits=logits)
    num_rows, vocab = logits.shape
    _check_vocabulary(vocab)
    if pick(logits.device, backend) == "cpu":
        return cpu.greedy(logits)
    zeros = torch.zeros(num_rows, device=logits.device)
    return sample(logits, zeros, zeros, zeros.int(), zeros, zeros.long(), backend=backend)


def _check_vocabulary(vocab: int) -> None:
    if not 0 < vocab < 2**31:
        raise ValueError(f"logits: got a vocabulary of {vocab}; allowed: 1 to 2**31 - 1")


@torch.library.custom_op("nereid_kernels::sample", mutates_args=())
def _sample(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    from nereid_kernels.triton_lang.sample import launch_sample

    tokens, sound = _empty(logits)
    run(launch_sample(logits, temperature, min_p, top_k, top_p, keys, tokens, sound))
    return tokens, sound


@_sample.register_fake
def _(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    return _empty(logits)


def _empty(logits: Tensor) -> tuple[Tensor, Tensor]:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    return tokens, torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
