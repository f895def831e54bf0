"""Masks of the m × n scores and sums over the entries that exist.

A row without keys gives 0 and gradient 0, never NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Mask = Bool[Tensor, "*#bh #m n"] | None

# a bias up to −80 is a mask: e^-80 is 2e-35, so next to any other key of the row the weight vanishes in float32. Libraries
# mask with −inf, the lowest number of the dtype, −1e4, −1e9 or (Swin) −100 plus a small learned bias
FORBIDDEN = -80.0


def split_bias(bias: Float[Tensor, "..."]) -> tuple[Bool[Tensor, "..."], Float[Tensor, "..."]]:
    """Split an additive bias into (mask of the entries that exist, their bias).

    Entries up to `FORBIDDEN` do not exist, so results do not depend on the value that stands for −inf. NaN must reach the
    output and is kept.
    """
    forbidden = bias <= FORBIDDEN
    return ~forbidden, bias.masked_fill(forbidden, 0.0)


def masked_softmax(scores: Float[Tensor, "*bh m n"], mask: Mask) -> Float[Tensor, "*bh m n"]:
    """Return the softmax over the allowed keys; rows without any are 0."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    has_key = mask.any(dim=-1, keepdim=True)
    return torch.softmax(_close(scores, mask, has_key), dim=-1).masked_fill(~has_key, 0.0)


def masked_logsumexp(scores: Float[Tensor, "*bh m n"], mask: Mask) -> Float[Tensor, "*bh m"]:
    """Return ln Σ_j exp Φ_ij over the allowed keys; rows without any are 0."""
    if scores.shape[-1] == 0:
        return scores.sum(dim=-1)
    if mask is None:
        return torch.logsumexp(scores, dim=-1)
    has_key = mask.any(dim=-1, keepdim=True)
    return torch.logsumexp(_close(scores, mask, has_key), dim=-1).masked_fill(~has_key.squeeze(-1), 0.0)


def _close(scores: Tensor, mask: Tensor, has_key: Tensor) -> Tensor:
    # rows without a key are filled with 0, not −inf, which would give NaN
    shut = torch.zeros((), dtype=scores.dtype, device=scores.device).masked_fill(has_key, -math.inf)
    return torch.where(mask, scores, shut)


@dataclass(frozen=True)
class Allowed:
    """The entries (i, j) that exist under a boolean mask, the causal triangle j ≤ i, and a window of the triangle.

    A triangle without mask and window is never materialized: its sums are cumulative sums.

    Attributes:
        mask: True where a query may attend; None allows every entry.
        is_causal: Whether j ≤ i is also required.
        shape: (b, h, m, n) of the scores.
        window: If given, j > i − window is also required; only with `is_causal`.
    """

    mask: Bool[Tensor, "#b #h #m n"] | None
    is_causal: bool
    shape: tuple[int, int, int, int]
    window: int | None = None

    @property
    def _is_triangle(self) -> bool:
        return self.is_causal and self.mask is None and self.window is None

    def dense(self, device: torch.device) -> Bool[Tensor, "#b #h #m n"] | None:
        """Return one mask of the entries, or None if all exist."""
        if not self.is_causal:
            return self.mask
        causal = torch.ones(self.shape[-2:], dtype=torch.bool, device=device).tril()[None, None]
        if self.window is not None:
            causal = causal.triu(1 - self.window)
        return causal if self.mask is None else self.mask & causal

    def sum_over_keys(self, x: Float[Tensor, "#b #h 1 n"]) -> Float[Tensor, "#b #h #m"]:
        """Return Σ_j x_j over the keys of each query."""
        m, n = self.shape[-2:]
        if self._is_triangle:
            sums = x.squeeze(-2).cumsum(dim=-1)
            return torch.cat([sums, sums[..., -1:].expand(*sums.shape[:-1], m - n)], dim=-1) if m > n else sums[..., :m]
        mask = self.dense(x.device)
        return x.sum(dim=-1) if mask is None else (x * mask).sum(dim=-1)

    def sum_over_queries(self, x: Float[Tensor, "b h m d"]) -> Float[Tensor, "b h #n d"]:
        """Return Σ_i x_i over the queries of each key, in float32 or wider; one row if all keys share the sum.

        The sum is meaningless for keys that no query may attend to.
        """
        m, n = self.shape[-2:]
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self._is_triangle:
            sums = x.flip(-2).cumsum(dim=-2, dtype=dtype).flip(-2)
            return torch.nn.functional.pad(sums, (0, 0, 0, n - m)) if n > m else sums[:, :, :n].contiguous()
        mask = self.dense(x.device)
        if mask is None or mask.shape[-2] == 1:
            return x.sum(dim=-2, keepdim=True, dtype=dtype)
        return mask.to(dtype).transpose(-2, -1) @ x.to(dtype)

    def weighted_keys(self, weight: Float[Tensor, "b h 1 n"], key: Float[Tensor, "b hk n d"]) -> Float[Tensor, "b h #m d"]:
        """Return Σ_j weight_j k_j over the keys of each query, in float32; one row if all queries share the sum."""
        (b, h, m, n), key_heads = self.shape, key.shape[1]
        if self._is_triangle:
            sums = (weight.transpose(-2, -1) * key.repeat_interleave(h // key_heads, dim=1)).cumsum(dim=-2)
            return (
                torch.cat([sums, sums[:, :, -1:].expand(-1, -1, m - n, -1)], dim=-2)
                if m > n
                else sums[:, :, :m].contiguous()
            )
        mask = self.dense(key.device)
        if mask is not None:
            weight = weight * mask
        # one product with the stored keys, with the query heads of a key head side by side; float16 is widened, because
        # the sum over keys could overflow
        key = key.to(torch.float32) if key.dtype == torch.float16 else key
        grouped = weight.reshape(b, key_heads, -1, n).to(key.dtype)
        return (grouped @ key).reshape(b, h, -1, key.shape[-1]).to(torch.float32)

    def queries_per_key(self, like: Tensor) -> Float[Tensor, "#b #h 1 n"] | int:
        """Return the number of queries that may attend to each key."""
        m, n = self.shape[-2:]
        if self._is_triangle:
            return (m - torch.arange(n, dtype=like.dtype, device=like.device)).clamp(min=0.0).view(1, 1, 1, n)
        mask = self.dense(like.device)
        return m if mask is None else mask.sum(dim=-2, keepdim=True, dtype=like.dtype) * (m // max(mask.shape[-2], 1))

    def has_key(self, device: torch.device) -> Bool[Tensor, "#b #h #m"] | None:
        """Return which queries have a key, or None if all do (without a window, every causal row has key 0)."""
        m, n = self.shape[-2:]
        if self.mask is None:
            last = None if self.window is None else n + self.window - 1
            return None if last is None or last >= m else (torch.arange(m, device=device) < last).view(1, 1, m)
        mask = self.dense(device)
        return None if mask is None else mask.any(dim=-1)

    def has_query(self, device: torch.device) -> Bool[Tensor, "#b #h 1 n"] | None:
        """Return which keys have a query, or None if all do."""
        m, n = self.shape[-2:]
        if self.is_causal and self.mask is None and n > m:
            return (torch.arange(n, device=device) < m).view(1, 1, 1, n)
        mask = None if self.mask is None else self.dense(device)
        return None if mask is None else mask.any(dim=-2, keepdim=True)

    def count(self, per_entry: bool) -> Float[Tensor, " #b"] | int:
        """Return the number of entries (`per_entry`) or of rows with an entry, per example and at least 1."""
        _, h, m, n = self.shape
        if self.mask is None:
            rows = m if self.window is None else min(m, n + self.window - 1)
            return max(h * (num_entries(m, n, self.is_causal, self.window) if per_entry else rows), 1)
        mask = self.dense(self.mask.device)
        assert mask is not None
        valid = mask if per_entry else mask.any(dim=-1)
        # a mask that is broadcast over heads or queries counts once per head or query
        copies = (h * m * (n if per_entry else 1)) // max(math.prod(valid.shape[1:]), 1)
        return (valid.flatten(1).sum(dim=-1) * copies).clamp(min=1).to(torch.float32)


def num_entries(m: int, n: int, is_causal: bool, window: int | None) -> int:
    """Return the number of entries of m queries and n keys without a mask; arguments as in `Allowed`."""
    if not is_causal:
        return m * n
    # the entries before the window form a smaller triangle
    return _triangle(m, n) - (0 if window is None else _triangle(max(m - window, 0), n))


def _triangle(m: int, n: int) -> int:
    short = min(m, n)
    return short * (short + 1) // 2 + max(m - n, 0) * n


def look_once(x: Tensor, name: str, question: Callable[[Tensor], Tensor]) -> bool | None:
    """Return a boolean computed from a tensor's values, once per version of the tensor.

    On a GPU the host waits for it. It is None where the host cannot wait: in a compiler, `vmap` or (if not yet cached)
    CUDA-graph capture.

    Args:
        x: The tensor; the result is cached on it.
        name: Name of the attribute that caches the result.
        question: Computes the boolean from the tensor.
    """
    if torch.compiler.is_compiling() or x.is_meta or torch._C._functorch.is_batchedtensor(x):  # type: ignore[attr-defined]
        return None
    # inference tensors have no version, and cannot change outside inference mode
    now = -1 if x.is_inference() else x._version
    version, answer = getattr(x, name, (None, None))
    if version == now:
        return answer
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    answer = bool(question(x))
    setattr(x, name, (now, answer))
    return answer
