"""Settings and inputs that must never break anything: every hyperparameter of the paper, every dtype, every odd shape."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from bayesattn import AttentionConfig

# the same examples on every run and machine; nothing here depends on time
SETTINGS = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)

WEIBULL_K = (0.5, 1.0, 5.0, 10.0, 100.0, 1000.0, 2000.0)
SIGMA_Q = (1e-15, 1e-9, 1e-6, 0.1, 1.0)
SIGMA_P = (1.0, 10.0, 1e3, 1e9, 1e15)
GAMMA = (1e-15, 1e-10, 1e-6, 1e-2, 1.0)


def configs(variants: tuple[str, ...]) -> st.SearchStrategy[AttentionConfig]:
    return st.builds(
        AttentionConfig,
        st.sampled_from(variants),
        weibull_k=st.sampled_from(WEIBULL_K),
        gamma_alpha=st.sampled_from(GAMMA),
        gamma_beta=st.sampled_from(GAMMA),
        sigma_q=st.sampled_from(SIGMA_Q),
        sigma_p=st.sampled_from(SIGMA_P),
        mu_p=st.sampled_from((0.0, -3.0, 2.0)),
        preset=st.sampled_from(("paper", "official-code", "default")),
        kl_reduction=st.sampled_from((None, "sum", "row_mean", "mean")),
    )


DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64))
# one key, odd sizes; `test_empty` has the axes of length 0
SHAPES = st.tuples(
    st.sampled_from((1, 2)), st.sampled_from((1, 3)), st.sampled_from((1, 5)), st.sampled_from((1, 2, 7, 17, 33))
)
SEEDS = st.one_of(st.none(), st.integers(0, 2**63 - 1))
# shares of keys that are open; 0 gives rows, and whole examples, without any key
MASK_KINDS = st.sampled_from(("none", "entries", "keys", "rows", "nothing"))


def make_mask(kind: str, shape: tuple[int, int, int, int], generator: torch.Generator) -> torch.Tensor | None:
    b, h, m, n = shape
    if kind == "none":
        return None
    if kind == "nothing":
        return torch.zeros(1, 1, m, n, dtype=torch.bool)
    full = {"entries": (b, h, m, n), "keys": (b, 1, 1, n), "rows": (b, 1, m, 1)}[kind]
    return torch.rand(full, generator=generator) < 0.4


def make_values(shape: tuple[int, ...], size: float, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Uniform in ±size with both ends hit, as far as the dtype reaches."""
    values = (2.0 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1.0) * size
    ends = torch.rand(shape, generator=generator) < 0.2
    return torch.where(ends, values.sign() * size, values).to(dtype)
