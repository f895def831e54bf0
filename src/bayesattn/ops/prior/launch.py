"""Launches of the contextual prior's kernels, also as part of an attention call."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from bayesattn.ops.attention.launch import MOST_LAUNCHES, Layout, blocks_of, grid_of, padded
from bayesattn.ops.attention.support import INTERPRETED
from bayesattn.ops.common.launch import Launch, prepared
from bayesattn.ops.prior import kernels

BLOCK_KEYS, BLOCK = 64, 256
# with more keys per head than this (nodes of a graph), the softmax's program gets wide blocks, and Σ d ln Ψ is computed once
MANY_KEYS, WIDE_BLOCK = 8192, 4096
# keys per block and number of programs of the backward pass, whose sums also occupy registers: two or four programs per
# multiprocessor of a large GPU
GRAD_KEYS = {torch.bfloat16: 64, torch.float16: 32, torch.float32: 32}
PROGRAMS = {torch.bfloat16: 264, torch.float16: 512, torch.float32: 512}


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def forward_launches(key: Layout, networks: int, hidden: int, valid: tuple[int, int] | None) -> tuple[Launch, Launch]:
    """Return the launches of the logits and of their log-softmax; `valid` is its strides over examples and heads."""
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
    """Return the launch of all gradients and the shape of its sums; `grad` is the strides of ln Ψ's gradient."""
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
    """Return the constants that the kernels of both passes share."""
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
    """Write ln Ψ [b, h, n] into `out`, as part of an attention call.

    `network` is the number of networks and their hidden width, `weights` are contiguous, `valid` is a contiguous mask
    [b, 1, 1, n] of the keys that exist (None means all), and `logits` is memory of the size of ln Ψ.
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
    """Write the keys' gradient into `grad_key`, unless that is None, and rows that add up to the networks' into `sums`.

    `grad` is the contiguous gradient of `out`, and `sums` has the shape that `prior_sums_shape` returns. The other arguments
    are those of `launch_prior`.
    """
    _, h, n, _ = layout.shape
    strides = (h * n, n, n, 1)
    launch, _ = backward_launch(layout, *network, _shared_by_heads(layout, valid), strides, grad_key is not None)
    launch(key, *weights[:3], out if valid is None else valid, out, grad, out, key if grad_key is None else grad_key, sums)


def prior_sums_shape(layout: Layout, network: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the rows that add up to the networks' gradient."""
    _, h, n, _ = layout.shape
    return backward_launch(layout, *network, None, (h * n, n, n, 1), False)[1]


def _shared_by_heads(layout: Layout, valid: Tensor | None) -> tuple[int, int] | None:
    return None if valid is None else (layout.shape[2], 0)
