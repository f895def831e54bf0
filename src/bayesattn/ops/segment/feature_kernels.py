"""Triton kernels for a node's parts of GAT's scores, x · att_source and x · att_target, and for their gradients."""

import triton
import triton.language as tl

from bayesattn.ops.common.tiles import saturated


@triton.jit
def node_scores_kernel(
    FEATURES, ATT_SOURCE, ATT_TARGET, SOURCE, TARGET, ENTRIES, H, D, BLOCK: tl.constexpr, BD: tl.constexpr
):
    """Compute both products for a block of the entries of [nodes, heads], which are numbered consecutively."""
    entry, rd = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BD)
    inside = entry < ENTRIES
    mask = inside[:, None] & (rd < D)[None, :]
    features = tl.load(FEATURES + entry[:, None] * D + rd[None, :], mask=mask, other=0.0).to(tl.float32)
    place = (entry % H)[:, None] * D + rd[None, :]
    to_source = tl.load(ATT_SOURCE + place, mask=mask, other=0.0).to(tl.float32)
    to_target = tl.load(ATT_TARGET + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(SOURCE + entry, tl.sum(features * to_source, 1), mask=inside)
    tl.store(TARGET + entry, tl.sum(features * to_target, 1), mask=inside)


@triton.jit
def node_grad_kernel(
    FEATURES, ATT_SOURCE, ATT_TARGET, GRAD_SOURCE, GRAD_TARGET, GRAD_KEY, GRAD_FEATURES, SUMS, N, H, D,
    BN: tl.constexpr, BC: tl.constexpr, HAS_KEY: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a program's share of the nodes, for BC of their heads × features.

    dx is added to GRAD_FEATURES, which already has the gradient of the values; with HAS_KEY, so is the gradient of the
    prior's keys, [heads, nodes, features]. Each program also writes a row of sums for both vectors.
    """
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    columns = H * D
    in_row, head = column < columns, column // D
    to_source = tl.load(ATT_SOURCE + column, mask=in_row, other=0.0).to(tl.float32)
    to_target = tl.load(ATT_TARGET + column, mask=in_row, other=0.0).to(tl.float32)
    source_sums, target_sums = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
    for start in range(tl.program_id(0) * BN, N, tl.num_programs(0) * BN):
        node = (start + tl.arange(0, BN)).to(tl.int64)
        inside = (node < N)[:, None] & in_row[None, :]
        place, score = node[:, None] * columns + column[None, :], node[:, None] * H + head[None, :]
        features = tl.load(FEATURES + place, mask=inside, other=0.0).to(tl.float32)
        source = tl.load(GRAD_SOURCE + score, mask=inside, other=0.0)
        target = tl.load(GRAD_TARGET + score, mask=inside, other=0.0)
        source_sums += tl.sum(source * features, 0)
        target_sums += tl.sum(target * features, 0)
        grad = tl.load(GRAD_FEATURES + place, mask=inside, other=0.0).to(tl.float32)
        grad += source * to_source[None, :] + target * to_target[None, :]
        if HAS_KEY:
            key = (head.to(tl.int64)[None, :] * N + node[:, None]) * D + (column % D)[None, :]
            grad += tl.load(GRAD_KEY + key, mask=inside, other=0.0).to(tl.float32)
        tl.store(GRAD_FEATURES + place, saturated(grad, GRAD_FEATURES.dtype.element_ty), mask=inside)
    sums = SUMS + tl.program_id(0).to(tl.int64) * 2 * columns + column
    tl.store(sums, source_sums, mask=in_row)
    tl.store(sums + columns, target_sums, mask=in_row)
