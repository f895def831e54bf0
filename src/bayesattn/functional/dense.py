"""Attention from scores to weights, and from query, key and value to output."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from bayesattn import checks
from bayesattn.config import AttentionConfig
from bayesattn.entropy import is_observing_entropy, note_row_entropy
from bayesattn.noise import keyed
from bayesattn.noise.specification import Seed
from bayesattn.ops.attention import blocked, reference
from bayesattn.ops.attention.gram import is_separable
from bayesattn.ops.attention.kl import kl_from_scores
from bayesattn.ops.attention.masking import Allowed, masked_softmax, split_bias
from bayesattn.ops.attention.statistics import row_statistics, score_statistics
from bayesattn.ops.attention.support import Call, why_not_blocked, why_not_triton
from bayesattn.ops.prior.nodes import KeyPrior
from bayesattn.precision import as_autocast, shared, upcast, without_autocast
from bayesattn.scalars import check_choice, check_rate

Backend = Literal["auto", "reference", "blocked", "triton"]
BACKENDS = get_args(Backend)


def attention_weights(
    scores: Float[Tensor, "*bh m n"],
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "#b #h 1 n"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    seed: Seed | None = None,
    sample: bool = True,
    need_kl: bool = True,
    check_finite: bool = False,
) -> tuple[Float[Tensor, "*bh m n"], Float[Tensor, " b"] | None]:
    """Turn the scores of any alignment function into attention weights.

        W = softmax(log S),   S ~ Weibull or Lognormal with E[S] = exp(Φ)        (Sec. 3.2)

    Args:
        scores: Φ, before masking and before any softmax; `b h m n`, `b m n` or `m n`.
        config: Posterior, prior and conventions.
        log_prior: ln Ψ from a contextual prior, one value per key; BAM-LC and BAM-WC need it if `need_kl`.
        mask: Boolean, True where a query may attend, broadcastable to `scores`.
        seed: The same seed gives the same draw; None draws from torch's generator, or per example inside `keyed_noise`.
        sample: False gives the posterior mean, softmax(Φ).
        need_kl: Whether to compute the KL.
        check_finite: Raise an error on NaN or infinity in the inputs (for debugging: it waits for the device).

    Returns:
        Weights in the dtype of `scores`, and the KL per example (zeros for variants without one, None without `need_kl`).

    Raises:
        ValueError: An argument has a wrong type, shape or value.

    Example:
        >>> import torch
        >>> config = AttentionConfig("BAM-WF", weibull_k=5)
        >>> weights, kl = attention_weights(torch.zeros(2, 1, 3, 4), config=config, seed=0)
        >>> weights.shape, kl.shape, bool(torch.allclose(weights.sum(-1), torch.ones(2, 1, 3)))
        (torch.Size([2, 1, 3, 4]), torch.Size([2]), True)
    """
    checks.floating("scores", scores)
    if not 2 <= scores.ndim <= 4:
        raise ValueError(f"scores must have shape (b, h, m, n), (b, m, n) or (m, n), got {tuple(scores.shape)}")
    shape = scores.shape
    # the head axis comes after the batch: three axes (b, m, n) become (b, 1, m, n)
    full = scores.reshape((*shape[:-2], *([1] * (4 - len(shape))), *shape[-2:]))
    if isinstance(mask, Tensor) and mask.ndim == 3 and len(shape) == 3:
        mask = mask.unsqueeze(1)
    mask = checks.mask(mask, tuple(full.shape))
    checks.log_prior(log_prior, tuple(full.shape), config, need_kl)
    checks.same_device("scores", scores.device, mask=mask, log_prior=log_prior)
    if check_finite:
        checks.finite(scores=scores, log_prior=log_prior, mask=mask)
    with without_autocast(scores.device.type):
        full = upcast(full)
        if sample and config.is_stochastic:
            seed = keyed.next_seeds(full.shape[0], full.device) if seed is None else seed
            weights = reference.sample_weights(full, mask, seed, config)
        else:
            weights = masked_softmax(full, mask)
        kl = _kl(full, log_prior, mask, config) if need_kl else None
        if is_observing_entropy():
            rows = score_statistics(full, mask)
            note_row_entropy(rows.entropy, rows.keys)
    return weights.to(scores.dtype).reshape(shape), kl


def attention(
    query: Float[Tensor, "b h m d"],
    key: Float[Tensor, "b hk n d"],
    value: Float[Tensor, "b hk n dv"],
    *,
    config: AttentionConfig,
    log_prior: Float[Tensor, "#b prior_heads 1 n"] | KeyPrior | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    bias: Float[Tensor, "..."] | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Seed | None = None,
    sample: bool = True,
    need_kl: bool = True,
    backend: Backend = "auto",
    check_finite: bool = False,
) -> tuple[Float[Tensor, "b h m dv"], Float[Tensor, " b"] | None]:
    """Compute Bayesian dot-product attention: O = W V with W sampled around softmax(scale · Q Kᵀ + bias).

    With `sample=False` the output is bit-identical to `torch.nn.functional.scaled_dot_product_attention` of the same
    arguments.

    Args:
        query: Queries.
        key: Keys; `hk` must divide the number of query heads (grouped-query attention).
        value: Values.
        config: Posterior, prior and conventions.
        log_prior: ln Ψ from a contextual prior, one value per key: per query head, per key head, or shared by all heads. Or
            the result of `ContextualPrior.fused`, from which the kernels compute ln Ψ.
        mask: Boolean, True where a query may attend; combined with `is_causal`.
        bias: Added to the scores, broadcastable to `b h m n`; −80 or less means that a query may not attend.
        is_causal: Whether query i attends only to keys up to i.
        window: With `is_causal`, query i attends only to the last `window` of these keys (a sliding window).
        scale: Factor of the dot product; None is 1/√d.
        dropout_p: Dropout rate of the weights; the KL does not depend on it.
        seed: The same seed gives the same draw, dropout included, on every backend; None draws from torch's generator, or
            per example inside `keyed_noise`.
        sample: False gives the posterior mean.
        need_kl: Whether to compute the KL.
        backend: `auto` is the fastest that supports the call; any other runs or raises an error.
        check_finite: Raise an error on NaN or infinity in the inputs (for debugging: it waits for the device).

    Returns:
        Output in the dtype of `value`, and the KL per example as in `attention_weights`.

    Raises:
        ValueError: An argument has a wrong type, shape or value.

    Example:
        >>> query, key, value = (torch.randn(2, 4, 7, 16) for _ in range(3))  # batch, heads, tokens, features
        >>> output, kl = attention(query, key, value, config=AttentionConfig("BAM-WF"), seed=0)
        >>> output.shape, kl.shape
        (torch.Size([2, 4, 7, 16]), torch.Size([2]))
    """
    query, key, value = as_autocast(query, key, value)
    shape = checks.query_key_value(query, key, value)
    checks.window(window, is_causal)
    given = Allowed(checks.mask(mask, shape), is_causal, shape, window)
    waiting, ready = None, None
    if isinstance(log_prior, KeyPrior):
        waiting = log_prior
    else:
        ready = checks.log_prior(log_prior, shape, config, need_kl, key_heads=key.shape[1])
    given_prior = ready if waiting is None else waiting.weights[0]
    checks.bias(bias, shape)
    checks.same_device("query", query.device, key=key, value=value, mask=mask, log_prior=given_prior, bias=bias)
    check_rate("dropout_p", dropout_p)
    check_choice("backend", backend, BACKENDS)
    allowed, added = given, bias
    if bias is not None:
        visible, added = split_bias(bias)
        visible = visible if given.mask is None else given.mask & visible
        allowed = Allowed(checks.mask(visible, shape), is_causal, shape, window)
    if check_finite:
        prior = ready if waiting is None else waiting.log_prior()
        checks.finite(query=query, key=key, value=value, bias=added, log_prior=prior, mask=allowed.mask)
    if is_observing_entropy():
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        options = {"mask": allowed.mask, "bias": added, "is_causal": is_causal, "scale": factor}
        rows = row_statistics(query, key, **options)
        note_row_entropy(rows.entropy, rows.keys)
    if sample and config.is_stochastic:
        seed = keyed.next_seeds(query.shape[0], query.device) if seed is None else seed
        wants_kl = need_kl and config.has_kl
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        call = Call(query, key, value, config, added, factor, seed, dropout_p, wants_kl, is_separable(allowed))
        chosen = choose(backend, call)
        prior = waiting if waiting is None or chosen == "triton" else waiting.log_prior()
        options = {
            "config": config,
            "log_prior": ready if prior is None else prior,
            "allowed": allowed,
            "scale": factor,
            "need_kl": wants_kl,
        }
        if chosen == "triton":
            # imported here, because a machine without a GPU need not have triton
            from bayesattn.ops.attention import triton

            output, kl = triton.attention(query, key, value, seed=seed, dropout_p=dropout_p, **options)
        else:
            with without_autocast(query.device.type):
                if chosen == "blocked":
                    output, kl = blocked.attention(query, key, value, **options)
                else:
                    options |= {"bias": added, "seed": seed, "dropout_p": dropout_p}
                    output, kl = reference.attention(query, key, value, **options)
        return output, zeros_like_kl(query) if need_kl and kl is None else kl
    kl = None
    if need_kl:
        ready = ready if waiting is None else waiting.log_prior()
        query, key = shared(query), shared(key)
        with without_autocast(query.device.type):
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            scores = reference.dot_product_scores(query, key, scale=factor, bias=added)
            kl = _kl(scores, ready, allowed.dense(query.device), config)
    return _mean_attention(query, key, value, given, bias, dropout_p, scale), kl


def choose(backend: Backend, call: Call) -> Backend:
    """Return the backend of a sampled call; one given by name is never replaced by another."""
    if backend == "auto":
        if call.query.device.type == "cuda":
            return "reference" if why_not_triton(call) else "triton"
        # torch.compile fuses the reference, but could only unroll the loop over blocks
        return "reference" if torch.compiler.is_compiling() or why_not_blocked(call) else "blocked"
    reason = {"triton": why_not_triton, "blocked": why_not_blocked}.get(backend, lambda _: "")(call)
    if reason:
        raise ValueError(f"backend {backend!r} cannot be used here: {reason}. Use 'auto' or 'reference'")
    return backend


def _mean_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Allowed,
    bias: Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Call torch's attention with the arguments that a user would pass, so that torch chooses its backend as usual."""
    mask, is_causal = allowed.mask, allowed.is_causal
    if is_causal and (mask is not None or bias is not None or allowed.window is not None):
        mask, is_causal = allowed.dense(query.device), False
    if bias is not None and mask is not None:
        bias = torch.where(mask, bias, -torch.inf)
    attn_mask = mask if bias is None else bias.to(query.dtype)
    enable_gqa = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _kl(scores: Tensor, log_prior: Tensor | None, mask: Tensor | None, config: AttentionConfig) -> Tensor:
    return kl_from_scores(scores, log_prior, mask, config) if config.has_kl else zeros_like_kl(scores)


def zeros_like_kl(like: Tensor) -> Tensor:
    """Return a KL of 0 per example, for variants without a KL."""
    return torch.zeros(like.shape[0], dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
