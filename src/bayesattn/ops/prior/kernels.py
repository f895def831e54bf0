"""Triton kernels of the contextual prior: Ψ = softmax_j(w₂ᵀ relu(W₁ᵀ k_j + b₁) + b₂) over the keys of a head (Sec. 3.3).

All arithmetic has float32 precision. Keys in bfloat16 are not cast: a float32 matrix is the sum of three bfloat16 matrices,
so three products on tensor cores, accumulated in float32, give the exact product. Other keys need one plain product.
"""

import triton
import triton.language as tl

from bayesattn.ops.common.tiles import block_and_head


@triton.jit
def _network(W1, B1, W2, network, rd, rh, D, HIDDEN):
    """Return W₁, b₁ and w₂ of a network in float32, padded with 0."""
    inside = (rd < D)[:, None] & (rh < HIDDEN)[None, :]
    w1 = tl.load(W1 + network * D * HIDDEN + rd[:, None] * HIDDEN + rh[None, :], mask=inside, other=0.0)
    b1 = tl.load(B1 + network * HIDDEN + rh, mask=rh < HIDDEN, other=0.0)
    w2 = tl.load(W2 + network * HIDDEN + rh, mask=rh < HIDDEN, other=0.0)
    return w1.to(tl.float32), b1.to(tl.float32), w2.to(tl.float32)


@triton.jit
def _keys(keys, rn, rd, stride_kn, N, D):
    """Return a block of keys in bfloat16 or float32, padded with 0."""
    inside = (rn < N)[:, None] & (rd < D)[None, :]
    k = tl.load(keys + rn[:, None] * stride_kn + rd[None, :], mask=inside, other=0.0)
    return k if k.dtype == tl.bfloat16 else k.to(tl.float32)


@triton.jit
def _parts(x):
    """Split x into three bfloat16 matrices, whose sum is x: each rounds what the ones before it leave over."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, total, WIDEN: tl.constexpr):
    """Return a · b + total; WIDEN is for Triton's interpreter, which cannot multiply bfloat16."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _product(keys, matrix, WIDEN: tl.constexpr):
    """Return keys · matrix for a float32 matrix."""
    if keys.dtype == tl.bfloat16:
        high, middle, low = _parts(matrix)  # type: ignore[misc]  (a jitted call's type is not known)
        return _dot(keys, high, _dot(keys, middle, _dot(keys, low, None, WIDEN), WIDEN), WIDEN)
    else:  # needed, because Triton also compiles what follows a return
        return _dot(keys, matrix, None, False)


@triton.jit
def _product_for_keys(gradient, matrix, keys, WIDEN: tl.constexpr):
    """Return gradient · matrix, precise enough for the type of the keys: for bfloat16 without the smallest parts."""
    if keys.dtype == tl.bfloat16:
        high, middle, _ = _parts(gradient)  # type: ignore[misc]
        to_high, to_middle, _ = _parts(matrix)  # type: ignore[misc]
        return _dot(high, to_high, _dot(high, to_middle, _dot(middle, to_high, None, WIDEN), WIDEN), WIDEN)
    else:
        return _dot(gradient, matrix, None, False)


@triton.jit
def prior_logits_kernel(
    K, W1, B1, W2, B2, LOGITS, stride_kb, stride_kh, stride_kn, H, NETWORKS, N, D, HIDDEN,
    BN: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the prior logits of one block of keys."""
    block, bh, _blocks = block_and_head(N, BN)  # type: ignore[misc]
    batch, head, network = (bh // H).to(tl.int64), (bh % H).to(tl.int64), (bh % H) % NETWORKS
    rn, rd, rh = block * BN + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BH)
    w1, b1, w2 = _network(W1, B1, W2, network, rd, rh, D, HIDDEN)  # type: ignore[misc]  (a jitted call's type is not known)
    k = _keys(K + batch * stride_kb + head * stride_kh, rn, rd, stride_kn, N, D)
    hidden = _product(k, w1, WIDEN) + b1[None, :]
    logits = tl.sum(tl.maximum(hidden, 0.0) * w2[None, :], 1) + tl.load(B2 + network).to(tl.float32)
    tl.store(LOGITS + bh.to(tl.int64) * N + rn, logits, mask=rn < N)


@triton.jit
def _used(valid, r, N, HAS_VALID: tl.constexpr):
    used = r < N
    if HAS_VALID:
        used = used & (tl.load(valid + r, mask=used, other=0) != 0)
    return used


@triton.jit
def prior_softmax_kernel(LOGITS, VALID, OUT, stride_vb, stride_vh, H, N, HAS_VALID: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ln Ψ of all keys of a head: −inf for invalid keys, but 0 for all keys if none is valid."""
    bh = tl.program_id(0)
    row = bh.to(tl.int64) * N
    valid = VALID + (bh // H).to(tl.int64) * stride_vb + (bh % H).to(tl.int64) * stride_vh
    top, total = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        r = start + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row + r, mask=_used(valid, r, N, HAS_VALID), other=-float("inf"))
        new_top = tl.maximum(top, x)
        pivot = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - pivot) + tl.exp(x - pivot)
        top = new_top
    highest = tl.max(top, 0)
    has_key = highest > -float("inf")
    pivot = tl.where(has_key, highest, 0.0)
    lse = pivot + tl.log(tl.where(has_key, tl.sum(total * tl.exp(top - pivot), 0), 1.0))
    for start in range(0, N, BLOCK):
        r = start + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row + r, mask=_used(valid, r, N, HAS_VALID), other=-float("inf"))
        tl.store(OUT + row + r, tl.where(has_key, x - lse, 0.0), mask=r < N)


@triton.jit
def prior_grad_kernel(
    K, W1, B1, W2, VALID, OUT, GRAD, TOTALS, GRAD_K, SUMS,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_gb, stride_gh, stride_gn,
    H, NETWORKS, N, D, HIDDEN, ITEMS, stride_sum,
    BN: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, BLOCK: tl.constexpr, HAS_VALID: tl.constexpr,
    HAS_TOTALS: tl.constexpr, NEED_KEY: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a program's share of a network's keys: dk_j, and a row of sums for W₁, b₁, w₂ and b₂.

    There are few programs with many blocks of keys each, because the rows of sums are added up through memory. Every block
    computes its head's Σ d ln Ψ again, unless HAS_TOTALS: with very many keys the sum is passed in.
    """
    network = tl.program_id(1)
    rd, rh = tl.arange(0, BD), tl.arange(0, BH)
    w1, b1, w2 = _network(W1, B1, W2, network, rd, rh, D, HIDDEN)  # type: ignore[misc]
    grad_w1 = tl.zeros([BD, BH], tl.float32)
    grad_b1, grad_w2 = tl.zeros([BH], tl.float32), tl.zeros([BH], tl.float32)
    heads, blocks = H // NETWORKS, tl.cdiv(N, BN)
    for item in range(tl.program_id(0), ITEMS, tl.num_programs(0)):
        example = item // blocks
        batch, head = (example // heads).to(tl.int64), ((example % heads) * NETWORKS + network).to(tl.int64)
        row = (batch * H + head) * N
        grads, valid = GRAD + batch * stride_gb + head * stride_gh, VALID + batch * stride_vb + head * stride_vh
        # d logit_j = d ln Ψ_j − Ψ_j Σ d ln Ψ over the valid keys
        if HAS_TOTALS:
            total = tl.load(TOTALS + batch * H + head)
        else:
            sums = tl.zeros([BLOCK], tl.float32)
            for start in range(0, N, BLOCK):
                r = start + tl.arange(0, BLOCK)
                sums += tl.load(grads + r * stride_gn, mask=_used(valid, r, N, HAS_VALID), other=0.0)
            total = tl.sum(sums, 0)
        rn = (item % blocks) * BN + tl.arange(0, BN)
        used = _used(valid, rn, N, HAS_VALID)
        grad = tl.load(grads + rn * stride_gn, mask=used, other=0.0)
        grad = tl.where(used, grad - tl.exp(tl.load(OUT + row + rn, mask=used, other=0.0)) * total, 0.0)
        k = _keys(K + batch * stride_kb + head * stride_kh, rn, rd, stride_kn, N, D)
        hidden = _product(k, w1, WIDEN) + b1[None, :]
        grad_hidden = tl.where(hidden > 0.0, grad[:, None] * w2[None, :], 0.0)
        grad_w1 += _product(tl.trans(k), grad_hidden, WIDEN)
        grad_b1 += tl.sum(grad_hidden, 0)
        grad_w2 += tl.sum(tl.maximum(hidden, 0.0) * grad[:, None], 0)
        if NEED_KEY:
            grad_key = _product_for_keys(grad_hidden, tl.trans(w1), k, WIDEN)
            pointers = GRAD_K + (row + rn)[:, None] * D + rd[None, :]
            tl.store(pointers, grad_key.to(GRAD_K.dtype.element_ty), mask=(rn < N)[:, None] & (rd < D)[None, :])
    # a row of sums: W₁ of all networks, then b₁, w₂ and b₂, which cancels in the softmax
    place, in_hidden = SUMS + tl.program_id(0) * stride_sum, rh < HIDDEN
    matrix = place + network * D * HIDDEN + rd[:, None] * HIDDEN + rh[None, :]
    tl.store(matrix, grad_w1, mask=(rd < D)[:, None] & in_hidden[None, :])
    vectors = place + NETWORKS * D * HIDDEN
    tl.store(vectors + network * HIDDEN + rh, grad_b1, mask=in_hidden)
    tl.store(vectors + (NETWORKS + network) * HIDDEN + rh, grad_w2, mask=in_hidden)
    tl.store(vectors + 2 * NETWORKS * HIDDEN + network, 0.0)
