"""Repeat a call of `attention` with other tensors, without its checks and lookups.

A model makes the same call in every layer. The checks, the choice of a backend and the lookup of launches depend only on
shapes, strides, types, devices and settings. The caller keeps their result, a `Repeated`, for tensors of the same kind.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesattn.config import AttentionConfig
from bayesattn.entropy import is_observing_entropy
from bayesattn.functional import dense
from bayesattn.noise import draw_seed, keyed
from bayesattn.ops.attention.masking import Allowed
from bayesattn.ops.attention.support import Call
from bayesattn.ops.prior.nodes import KeyPrior


def signature(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple | None:
    """Return the properties that the tensors of two calls must share, or None if this call needs its own checks.

    It does inside a compiler, a function transform, `keyed_noise` or `observe_entropy`.
    """
    if (
        torch.compiler.is_compiling()
        or keyed.is_open()
        or is_observing_entropy()
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    # devices by number: a comparison of devices is slower
    found = (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype,
        value.dtype, query.get_device(), key.get_device(), value.get_device(),
    )  # fmt: skip
    return found if mask is None else (*found, mask.shape, mask.stride(), mask.dtype, mask.get_device())


class Repeated:
    """A call of the kernels for Weibull attention whose arguments have been checked.

    `run` launches the kernels, `arguments` are its arguments other than tensors, `need_kl` is whether it computes a KL, and
    `returns_zeros` is whether to return a KL of 0.
    """

    def __init__(self, run: Any, arguments: tuple, need_kl: bool, returns_zeros: bool) -> None:
        self.run, self.arguments, self.need_kl, self.returns_zeros = run, arguments, need_kl, returns_zeros

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, weights: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and KL of one draw; `weights` are the four of the prior's network, or four times None."""
        seed = draw_seed(query.device)
        if self.need_kl:
            need_prior_key, *rest = self.arguments
            return self.run(query, key, value, None, weights, need_prior_key, mask, seed, *rest)
        output = self.run(query, key, value, mask, None, seed, *self.arguments)[0]
        return output, dense.zeros_like_kl(query) if self.returns_zeros else None


def repeated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    config: AttentionConfig,
    log_prior: Tensor | KeyPrior | None,
    mask: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
    need_kl: bool,
) -> Repeated | None:
    """Return a `Repeated` for a call of `attention` that has just succeeded, or None if the call is not simple.

    A simple call samples Weibull attention with the kernels, has no bias, and its prior is fixed or a `KeyPrior`.
    """
    wants_kl = need_kl and config.has_kl
    if config.family != "weibull" or isinstance(log_prior, Tensor):
        return None
    call = Call(query, key, value, config, None, scale, None, dropout_p, wants_kl, is_separable=False)
    if dense.choose("auto", call) != "triton":
        return None
    from bayesattn.ops.attention import launch, triton, weibull, weibull_node

    if query.shape[-1] % launch.ROW_MULTIPLE or value.shape[-1] % launch.ROW_MULTIPLE:
        return None
    if any(launch.aligned(x) is not x for x in (query, key, value)) or 0 in (*query.shape, *key.shape):
        return None
    strength = 1.0 / config.weibull_k
    if not wants_kl:
        numbers = (True, strength, scale, dropout_p, is_causal, window, False, False)
        return Repeated(triton.fused_or_plain, numbers, False, need_kl)
    b, h, m, _ = query.shape
    n = key.shape[2]
    has_keys = mask is None or (mask.shape == (b, 1, 1, n) and mask.is_contiguous())
    if not has_keys or n > weibull_node.prior_launch.MANY_KEYS:
        return None
    if not weibull_node.is_one_node(log_prior, Allowed(mask, is_causal, (b, h, m, n), window), config):
        return None
    noise, band = launch.Noise(True, strength, dropout_p, False), launch.Band(is_causal, window)
    kind = weibull_node.Kind(band, weibull.Divergence.of(config), noise, scale)
    w_in = None if log_prior is None else log_prior.weights[0]
    plan = weibull_node.plan_for(query, key, value, None, w_in, mask is not None, kind)
    needs_key = log_prior is not None and not log_prior.is_detached
    return Repeated(weibull_node.run, (needs_key, kind, plan), True, False)
