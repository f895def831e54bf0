"""How the contextual prior's kernels are launched, and their launches as a part of an attention call."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesattn.ops.attention.launch import MOST_LAUNCHES, Layout, blocks_of, grid_of, padded
from bayesattn.ops.attention.support import INTERPRETED
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.prior import kernels

BLOCK_KEYS, BLOCK = 64, 256
# a head with more keys than this (nodes of a graph) gets wide blocks for its one program, and its sum is computed once
MANY_KEYS, WIDE_BLOCK = 8192, 4096
# keys of a block and programs of the backward pass, which also holds its sums in registers: two or four programs for each
# multiprocessor of a large GPU
GRAD_KEYS = {torch.bfloat16: 64, torch.float16: 32, torch.float32: 32}
PROGRAMS = {torch.bfloat16: 264, torch.float16: 512, torch.float32: 512}


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def forward_launches(key: Layout, networks: int, hidden: int, valid: tuple[int, int] | None) -> tuple[Launch, Launch]:
    """Return the launches of the logits and of their log-softmax; `valid`: its strides over examples and heads."""
    b, h, n, d = key.shape
    logits = prepared(
        kernels.prior_logits_kernel, grid_of(n, BLOCK_KEYS, b * h), *key.strides[:3], h, networks, n, d, hidden,
        **_shared(d, hidden), BN=BLOCK_KEYS,
    )  # fmt: skip
    sizes = {"BLOCK": WIDE_BLOCK, "num_warps": 8} if n > MANY_KEYS else {"BLOCK": BLOCK}
    softmax = prepared(
        kernels.prior_softmax_kernel, (b * h,), *(valid or (0, 0)), h, n, HAS_VALID=valid is not None, **sizes
    )
    return logits, softmax


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def backward_launch(
    key: Layout, networks: int, hidden: int, valid: tuple[int, int] | None, grad: tuple[int, ...], need_key: bool
) -> tuple[Launch, tuple[int, int]]:
    """Return the launch of all gradients, and rows and columns of the sums it fills; `grad`: the strides of ln Ψ's."""
    b, h, n, d = key.shape
    keys = GRAD_KEYS[key.dtype]
    items = b * (h // networks) * blocks_of(n, keys)
    rows, columns = min(items, blocks_of(PROGRAMS[key.dtype], networks)), networks * (d * hidden + 2 * hidden + 1)
    launch = prepared(
        kernels.prior_grad_kernel, (rows, networks), *key.strides[:3], *(valid or (0, 0)), grad[0], grad[1], grad[3],
        h, networks, n, d, hidden, items, columns,
        **_shared(d, hidden), BN=keys, BLOCK=BLOCK, HAS_VALID=valid is not None, HAS_TOTALS=n > MANY_KEYS,
        NEED_KEY=need_key,
    )  # fmt: skip
    return launch, (rows, columns)


def _shared(d: int, hidden: int) -> dict[str, int]:
    """Return the constants of both kernels."""
    return {"BD": padded(d), "BH": padded(hidden), "WIDEN": INTERPRETED}


def launch_prior(
    layout: Layout,
    network: tuple[int, int],
    key: Tensor,
    weights: Sequence[Tensor],
    valid: Tensor | None,
    logits: Tensor,
    out: Tensor,
) -> None:
    """Fill ln Ψ [b, h, n], for attention that computes it on the way.

    Args:
        layout: Of the keys.
        network: How many networks there are, and their hidden width.
        key: The keys.
        weights: Contiguous weights of the networks.
        valid: Keys that exist, contiguous [b, 1, 1, n]; None is all.
        logits: Memory of the same size as ln Ψ.
        out: What is filled.
    """
    compute, normalize = forward_launches(layout, *network, _shared_by_heads(layout, valid))
    compute(key, *weights, logits)
    normalize(logits, logits if valid is None else valid, out)


def launch_prior_gradient(
    layout: Layout,
    network: tuple[int, int],
    key: Tensor,
    weights: Sequence[Tensor],
    valid: Tensor | None,
    out: Tensor,
    grad: Tensor,
    grad_key: Tensor | None,
    sums: Tensor,
) -> None:
    """Fill the gradient of the keys, if there is memory for it, and the rows that sum up to that of the networks.

    Arguments are as for `launch_prior`; `grad` is the gradient of `out`, contiguous, and `sums` has `prior_sums_shape`.
    """
    _, h, n, _ = layout.shape
    strides = (h * n, n, n, 1)
    launch, _ = backward_launch(layout, *network, _shared_by_heads(layout, valid), strides, grad_key is not None)
    launch(key, *weights[:3], out if valid is None else valid, out, grad, out, key if grad_key is None else grad_key, sums)


def prior_sums_shape(layout: Layout, network: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of the sums behind the networks' gradient."""
    _, h, n, _ = layout.shape
    return backward_launch(layout, *network, None, (h * n, n, n, 1), False)[1]


def _shared_by_heads(layout: Layout, valid: Tensor | None) -> tuple[int, int] | None:
    return None if valid is None else (layout.shape[2], 0)
