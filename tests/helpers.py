"""Independent oracles and shared cases: written from the paper and from Random123, not from the library's code."""

import math

import numpy as np
import pytest
import torch
from scipy.special import gammaln
from torch import Tensor

from bayesattn import AttentionConfig

# every random check is set so that a fresh seed would break it with at most this probability (five standard errors)
STANDARD_ERRORS = 5.0
FAILURE_RATE = math.erfc(STANDARD_ERRORS / math.sqrt(2.0))

STOCHASTIC = ("BAM-NOKL", "BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC")
WITH_KL = ("BAM-LF", "BAM-LC", "BAM-WF", "BAM-WC")
CONTEXTUAL = ("BAM-LC", "BAM-WC")
PRESETS = ("paper", "official-code", "default")
REDUCTIONS = ("sum", "row_mean", "mean")
MASKS = ("none", "full", "keys", "causal", "heads", "broadcast-query", "dead-rows", "nothing")


def make_mask(kind: str, b: int, h: int, m: int, n: int) -> Tensor | None:
    """Boolean masks of every shape and kind a caller may pass; True means attend."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 0] = True  # at least one key a row, except where a row without any is the point
        return mask

    if kind == "none":
        return None
    if kind == "full":
        return draw(b, h, m, n)
    if kind == "keys":
        return draw(b, 1, 1, n)
    if kind == "causal":
        return torch.ones(m, n, dtype=torch.bool).tril()
    if kind == "heads":
        return draw(h, 1, n)
    if kind == "broadcast-query":
        return torch.rand((b, 1, m, 1), generator=generator) < 0.7
    if kind == "dead-rows":
        mask = draw(b, h, m, n)
        mask[:, :, 0] = False
        mask[..., n // 2] = False  # a key nobody may attend to
        return mask
    assert kind == "nothing"
    return torch.zeros(b, 1, m, n, dtype=torch.bool)


def random_log_prior(b: int, h: int, n: int, mask: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """ln Ψ over the keys that some query may attend to; −inf at the others."""
    logits = torch.randn(b, h, 1, n, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    if mask is not None:
        used = mask.expand(b, -1, -1, n) if mask.ndim == 4 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        used = used.any(dim=-2, keepdim=True).any(dim=1, keepdim=True)
        logits = logits.masked_fill(~used, -torch.inf)
    return torch.nan_to_num(torch.log_softmax(logits, dim=-1), nan=0.0, neginf=-torch.inf).to(dtype)


def kl_weibull_gamma_oracle(phi, k, alpha, beta):
    """KL in the paper's own letters, with λ instead of Φ (Sec. 3.2)."""
    lam = np.exp(phi) / math.gamma(1.0 + 1.0 / k)
    euler = np.euler_gamma
    terms = euler * alpha / k - alpha * np.log(lam) + math.log(k) + beta * lam * math.gamma(1.0 + 1.0 / k)
    return terms - euler - 1.0 - alpha * math.log(beta) + gammaln(alpha)


def kl_lognormal_oracle(phi, sigma_q, mu_p, sigma_p):
    """KL of two Gaussians over the logarithm."""
    mu_q = phi - sigma_q**2 / 2
    return math.log(sigma_p / sigma_q) + (sigma_q**2 + (mu_q - mu_p) ** 2) / (2 * sigma_p**2) - 0.5


def kl_oracle(scores: Tensor, log_prior: Tensor | None, mask: Tensor | None, config: AttentionConfig) -> np.ndarray:
    """KL of each example, entry by entry in Python loops: the definition, with nothing clever."""
    b, h, m, n = scores.shape
    phi_all = scores.detach().double().numpy()
    keep = np.ones((b, h, m, n), dtype=bool) if mask is None else np.broadcast_to(mask.numpy(), (b, h, m, n))
    psi = None if log_prior is None else np.broadcast_to(np.exp(log_prior.detach().double().numpy()), (b, h, 1, n))
    result = np.zeros(b)
    for example in range(b):
        total, entries, rows = 0.0, 0, 0
        for head in range(h):
            for query in range(m):
                keys = np.flatnonzero(keep[example, head, query])
                if keys.size == 0:
                    continue
                phi = phi_all[example, head, query, keys]
                if config.score_form == "log_softmax":
                    phi = phi - np.log(np.exp(phi).sum())
                prior = None if psi is None else psi[example, head, 0, keys]
                if config.family == "weibull":
                    alpha = config.gamma_alpha if prior is None else prior
                    if prior is not None and config.alpha_form == "beta_psi":
                        alpha = config.gamma_beta * prior
                    values = kl_weibull_gamma_oracle(phi, config.weibull_k, alpha, config.gamma_beta)
                else:
                    mu_p = config.mu_p if prior is None else prior
                    if prior is not None and config.mu_form == "log_psi":
                        mu_p = np.log(prior)
                    values = kl_lognormal_oracle(phi, config.sigma_q, mu_p, config.sigma_p)
                total += values.sum()
                entries, rows = entries + keys.size, rows + 1
        count = {"sum": 1, "row_mean": max(rows, 1), "mean": max(entries, 1)}[str(config.kl_reduction)]
        result[example] = total / count
    return result


def philox_scalar(counter: tuple[int, ...], key: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """Philox-4x32 in Python integers, as the Random123 paper writes it."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high_0, low_0 = divmod(0xD2511F53 * c[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def assert_within_standard_errors(draws: Tensor, expected: float, context: object = "") -> None:
    """The mean of `draws` is `expected`, up to `STANDARD_ERRORS` of its own standard error."""
    draws = draws.double().flatten()
    error = float(draws.std() / math.sqrt(draws.numel()))
    distance = abs(float(draws.mean()) - expected)
    assert distance <= STANDARD_ERRORS * error + 1e-12, f"{context}: {float(draws.mean())} vs {expected} ± {error}"


def number(scalar: Tensor) -> float:
    """torch warns when a tensor with a graph becomes a Python number, and warnings are errors here."""
    return float(scalar.detach())


def assert_finite(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or bool(torch.isfinite(tensor).all()), tensor


def no_type_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a wrong type reach the library's own checks: users run without the type checker that the suite runs with."""
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
