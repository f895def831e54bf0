"""Squared gradients of attention scores for one output gradient, summed over the queries of each key.

With P = softmax(Φ) and O = P V, a gradient dO of the output gives the gradient of every score

    dΦ_ij = P_ij (dO_i · v_j − δ_i),    δ_i = Σ_j P_ij (dO_i · v_j)

A flash-style backward pass also forms dΦ, and adds it up into the gradients of Q and K. Here Σ_i dΦ_ij² is needed. The
scores are recomputed in blocks, without an m × n array: by Triton kernels on a GPU (`score_gradients_triton.py`), by torch
elsewhere and for calls that the kernels do not support (`why_not_kernel`).
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn.ops.attention.masking import masked_softmax
from bayesattn.ops.attention.reference import expand_heads
from bayesattn.ops.attention.support import HAS_TRITON, INTERPRETED
from bayesattn.precision import upcast, without_autocast

# entries per block of scores: small enough for a CPU's cache, large enough for its matrix products
BLOCK_ENTRIES = {"cpu": 2**17, "cuda": 2**25}
# entries of query or key up to which calls are batched: copying more takes longer than the saved launches
LARGEST_OF_MANY = 2**23
# entries of all queries of a batch, because the copies need memory
MOST_TOGETHER = 2**24
# largest head dimension that fits the kernels' tiles
WIDEST_HEAD = 256
# autograd nodes that only move or copy entries, and how many nodes are searched from an output to its attention
_MOVES = ("Transpose", "Clone", "View", "Permute", "UnsafeView", "ReshapeAlias")
_FARTHEST = 6


@dataclass(eq=False)
class ScoreGradients:
    """One attention call whose squared score gradients can be computed from the gradient of its output.

    Attributes:
        query, key, value, output: Tensors of the call.
        heads_last: Whether output and its gradient are [b, m, h, dv] instead of [b, h, m, dv].
        mask, bias, is_causal, scale, softcap: As in `statistics.row_statistics`.
    """

    query: Float[Tensor, "b h m d"]
    key: Float[Tensor, "b hk n d"]
    value: Float[Tensor, "b hk n dv"]
    output: Float[Tensor, "b _ _ dv"]
    heads_last: bool = False
    mask: Bool[Tensor, "..."] | None = None
    bias: Float[Tensor, "..."] | None = None
    is_causal: bool = False
    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        self.has_kernel = not why_not_kernel(self.query, self.key, self.value)
        # read here, because torch frees it after its own backward pass
        self.log_sum_exp = kept_log_sum_exp(self.output, self.query.shape[:3]) if self.has_kernel else None
        self._versions = [x._version for x in self.tensors()]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return query, key, value and output."""
        return self.query, self.key, self.value, self.output

    def check_unchanged(self) -> None:
        """Raise if a tensor of the call was changed in place since, because the squares would be wrong."""
        for name, x, version in zip(("query", "key", "value", "output"), self.tensors(), self._versions, strict=True):
            if x._version != version:
                raise RuntimeError(
                    f"the {name} of an attention call was changed in place after the call, so its score gradients cannot be "
                    "computed. Replace the in-place operation in the model by one that returns a new tensor"
                )

    def kind(self, grad_output: Tensor) -> tuple | None:
        """Return a key shared by calls that torch computes as one batch, or None for a call that is computed alone.

        Calls with a kernel are not batched: copying their inputs takes longer than one or two launches.
        """
        is_large = self.query.numel() > LARGEST_OF_MANY or self.key.numel() > LARGEST_OF_MANY
        has_rows = self.mask is not None and (self.mask.ndim != 4 or self.mask.shape[2] > 1)
        if self.has_kernel or is_large or has_rows or self.bias is not None:
            return None
        facts = [(x.shape, x.dtype, x.device) for x in (*self.tensors(), grad_output)]
        # the layers of a model share one mask tensor
        mask = None if self.mask is None else (self.mask.data_ptr(), self.mask.shape, self.mask.stride())
        return *facts, self.heads_last, mask, self.is_causal, self.scale, self.softcap


@torch.no_grad()
def squares_of_calls(calls: Sequence[tuple[ScoreGradients, Float[Tensor, "b _ _ dv"]]]) -> list[Float[Tensor, "b h n"]]:
    """Return Σ_i dΦ_ij² of attention calls, given with the gradients of their outputs.

    Calls of one kind are computed as one batch, because layers of small batches take longer to launch than to compute.
    """
    found: dict[int, Tensor] = {}
    groups: dict[object, list[int]] = {}
    for place, (call, grad) in enumerate(calls):
        groups.setdefault(call.kind(grad) or place, []).append(place)
    for members in groups.values():
        together = max(1, MOST_TOGETHER // max(calls[members[0]][0].query.numel(), 1))
        for start in range(0, len(members), together):
            part = members[start : start + together]
            squares = _of_alike([calls[i][0] for i in part], [calls[i][1] for i in part])
            found.update(zip(part, squares.unflatten(0, (len(part), -1)).unbind(), strict=True))
    return [found[place] for place in range(len(calls))]


def _of_alike(calls: Sequence[ScoreGradients], grads: Sequence[Tensor]) -> Float[Tensor, "cb h n"]:
    """Return the squares of calls of one kind, concatenated along the batch."""
    for call in calls:
        call.check_unchanged()
    first, mask = calls[0], calls[0].mask
    tensors = [(grad, *call.tensors()) for call, grad in zip(calls, grads, strict=True)]
    joined = tensors[0] if len(calls) == 1 else map(torch.cat, zip(*tensors, strict=True))
    grad, query, key, value, output = joined
    if first.heads_last:
        grad, output = grad.transpose(1, 2), output.transpose(1, 2)
    if mask is not None and mask.ndim == 4 and mask.shape[0] > 1 and len(calls) > 1:
        mask = mask.repeat(len(calls), 1, 1, 1)
    return squared_score_gradients(
        grad, query, key, value, output, first.log_sum_exp,
        mask=mask, bias=first.bias, is_causal=first.is_causal, scale=first.scale, softcap=first.softcap,
    )  # fmt: skip


@torch.no_grad()
def squared_score_gradients(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    output: Float[Tensor, "b h m dv"] | None = None,
    log_sum_exp: Float[Tensor, "b h m"] | None = None,
    *,
    mask: Bool[Tensor, "*#bh #m n"] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "b h n"]:
    """Return Σ_i dΦ_ij² per key, in float32 or wider.

    The kernels need `output`, for δ_i = O_i · dO_i, and a call that `why_not_kernel` allows; otherwise torch computes in
    blocks. `grad_output` is the gradient of a scalar with respect to the attention output, and `log_sum_exp` is
    ln Σ_j exp Φ_ij, recomputed if it was not kept (`kept_log_sum_exp`). Other arguments are as in
    `statistics.row_statistics`.
    """
    options = {"mask": _with_four_axes(mask), "bias": _with_four_axes(bias), "is_causal": is_causal}
    options |= {"scale": scale, "softcap": softcap}
    if output is None or why_not_kernel(query, key, value):
        with without_autocast(query.device.type):
            return _in_blocks(grad_output, query, key, value, **options)
    # imported here, because a machine without a GPU need not have triton
    from bayesattn.ops.attention import score_gradients_triton

    tensors = [grad_output, query, key, value, output]
    if len({x.dtype for x in tensors}) > 1:
        # under autocast a gradient, or a query after a rotary embedding, may have another dtype than the rest
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors[:4]))
        tensors = [x.to(dtype) for x in tensors]
    return score_gradients_triton.squared_score_gradients(*tensors, log_sum_exp=log_sum_exp, **options)


def kept_log_sum_exp(output: Tensor, shape: tuple[int, ...]) -> Float[Tensor, "b h m"] | None:
    """Return ln Σ_j exp Φ_ij per query, if torch's fused attention computed the output and keeps it for its gradient.

    The output may have been transposed or copied since. The result, of the given shape (b, h, m), is None for other outputs
    and for torch versions with other names.
    """
    node = output.grad_fn
    for _ in range(_FARTHEST):
        if node is None:
            return None
        name = type(node).__name__
        if name.startswith("ScaledDotProduct"):
            kept = getattr(node, "_saved_logsumexp", None)
            kept = getattr(node, "_saved_log_sumexp", None) if kept is None else kept
            return None if kept is None else _of_queries(kept, shape)
        if not name.startswith(_MOVES):
            return None
        node = node.next_functions[0][0]
    return None


def _of_queries(kept: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Return the LSE as [b, h, m]: some kernels add an axis of length 1, some pad to a multiple of their block."""
    b, h, m = shape
    kept = kept.squeeze(-1) if kept.ndim == 4 else kept
    return kept[..., :m] if kept.ndim == 3 and kept.shape[:2] == (b, h) and kept.shape[2] >= m else None


def why_not_kernel(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Return why the Triton kernels cannot run a call, or an empty string if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if query.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on {query.device.type}, not on a GPU"
    for x in (query, key, value):
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the inputs are {x.dtype}, not float32, bfloat16 or float16"
    width = max(query.shape[-1], value.shape[-1])
    if width > WIDEST_HEAD:
        return f"the head dimension is {width}, above {WIDEST_HEAD}"
    return "there are no keys" if key.shape[2] == 0 else ""


def _with_four_axes(x: Tensor | None) -> Tensor | None:
    """Return a mask or bias with axes for batch, head, query and key; missing axes get length 1."""
    if x is None:
        return None
    x = x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    # of a padding mask expanded to all queries, keep one row: it is then read once per block of keys
    return x[:, :, :1] if x.stride(2) == 0 else x


def _in_blocks(
    grad_output: Float[Tensor, "b h m dv"],
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    mask: Bool[Tensor, "#b #h #m n"] | None,
    bias: Float[Tensor, "#b #h #m #n"] | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> Float[Tensor, "b h n"]:
    b, h, m, _ = query.shape
    n = key.shape[2]
    total = query.new_zeros((b, h, n), dtype=torch.promote_types(query.dtype, torch.float32))
    valid, shut = None, None
    if mask is not None and mask.shape[2] == 1 and softcap is None and bias is None:
        # the matrix product adds padding as one row per example; examples of padding alone are set to 0 at the end
        valid, mask = mask[:, :, 0], None
        shut = total.new_zeros(valid.shape).masked_fill_(valid.any(dim=-1, keepdim=True) & ~valid, -torch.inf)
        shut = shut.expand(b, h, n).unsqueeze(2)
    mask, bias = (None if x is None else x.expand(b, h, m, n) for x in (mask, bias))
    on_tensor_cores = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if not on_tensor_cores or len({x.dtype for x in (query, key, value, grad_output)}) > 1:
        query, key, value, grad_output = upcast(query) * scale, upcast(key), upcast(value), upcast(grad_output)
        scale = 1.0
    key_t, value_t = (expand_heads(x, h).transpose(-2, -1) for x in (key, value))
    for part in _blocks(b, h, m, n, BLOCK_ENTRIES.get(query.device.type, BLOCK_ENTRIES["cpu"])):
        keys, rows = part[:2], part[2]
        scores = _product(query[part], key_t[keys], scale, None if shut is None else shut[keys])
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores += upcast(bias[part])
        allowed = None if mask is None else mask[part]
        if is_causal:
            positions = torch.arange(max(m, n), device=query.device)
            triangle = positions[:n] <= positions[:m][rows, None]
            allowed = triangle if allowed is None else allowed & triangle
        weights = masked_softmax(scores, allowed)
        # P ⊙ (dP − δ) in one pass, by the operator behind autograd's softmax
        grads = torch.ops.aten._softmax_backward_data(_product(grad_output[part], value_t[keys]), weights, -1, weights.dtype)
        total[keys] += _sum_of_squares(grads)
    return total if valid is None else total.masked_fill_(~valid, 0.0)


def _sum_of_squares(grads: Float[Tensor, "b h m n"]) -> Float[Tensor, "b h n"]:
    """Return the sum over queries; `grads` may be overwritten."""
    # a GPU reads each entry once for a norm, and three times otherwise; a CPU takes four times as long for a norm
    return torch.linalg.vector_norm(grads, dim=-2).square_() if grads.is_cuda else grads.square_().sum(dim=-2)


def _product(
    rows: Float[Tensor, "b h m d"],
    columns: Float[Tensor, "b h d n"],
    scale: float = 1.0,
    start: Float[Tensor, "b h 1 n"] | None = None,
) -> Float[Tensor, "b h m n"]:
    """Return start + scale · A B in float32 or wider; half precision (GPU only) is multiplied on tensor cores."""
    if rows.dtype not in (torch.bfloat16, torch.float16):
        found = rows @ columns if scale == 1.0 else rows @ columns * scale
        return found if start is None else found.add_(start)
    beta = 0.0 if start is None else 1.0
    start = rows.new_empty((1, 1, 1), dtype=torch.float32) if start is None else start.flatten(0, 1)
    found = torch.baddbmm(start, rows.flatten(0, 1), columns.flatten(0, 1), beta=beta, alpha=scale, out_dtype=torch.float32)
    return found.unflatten(0, rows.shape[:2])


def _blocks(b: int, h: int, m: int, n: int, limit: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices of examples, heads and queries with about `limit` scores each."""
    rows = max(1, min(m, limit // max(n, 1)))
    heads = max(1, min(h, limit // max(rows * n, 1)))
    examples = max(1, min(b, limit // max(h * rows * n, 1))) if heads == h else 1
    for i, j, k in product(range(0, b, examples), range(0, h, heads), range(0, m, rows)):
        yield slice(i, i + examples), slice(j, j + heads), slice(k, k + rows)
